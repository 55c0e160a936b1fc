"""A CUDA device of the runtime: a stream that computes, and streams that copy beside it.

It computes on the default stream, so that memory which the caller gives back after a step is reused
in order, and from one pool; the streams that copy are of the kind that does not wait for the
default stream. Fetches ahead have a stream of their own: one that waits for room in the window does
not hold up a tensor that is needed now.

Host memory that is copied from or to is pinned, from PyTorch's cache of pinned blocks, which knows
the streams that use them. Tensors of the device that another stream reads are made known to the
allocator (`keep`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from roost.errors import InputError
from roost.runtime.ops.segments import Capture
from roost.runtime.step.device_threads import AWAKE_SECONDS, look
from roost.runtime.step.devices import Event, SentTensor

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Work in order, beside that of others."""

    def copy(self, target: Tensor, source: Tensor, beside: Stream | None = None) -> None:
        """Copy, when its turn comes; `beside` is a stream of the device of the source, where that
        is another one."""

    def empty_like(self, like: Tensor) -> Tensor: ...
    def wait(self, mark: Event) -> None: ...
    def mark(self, sleep: bool = False) -> Event:
        """The point when all is done that was given so far; who waits for it may sleep, or look all
        the time."""

    def keep(self, tensor: Tensor) -> None:
        """Do not reuse the memory of a tensor before what was given so far is done."""

    def set_clock(self) -> None:
        """Now, with nothing to do, its own clock and that of the host are compared."""

    def stamp(self) -> Any:
        """The time when all is done that was given so far."""

    def seconds(self, stamp: Any) -> float:
        """A stamp by the host's clock."""


class Engine(Protocol):
    """How the work of a device is given to it."""

    def compute(self, device: torch.device) -> Stream: ...
    def stream(self, device: torch.device) -> Stream: ...
    def pinned(self, like: Tensor) -> Tensor: ...
    def enter(self, device: torch.device) -> None: ...
    def capturing(self, device: torch.device) -> Capture: ...
    def allocated(self, device: torch.device) -> int:
        """Bytes in use."""

    def watch(self, device: torch.device) -> None:
        """From now on bytes in use are counted for `peak`."""

    def peak(self, device: torch.device) -> int:
        """The most bytes in use since `watch` was called."""


class CudaStream:
    """A stream of PyTorch's."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw, self._default = raw, torch.cuda.default_stream(raw.device)

    def copy(self, target: Tensor, source: Tensor, beside: Stream | None = None) -> None:
        # Between two CUDA devices PyTorch copies on the current stream of the source, in step with
        # that of the target.
        with nullcontext() if beside is None else torch.cuda.stream(beside.raw):  # type: ignore[attr-defined]
            self._here(target.copy_, source, non_blocking=True)

    def empty_like(self, like: Tensor) -> Tensor:
        found: Tensor = self._here(torch.empty_like, like, device=self.raw.device)
        return found

    def _here(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Threads of ours are on the default stream: `torch.cuda.stream` would look for that, and
        takes longer."""
        torch.cuda.set_stream(self.raw)
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.set_stream(self._default)

    def wait(self, mark: Event) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.raw.wait_event(mark)

    def mark(self, sleep: bool = False) -> Event:
        event = torch.cuda.Event(blocking=sleep)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.raw)

    def set_clock(self) -> None:
        self._zero = self.stamp()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def seconds(self, stamp: Any) -> float:
        return self._zero_seconds + 1e-3 * float(self._zero.elapsed_time(stamp))


