"""Times of a call: in the thread that calls, or on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[], Any]

_LEAST, _MOST = 9, 200  # calls
_LONGEST_HOLD = 0.2  # seconds
_CYCLES = 2e9  # per second, of any GPU, roughly


def host_time(
    calls: Sequence[Call], seconds: float, most: int = _MOST, share: float = 0.25
) -> float:
    """The seconds that `share` of the calls do not exceed; they run in turn for so many seconds.

    The first call is not counted. The share is below a half because other work of the machine makes
    calls longer, never shorter. The time includes freeing the output, as in a run.
    """
    calls[0]()
    times: list[float] = []
    spent = 0.0
    while len(times) < most and (spent < seconds or len(times) < _LEAST) and spent < 10 * seconds:
        call = calls[(1 + len(times)) % len(calls)]
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        spent += times[-1]
    return sorted(times)[int(share * len(times))]


def cuda_time(calls: Sequence[Call], device: int, seconds: float) -> tuple[float, float]:
    """Seconds of a call on the GPU in a full queue, and seconds the host takes to launch it."""
    import torch

    with torch.cuda.device(device):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        calls[-1]()
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        count = max(2, min(100, int(seconds / max(whole, 1e-6))))
        times = []
        for number in range(count):
            began = time.perf_counter()
            calls[number % len(calls)]()
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        host = statistics.median(times)
        repeats = 3 if whole * count < seconds * 2 else 1
        gpu = statistics.median(_batch(calls, count, host * count) for _ in range(repeats))
    return gpu, host


def _batch(calls: Sequence[Call], count: int, launching: float) -> float:
    """GPU seconds of each of so many calls; the GPU waits until all are launched."""
    import torch

    cuda: Any = torch.cuda  # it has no types for these
    start = cuda.Event(enable_timing=True)
    end = cuda.Event(enable_timing=True)
    cuda._sleep(int(min(_LONGEST_HOLD, 1.5 * launching + 1e-4) * _CYCLES))
    start.record()
    for number in range(count):
        calls[number % len(calls)]()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / count
