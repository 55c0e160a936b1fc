"""Measures the figures of this machine's devices and links, in seconds all told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roost.presets import machine
from roost.presets.clock import cuda_time, host_time

DTYPES = ("float32", "bfloat16", "float16")
_SECONDS = 0.1  # for each figure
_LARGEST = 8192  # rows of a matrix
_SMALL, _LARGE = 4096, 128 * 2**20  # bytes of the transfers that give latency and bandwidth
# Bytes of an op of the CPU and of one of a GPU, and how many of these.
_AROUND, _BUSY, _PASSES = 4 * 2**20, 2**30, 6
# Bytes of what ops make, and how often each is sent.
_SENT, _SENDS = (2**20, 4 * 2**20, 16 * 2**20), 15
# New memory costs more than the copying where there is much of it: as large as what models send.
_ACTIVATION = 16 * 2**20

Clock = Callable[[Callable[[], Any]], float]


def of_cpu(threads: int, cores: set[int] | None = None) -> dict[str, Any]:
    """Figures of a device of the kind `cpu` with so many threads, and cores where given."""
    cpu = torch.device("cpu")
    size = min(max(_LARGE, 4 * machine.cache_bytes()), machine.available_memory() // 8)
    with machine.OwnThread(threads, cores) as thread:
        return thread(lambda: _device(cpu, lambda call: host_time([call], _SECONDS), size, 0.02))  # type: ignore[no-any-return]


def of_gpu(number: int) -> dict[str, Any]:
    device = torch.device("cuda", number)
    size = min(2**30, machine.gpu_memory(number) // 8)
    found = _device(device, lambda call: cuda_time([call], number, _SECONDS)[0], size, 0.002)
    one = torch.ones(1, device=device)
    found["launch_overhead"] = cuda_time(
        [lambda: torch.ops.aten.add.Tensor(one, one)], number, _SECONDS
    )[1]
    torch.cuda.empty_cache()
    return found


def _device(device: torch.device, clock: Clock, size: int, enough: float) -> dict[str, Any]:
    """A matrix product that takes `enough` seconds is large enough; `size` bytes are copied for the
    bandwidth."""
    one = torch.ones(1, device=device)
    rates = {dtype: _matmul_rate(getattr(torch, dtype), device, clock, enough) for dtype in DTYPES}
    return {
        "peak": {dtype: rate for dtype, rate in rates.items() if rate > 0},
        "memory_bandwidth": _memory_bandwidth(device, clock, size),
        "launch_overhead": clock(lambda: torch.ops.aten.add.Tensor(one, one)),
    }


def _memory_bandwidth(device: torch.device, clock: Clock, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / clock(lambda: target.copy_(source))


def _matmul_rate(dtype: torch.dtype, device: torch.device, clock: Clock, enough: float) -> float:
    """The best FLOP/s of square products, larger and larger; 0 where the device has none for this
    type."""
    best, size, long = 0.0, 256, 0
    # Once is no proof: threads that wait for a core make a small one long.
    while size <= _LARGEST and long < 2:
        try:
            one, other = (
                torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2)
            )
            # Data of one value alone saves power, and is faster.
            one += torch.rand((1, size), generator=torch.Generator().manual_seed(0)).to(
                device, dtype
            )
            seconds = clock(lambda one=one, other=other: one @ other)  # type: ignore[misc]
        except RuntimeError:  # no such kernel, or out of memory
            break
        best, long = max(best, 2.0 * size**3 / seconds), long + (seconds > enough)
        size *= 2
    return best


def host_to_gpu(number: int, threads: int, cores: set[int] | None = None) -> dict[str, float]:
    """The threads and cores are those of the CPU's device."""
    return _host_link(number, True, threads, cores)


def gpu_to_host(number: int, threads: int, cores: set[int] | None = None) -> dict[str, float]:
    return _host_link(number, False, threads, cores)


