"""A CUDA device that is none: it computes on the host, and its copies come late.

So what the runtime must wait for on a CUDA device, it must wait for here, or its numbers are wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from roost.runtime.ops.cuda import CudaDevice, CudaEngine, CudaStream
from roost.runtime.ops.segments import Capture
from roost.runtime.step.devices import Event


class LateEvent:
    """Past when the stream has come to it."""

    def __init__(self) -> None:
        self._past = threading.Event()

    def reach(self) -> None:
        self._past.set()

    def query(self) -> bool:
        return self._past.is_set()

    def synchronize(self) -> None:
        if not self._past.wait(60):
            raise RuntimeError("a stream waits for ever")


class _HostClock:
    """Time is that of the host."""

    def set_clock(self) -> None:
        pass

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp


class LateStream(_HostClock, CudaStream):
    """A thread that does each thing some time after it was given."""

    def __init__(self, seed: int, most: float) -> None:
        self._work: SimpleQueue[tuple[str, tuple[object, ...]]] = SimpleQueue()
        self._rng, self._most = random.Random(seed), most
        threading.Thread(target=self._run, daemon=True).start()

    def copy(self, target: Tensor, source: Tensor, beside: CudaStream | None = None) -> None:
        self._work.put(("copy", (target, source)))

    def empty_like(self, like: Tensor) -> Tensor:
        return _nonsense(like)

    def wait(self, event: Event) -> None:
        self._work.put(("wait", (event,)))

    def record_event(self, sleep: bool = False) -> Event:
        event = LateEvent()
        self._work.put(("event", (event,)))
        return event

    def keep(self, tensor: Tensor) -> None:
        pass  # the queue holds it

    def _run(self) -> None:
        while True:
            what, things = self._work.get()
            time.sleep(self._rng.random() * self._most)
            match what, things:
                case "copy", (Tensor() as target, Tensor() as source):
                    target.copy_(source)
                case "wait", (LateEvent() as event,):
                    event.synchronize()
                case "event", (LateEvent() as event,):
                    event.reach()


class AtOnce(_HostClock, CudaStream):
    """The stream that computes: whoever gives it work does it."""

    def __init__(self) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor, beside: CudaStream | None = None) -> None:
        target.copy_(source)

    def empty_like(self, like: Tensor) -> Tensor:
        return _nonsense(like)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record_event(self, sleep: bool = False) -> Event:
        event = LateEvent()
        event.reach()
        return event

    def keep(self, tensor: Tensor) -> None:
        pass


class LateEngine(CudaEngine):
    """A `CudaEngine` of such streams; each waits at most so many seconds before each task."""

    def __init__(self, seed: int = 0, most: float = 1e-3) -> None:
        self._seed, self._most = seed, most

    def compute(self, device: torch.device) -> CudaStream:
        return AtOnce()

    def stream(self, device: torch.device) -> CudaStream:
        self._seed += 1
        return LateStream(self._seed, self._most)

    def pinned(self, like: Tensor) -> Tensor:
        return _nonsense(like)

    def enter(self, device: torch.device) -> None:
        pass

    def capturing(self, device: torch.device) -> Capture:
        return _capture

    def allocated(self, device: torch.device) -> int:
        return 0

    def watch(self, device: torch.device) -> None:
        pass

    def peak(self, device: torch.device) -> int:
        return 0


def late_place(seed: int = 0, most: float = 1e-3) -> CudaDevice:
    return CudaDevice(torch.device("cpu"), LateEngine(seed, most))


def _capture(
    function: Callable[..., tuple[Any, ...]], static: Sequence[Any]
) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """Nothing is done while it is recorded; done again, it writes where it was recorded."""
    made = tree_map(_nonsense, function(*(tensor.clone() for tensor in static)))

    def replay() -> None:
        for target, source in zip(tree_leaves(made), tree_leaves(function(*static)), strict=True):
            target.copy_(source)

    return replay, made


def _nonsense(like: Tensor) -> Tensor:
    """Memory that gives wrong numbers to whoever reads it too early."""
    return torch.empty_like(like, device="cpu").fill_(
        float("nan") if like.is_floating_point() else 1
    )
