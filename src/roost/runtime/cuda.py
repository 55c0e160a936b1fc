"""A CUDA device of the runtime: a stream that computes, and streams that copy beside it.

It computes on the default stream, so that memory which the caller gives back after a step is reused in order, and from
one pool; the streams that copy are of the kind that does not wait for the default stream. Fetches ahead have a stream
of their own: one that waits for room in the window does not hold up a tensor that is needed now.

Host memory that is copied from or to is pinned, from PyTorch's cache of pinned blocks, which knows the streams that use
them. Tensors of the device that another stream reads are made known to the allocator (`keep`).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from roost.errors import InputError
from roost.runtime.flags import CudaFlags, stream_wait
from roost.runtime.places import Mark, Parcel
from roost.runtime.segments import Capture

log = logging.getLogger(__name__)


_AHEAD = 64 * 2**20  # bytes that the host may ask for before they are there

_wait = cache(stream_wait)


class Stream(Protocol):
    """Work in order, beside that of others."""

    def copy(self, target: Tensor, source: Tensor, beside: Stream | None = None) -> None:
        """Copy, when its turn comes; `beside` is a stream of the device of the source, where that is another one."""

    def empty_like(self, like: Tensor) -> Tensor: ...
    def wait(self, mark: Mark) -> None: ...
    def mark(self, sleep: bool = False) -> Mark:
        """The point when all is done that was given so far; who waits for it may sleep, or look all the time."""

    def keep(self, tensor: Tensor) -> None:
        """Do not reuse the memory of a tensor before what was given so far is done."""

    def wait_for(self, flag: Any, number: int) -> None:
        """Wait until a flag of the engine has reached a number."""


class Flag(Protocol):
    """A number that grows, written by the host; streams wait for it."""

    def reach(self, number: int) -> None: ...
    def give_up(self) -> None:
        """Nobody who waits shall wait any longer."""


class Engine(Protocol):
    """How the work of a device is given to it."""

    def compute(self, device: torch.device) -> Stream: ...
    def stream(self, device: torch.device) -> Stream: ...
    def pinned(self, like: Tensor) -> Tensor: ...
    def enter(self, device: torch.device) -> None: ...
    def capturing(self, device: torch.device) -> Capture: ...
    def flag(self) -> Flag | None:
        """A new flag, where streams can wait for such."""

    def allocated(self, device: torch.device) -> int:
        """Bytes in use, from now on counted for `peak`."""

    def peak(self, device: torch.device) -> int:
        """The most bytes in use since `allocated` was called."""


class CudaStream:
    """A stream of PyTorch's."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def copy(self, target: Tensor, source: Tensor, beside: Stream | None = None) -> None:
        # Between two CUDA devices PyTorch copies on the current stream of the source, in step with that of the target.
        other = torch.cuda.stream(beside.raw) if isinstance(beside, CudaStream) else nullcontext()
        with other, torch.cuda.stream(self.raw):
            target.copy_(source, non_blocking=True)

    def empty_like(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self.raw):
            return torch.empty_like(like, device=self.raw.device)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.raw.wait_event(mark)

    def mark(self, sleep: bool = False) -> Mark:
        event = torch.cuda.Event(blocking=sleep)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.raw)

    def wait_for(self, flag: Any, number: int) -> None:
        wait = _wait()
        assert wait is not None
        wait(self.raw.cuda_stream, flag.address, number)


class CudaEngine:
    """The CUDA of this machine."""

    def __init__(self) -> None:
        self._flags = CudaFlags()

    def flag(self) -> Flag | None:
        return self._flags.new() if _wait() is not None else None

    def compute(self, device: torch.device) -> Stream:
        return CudaStream(torch.cuda.default_stream(device))

    def stream(self, device: torch.device) -> Stream:
        return CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def enter(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # residents were copied there on whatever stream

    def capturing(self, device: torch.device) -> Capture:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def capture(
            function: Callable[..., tuple[Any, ...]], static: Sequence[Any]
        ) -> tuple[Callable[[], None], tuple[Any, ...]]:
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                # Other threads go on telling this device and others what to copy.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    made = function(*static)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            before.wait_stream(stream)
            return graph.replay, made

        return capture

    def allocated(self, device: torch.device) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)