def _host_link(number: int, up: bool, threads: int, cores: set[int] | None) -> dict[str, float]:
    """A way between the host and a GPU; its latency is that of a small tensor which the next op
    waits for.

    Where one thread has both devices nobody has to be woken; where two have them, that is not
    counted.
    """
    host = torch.zeros(_LARGE, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(_LARGE, dtype=torch.uint8, device=torch.device("cuda", number))
    source, target = (host, there) if up else (there, host)
    small, end = source[:_SMALL], torch.cuda.Event()  # type: ignore[no-untyped-call]

    def cross() -> None:
        locked = torch.empty_like(small, device="cpu", pin_memory=True)
        locked.copy_(small, non_blocking=True)
        if up:
            locked.to(there.device, non_blocking=True)
        end.record()
        end.synchronize()

    with torch.cuda.device(number):
        found = _copies(source, target, lambda: torch.cuda.synchronize(number))
        latency = host_time([cross], _SECONDS)
        found |= {"latency": latency}
        launching = host_time(
            [_receiving(there.device) if up else _handing(there.device)], _SECONDS
        )
    with machine.OwnThread(threads, cores) as thread:
        posting = thread(lambda: host_time([_posting()], _SECONDS)) if up else 0.0
        waits = thread(lambda: _wait(there.device, up))
        takes = thread(lambda: [_send(there.device, up, size) - latency for size in _SENT])
    rates = [size / max(seconds, 1e-9) for size, seconds in zip(_SENT, takes, strict=True)]
    found |= {"send_bandwidth": min(found["bandwidth"], math.prod(rates) ** (1 / len(rates)))}
    return found | _ends(up, latency, waits, launching, posting)


def _ends(
    up: bool, latency: float, waits: float, launching: float, posting: float
) -> dict[str, float]:
    """What of a crossing keeps either end busy, and what is left of it as latency.

    To a GPU one thread posts the tensor and the other launches its copy. To the CPU one thread
    launches the copy, and what is waited for beyond it is a pool of threads that wakes up.
    """
    if up:
        left = max(latency, waits - posting - launching)
        return {"send_latency": left, "sender_busy": posting, "receiver_busy": launching}
    return {
        "send_latency": latency,
        "sender_busy": launching,
        "receiver_busy": max(0.0, waits - latency),
    }


def _handing(gpu: torch.device) -> Callable[[], None]:
    """What the thread of a GPU does to send a small tensor to the host (`Cuda.handed` of the
    runtime)."""
    tiny, stream = torch.ones(_SMALL // 4, device=gpu), torch.cuda.current_stream(gpu)

    def hand() -> None:
        torch.empty_like(tiny, device="cpu", pin_memory=True).copy_(tiny, non_blocking=True)
        torch.cuda.Event().record(stream)  # type: ignore[no-untyped-call]

    return hand


def _receiving(gpu: torch.device) -> Callable[[], None]:
    """What the thread of a GPU does to receive one (`Cuda.received`)."""
    locked = torch.ones(_SMALL // 4, pin_memory=True)

    def receive() -> None:
        locked.to(gpu, non_blocking=True)

    return receive


def _posting() -> Callable[[], None]:
    """What the thread of a CPU does to send one to a GPU (`Cuda.posted`)."""
    made = torch.ones(_SMALL // 4)

    def post() -> None:
        torch.empty_like(made, device="cpu", pin_memory=True).copy_(made)

    return post


def _wait(gpu: torch.device, up: bool) -> float:
    """Seconds that a small tensor which the other side waits for adds to the ops before and after
    it.

    While a GPU computes the threads of a CPU fall asleep, and wake up for the next op; a GPU that
    waited for the CPU has nothing left to do, and what comes next has to be launched first.
    """
    around = torch.ones(_AROUND // 4)
    size = min(_BUSY, machine.gpu_memory(gpu.index) // 8)
    made, busy = torch.empty_like(around), torch.ones(size // 4, device=gpu)
    tiny = torch.ones(_SMALL // 4, device=gpu)
    at_home = torch.ones(_SMALL // 4)

    def on_cpu() -> None:
        torch.add(around, 1, out=made)

    def on_gpu() -> None:
        for _ in range(_PASSES):
            busy.mul_(1.0)

    def down() -> None:
        locked = torch.empty_like(tiny, device="cpu", pin_memory=True)
        locked.copy_(tiny, non_blocking=True)
        torch.cuda.current_stream(gpu).synchronize()

    def over() -> None:
        locked = torch.empty_like(at_home, pin_memory=True)
        locked.copy_(at_home)
        tiny.add_(locked.to(gpu, non_blocking=True))

    def median(*calls: Callable[[], None]) -> float:
        times = []
        for _ in range(_SENDS):
            on_cpu()
            torch.cuda.synchronize(gpu)
            on_gpu()  # long enough for threads to fall asleep
            torch.cuda.synchronize(gpu)
            on_cpu()  # and awake again
            began = time.perf_counter()
            for call in calls:
                call()
            torch.cuda.synchronize(gpu)
            times.append(time.perf_counter() - began)
        return sorted(times)[_SENDS // 2]

    alone = median(on_cpu)
    if up:
        return median(on_cpu, over) - alone
    return median(on_gpu, down, on_cpu) - median(on_gpu) - alone


def _send(gpu: torch.device, up: bool, size: int) -> float:
    """Seconds until what was just made on one side can be used on the other, with what the host
    does for it.

    What all cores of a CPU have just written is in their caches, and was seen to reach a GPU at 9
    GB/s where the same bytes from memory come at 40; and it has to be copied to locked memory
    before.
    """
    there = gpu if up else torch.device("cpu")
    source = torch.ones(size // 4, device="cpu" if up else gpu)
    made = torch.empty_like(source)
    side = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    main = torch.cuda.current_stream(gpu)

    def send() -> None:
        ready, arrived = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(main)
        locked = torch.empty_like(made, device="cpu", pin_memory=True)
        if up:
            locked.copy_(made)
        torch.cuda.set_stream(side)
        side.wait_event(ready)
        found = torch.empty_like(made, device=there) if up else locked
        found.copy_(locked if up else made, non_blocking=True)
        arrived.record(side)
        torch.cuda.set_stream(main)
        main.wait_event(arrived)
        if up:
            found.record_stream(main)
        arrived.synchronize()

    times = []
    for _ in range(_SENDS):
        torch.add(source, 1, out=made)
        torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        send()
        times.append(time.perf_counter() - began)
    return sorted(times)[_SENDS // 2]


def gpu_to_gpu(source: int, target: int) -> dict[str, float]:
    one, other = (
        torch.zeros(_LARGE, dtype=torch.uint8, device=torch.device("cuda", number))
        for number in (source, target)
    )

    def wait() -> None:
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return _copies(one, other, wait)


def _copies(source: Tensor, target: Tensor, wait: Callable[[], None]) -> dict[str, float]:
    """The latency is what one small copy takes from its call to its arrival, as an op that needs it
    sees it."""

    def copy(size: int) -> Callable[[], None]:
        there, here = target[:size], source[:size]

        def call() -> None:
            there.copy_(here, non_blocking=True)
            wait()

        return call

    latency = host_time([copy(_SMALL)], _SECONDS)
    return {
        "latency": latency,
        "bandwidth": _LARGE / max(host_time([copy(_LARGE)], _SECONDS) - latency, 1e-9),
    }


def between_threads() -> dict[str, float]:
    """A way between two devices that are threads: a third thread is given a tensor, and hands over
    a copy of it."""
    small, large = (torch.zeros(size, dtype=torch.uint8) for size in (_SMALL, _ACTIVATION))
    with machine.OwnThread(1) as link:
        latency = host_time([lambda: link(small.clone)], _SECONDS)
        whole = host_time([lambda: link(large.clone)], _SECONDS)
    return {"latency": latency, "bandwidth": _ACTIVATION / max(whole - latency, 1e-9)}