class CudaEngine:
    """The CUDA of this machine."""

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
        return torch.cuda.memory_allocated(device)

    def watch(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def peak(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)


class CudaDevice:
    """A CUDA device: a `RuntimeDevice`."""

    def __init__(self, device: torch.device, engine: Engine | None = None) -> None:
        self.device, self.engine = device, engine or CudaEngine()
        self.compute = self.engine.compute(device)
        self.fetches, self.arrivals, self.departures = (
            self.engine.stream(device) for _ in range(3)
        )
        self.window_bytes = 0
        self._before = self.engine.allocated(device)
        # Copies of new values on their way home, and their bytes.
        self._leaving: deque[tuple[Event, int]] = deque()
        self._leaving_bytes = 0

    # ------------------------------------------------------------------ RuntimeDevice

    def enter(self) -> None:
        self.engine.enter(self.device)

    def begin(self) -> None:
        self.engine.watch(self.device)

    def finish(self) -> None:
        # Asleep after a while, not looking all the time: the other devices need the cores.
        done = self.compute.mark(sleep=True)
        look(done.query, AWAKE_SECONDS)
        done.synchronize()
        self._leaving_bytes = 0
        self._leaving.clear()  # whoever waits for the step waits for each of them

    def mark(self) -> Event | None:
        return self.compute.mark()

    def wait(self, mark: Event | None) -> None:
        if mark is not None:
            self.compute.wait(mark)

    def given(self, value: Tensor) -> Tensor:
        return value.to(self.device) if value.is_cuda else self.received(self.bring(value))

    def received(self, parcel: SentTensor) -> Tensor:
        if parcel.on_host:
            return parcel.tensor.to(self.device, non_blocking=True)
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
            # Of the device itself, which whoever ran the step was told.
            except RuntimeError as error:
                log.debug("%s: %s", self.device, error)

    def set_clock(self) -> None:
        self.compute.set_clock()

    def stamp(self) -> Any:
        return self.compute.stamp()

    def seconds(self, stamp: Any) -> float:
        return self.compute.seconds(stamp)

    # ------------------------------------------------------------------ copies

    def bring(
        self,
        tensor: Tensor,
        after: Sequence[Event | None] = (),
        into: Tensor | None = None,
        source: CudaDevice | None = None,
    ) -> SentTensor:
        """Copy a tensor to this device, from the host or from another CUDA device."""
        if source is None and not tensor.is_pinned():
            tensor = self.engine.pinned(tensor).copy_(tensor)
        return self._bring(self.arrivals, tensor, after, into, source)

    def posted(self, tensor: Tensor) -> SentTensor:
        """A small tensor of the host for this device: whoever receives it copies it in the stream
        that computes.

        Streams of their own cost whoever sends more than they save. And a thread of the host that
        computes has nothing to ask of the device then.
        """
        return SentTensor(self.engine.pinned(tensor).copy_(tensor), None, on_host=True)

    def handed(self, tensor: Tensor) -> SentTensor:
        """A small tensor of this device for the host, copied in the stream that computes; by its
        own thread."""
        target = self.engine.pinned(tensor)
        target.copy_(tensor, non_blocking=True)
        return SentTensor(target, self.mark())

    def fetch(self, tensor: Tensor, slot: Tensor, source: CudaDevice | None = None) -> SentTensor:
        """Copy a resident of another device into the window, when what was told to this device so
        far is done."""
        return self._bring(self.fetches, tensor, (self.mark(),), slot, source)

    def _bring(
        self,
        stream: Stream,
        tensor: Tensor,
        after: Sequence[Event | None],
        into: Tensor | None,
        source: CudaDevice | None,
    ) -> SentTensor:
        target = stream.empty_like(tensor) if into is None else into
        for mark in after:
            if mark is not None:
                stream.wait(mark)
                if source is not None:
                    source.departures.wait(mark)
        stream.copy(target, tensor, None if source is None else source.departures)
        if source is not None:
            source.departures.keep(tensor)
        return SentTensor(target, stream.mark())

    def take(
        self, tensor: Tensor, after: Sequence[Event | None] = (), into: Tensor | None = None
    ) -> SentTensor:
        """Copy a tensor of this device to the host."""
        target = self.engine.pinned(tensor) if into is None else into
        for mark in after:
            if mark is not None:
                self.departures.wait(mark)
        self.departures.copy(target, tensor)
        self.departures.keep(tensor)
        # For a new value nobody is in haste.
        return SentTensor(target, self.departures.mark(sleep=into is not None))

    # ------------------------------------------------------------------ new values on their way
    # home

    def leaving(self, value: Tensor) -> Tensor:
        """A new value that lies in the window, in memory of its own: the window goes on to the next
        parameter.

        Of such copies there are at most as many bytes as in the window, where the host runs far
        ahead of the device.
        """
        while self._leaving and self._leaving_bytes + value.nbytes > self.window_bytes:
            arrival, size = self._leaving.popleft()
            arrival.synchronize()
            self._leaving_bytes -= size
        return value.clone()

    def left(self, arrival: Event | None, size: int) -> None:
        """A copy that `leaving` made will be home at that point."""
        if arrival is not None:
            self._leaving.append((arrival, size))
            self._leaving_bytes += size

    # ------------------------------------------------------------------ memory

    @property
    def peak_memory(self) -> int:
        """The most bytes in use in the last step, residents and the window among them, beyond those
        before this was."""
        return self.engine.peak(self.device) - self._before

    def window(self, likes: Sequence[Tensor], offsets: Sequence[int], size: int) -> list[Tensor]:
        """The window, and in it a tensor for each copy that will be there."""
        self.window_bytes = size
        arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        return [
            arena[offset : offset + like.nbytes]
            .view(like.dtype)
            .as_strided(like.shape, like.stride(), None)
            if like.numel()
            else torch.empty_like(like, device=self.device)
            for like, offset in zip(likes, offsets, strict=True)
        ]


class PinnedMemory:
    """Residents of the host that are pinned, so that a copy to a CUDA device is one transfer; up to
    a limit."""

    def __init__(self, limit: int | None = None) -> None:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self.left, self._said = half if limit is None else limit, False

    def home(self, value: Tensor, pinned: Callable[[Tensor], Tensor]) -> Tensor:
        """A pinned copy of a resident, or where that cannot be a plain one."""
        try:
            # PyTorch rounds up to a power of two.
            takes = 1 << (value.nbytes - 1).bit_length() if value.nbytes else 0
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
    """The device of this machine that a cluster calls so: `cpu`, `cpu:N` for some of its cores, or
    `cuda:N`."""
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" and (not number or number.isdecimal()):
        return torch.device("cpu")
    if kind == "cuda" and (not number or number.isdecimal()) and int(number or 0) < count:
        return torch.device("cuda", int(number or 0))
    here = ", ".join(["cpu (and cpu:N)", *(f"cuda:{index}" for index in range(count))])
    raise InputError(f"device {name!r} is not on this machine; it has {here}")