class Landing:
    """Locked memory for a value that the host makes and a CUDA device waits for, once in each step."""

    def __init__(self, tensor: Tensor, flag: Flag) -> None:
        self.tensor, self.flag = tensor, flag

    def put(self, value: Tensor, number: int) -> None:
        self.tensor.copy_(value)
        self.flag.reach(number)


class Cuda:
    """A CUDA device: a `Place`."""

    def __init__(self, device: torch.device, engine: Engine | None = None) -> None:
        self.device, self.engine = device, engine or CudaEngine()
        self.compute = self.engine.compute(device)
        self.fetches, self.arrivals, self.departures = (self.engine.stream(device) for _ in range(3))
        self.window_bytes = 0
        self._before = self.engine.allocated(device)
        self._leaving: deque[tuple[Mark, int]] = deque()  # copies of new values on their way home, and their bytes
        self._leaving_bytes = 0
        self._coming: deque[tuple[Mark, int]] = deque()  # what was asked for of the host, and its bytes
        self._coming_bytes = 0

    # ------------------------------------------------------------------ Place

    def enter(self) -> None:
        self.engine.enter(self.device)

    def begin(self) -> None:
        self.engine.allocated(self.device)

    def finish(self) -> None:
        # Asleep, not looking all the time: the other devices need the cores.
        self.compute.mark(sleep=True).synchronize()
        self._leaving_bytes = 0
        self._leaving.clear()  # whoever waits for the step waits for each of them
        self._coming_bytes = 0
        self._coming.clear()

    def mark(self) -> Mark | None:
        return self.compute.mark()

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self.compute.wait(mark)

    def given(self, value: Tensor) -> Tensor:
        return value.to(self.device) if value.is_cuda else self.received(self.bring(value))

    def received(self, parcel: Parcel) -> Tensor:
        self.wait(parcel.arrival)
        self.compute.keep(parcel.tensor)
        return parcel.tensor

    def home(self, value: Tensor) -> Tensor:
        return torch.empty_like(value, device=self.device).copy_(value.detach())

    def close(self) -> None:
        """Let nothing be on its way to or from memory that is about to be given back."""
        for stream in (self.compute, self.fetches, self.arrivals, self.departures):
            try:
                stream.mark().synchronize()
            except RuntimeError as error:  # of the device itself, which whoever ran the step was told
                log.debug("%s: %s", self.device, error)

    # ------------------------------------------------------------------ copies

    def bring(
        self, tensor: Tensor, after: Sequence[Mark | None] = (), into: Tensor | None = None, source: Cuda | None = None
    ) -> Parcel:
        """Copy a tensor to this device, from the host or from another CUDA device."""
        if source is None and not tensor.is_pinned():
            tensor = self.engine.pinned(tensor).copy_(tensor)
        return self._bring(self.arrivals, tensor, after, into, source)

    def landing(self, like: Tensor) -> Landing | None:
        """Where the host puts a value for this device in each step, where the device can wait for it by itself."""
        flag = self.engine.flag()
        return None if flag is None else Landing(self.engine.pinned(like), flag)

    def arriving(self, landing: Landing, number: int) -> Tensor:
        """What the host will put there in this step; nobody but the device waits for it.

        The host may be ahead by so many bytes: what was used is given back only when the device has used it.
        """
        size = landing.tensor.nbytes
        while self._coming and self._coming_bytes + size > _AHEAD:
            mark, before = self._coming.popleft()
            mark.synchronize()
            self._coming_bytes -= before
        self.arrivals.wait_for(landing.flag, number)
        parcel = self._bring(self.arrivals, landing.tensor, (), None, None)
        if parcel.arrival is not None:
            self._coming.append((parcel.arrival, size))
            self._coming_bytes += size
        return self.received(parcel)

    def fetch(self, tensor: Tensor, slot: Tensor, source: Cuda | None = None) -> Parcel:
        """Copy a resident of another device into the window, when what was told to this device so far is done."""
        return self._bring(self.fetches, tensor, (self.mark(),), slot, source)

    def _bring(
        self, stream: Stream, tensor: Tensor, after: Sequence[Mark | None], into: Tensor | None, source: Cuda | None
    ) -> Parcel:
        target = stream.empty_like(tensor) if into is None else into
        for mark in after:
            if mark is not None:
                stream.wait(mark)
                if source is not None:
                    source.departures.wait(mark)
        stream.copy(target, tensor, None if source is None else source.departures)
        if source is not None:
            source.departures.keep(tensor)
        return Parcel(target, stream.mark())

    def take(self, tensor: Tensor, after: Sequence[Mark | None] = (), into: Tensor | None = None) -> Parcel:
        """Copy a tensor of this device to the host."""
        target = self.engine.pinned(tensor) if into is None else into
        for mark in after:
            if mark is not None:
                self.departures.wait(mark)
        self.departures.copy(target, tensor)
        self.departures.keep(tensor)
        return Parcel(target, self.departures.mark(sleep=into is not None))  # for a new value nobody is in haste

    # ------------------------------------------------------------------ new values on their way home

    def leaving(self, value: Tensor) -> Tensor:
        """A new value that lies in the window, in memory of its own: the window goes on to the next parameter.

        Of such copies there are at most as many bytes as in the window, where the host runs far ahead of the device.
        """
        while self._leaving and self._leaving_bytes + value.nbytes > self.window_bytes:
            arrival, size = self._leaving.popleft()
            arrival.synchronize()
            self._leaving_bytes -= size
        return value.clone()

    def left(self, arrival: Mark | None, size: int) -> None:
        """A copy that `leaving` made will be home at that point."""
        if arrival is not None:
            self._leaving.append((arrival, size))
            self._leaving_bytes += size

    # ------------------------------------------------------------------ memory

    @property
    def peak_memory(self) -> int:
        """The most bytes in use in the last step, residents and the window among them, beyond those before this was."""
        return self.engine.peak(self.device) - self._before

    def window(self, likes: Sequence[Tensor], offsets: Sequence[int], size: int) -> list[Tensor]:
        """The window, and in it a tensor for each copy that will be there."""
        self.window_bytes = size
        arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        return [
            arena[offset : offset + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride(), None)
            if like.numel()
            else torch.empty_like(like, device=self.device)
            for like, offset in zip(likes, offsets, strict=True)
        ]


class Pins:
    """Residents of the host that are pinned, so that a copy to a CUDA device is one transfer; up to a limit."""

    def __init__(self, limit: int | None = None) -> None:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self.left, self._said = half if limit is None else limit, False

    def home(self, value: Tensor, pinned: Callable[[Tensor], Tensor]) -> Tensor:
        """A pinned copy of a resident, or where that cannot be a plain one."""
        try:
            takes = 1 << (value.nbytes - 1).bit_length() if value.nbytes else 0  # PyTorch rounds up to a power of two
            if takes <= self.left:
                found = pinned(value).copy_(value.detach())
                self.left -= takes
                return found
            why = "the limit of pinned memory is reached"
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not self._said:
            log.warning("some parameters are not pinned, and reach the device more slowly: %s", why)
            self._said = True
        return value.detach().to("cpu", copy=True)


def device_named(name: str) -> torch.device:
    """The device of this machine that a cluster calls so: `cpu`, `cpu:N` for some of its cores, or `cuda:N`."""
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" and (not number or number.isdecimal()):
        return torch.device("cpu")
    if kind == "cuda" and (not number or number.isdecimal()) and int(number or 0) < count:
        return torch.device("cuda", int(number or 0))
    here = ", ".join(["cpu (and cpu:N)", *(f"cuda:{index}" for index in range(count))])
    raise InputError(f"device {name!r} is not on this machine; it has {here}")
