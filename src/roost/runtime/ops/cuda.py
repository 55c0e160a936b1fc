"""A CUDA device of the graph runtime: a stream that computes, and streams that copy beside it.

It computes on the default stream: memory that the caller gives back after a step is then reused in
order, and from one pool. The streams that copy are of the kind that does not wait for the default
stream. Fetches have a stream of their own: one that waits for room in the window does not hold up a
tensor that is needed now.

Copies from and to the CPU use pinned memory, from PyTorch's cache of pinned blocks, which knows the
streams that use a block. If another stream reads a tensor of the device, the allocator is told
(`keep`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from roost.errors import InputError
from roost.runtime.ops.segments import Capture
from roost.runtime.step.device_threads import AWAKE_SECONDS, look
from roost.runtime.step.devices import CpuDevice, Event, SentTensor

log = logging.getLogger(__name__)


class CudaStream:
    """A queue of work of a device; work of other streams goes on beside it."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw
        self._default = torch.cuda.default_stream(raw.device)

    def copy(self, target: Tensor, source: Tensor, beside: CudaStream | None = None) -> None:
        """Copy in the order of this stream.

        `beside`: a stream of the source's device, if that is another CUDA device. PyTorch copies on
        the current stream of the source, in step with that of the target.
        """
        with nullcontext() if beside is None else torch.cuda.stream(beside.raw):
            self._here(target.copy_, source, non_blocking=True)

    def empty_like(self, like: Tensor) -> Tensor:
        tensor: Tensor = self._here(torch.empty_like, like, device=self.raw.device)
        return tensor

    def _here(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call with this stream as the current one.

        Our threads are on the default stream, so this need not ask for the current stream, as
        `torch.cuda.stream` does: it is faster.
        """
        torch.cuda.set_stream(self.raw)
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.set_stream(self._default)

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.raw.wait_event(event)

    def record_event(self, sleep: bool = False) -> Event:
        """Mark the point where all work given so far is done; `sleep`: waiting threads sleep."""
        event = torch.cuda.Event(blocking=sleep)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until all work given so far is done."""
        tensor.record_stream(self.raw)

    def set_clock(self) -> None:
        """Compare the stream's clock with `time.perf_counter`, while the stream is idle."""
        self._zero = self.stamp()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def stamp(self) -> Any:
        """Take the time at which all work given so far is done."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def seconds(self, stamp: Any) -> float:
        """Give a stamp in seconds of `time.perf_counter`."""
        return self._zero_seconds + 1e-3 * float(self._zero.elapsed_time(stamp))


class CudaEngine:
    """The functions of CUDA that a device calls; tests without a GPU replace it."""

    def compute(self, device: torch.device) -> CudaStream:
        return CudaStream(torch.cuda.default_stream(device))

    def stream(self, device: torch.device) -> CudaStream:
        return CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def enter(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # any stream may have copied residents there

    def capturing(self, device: torch.device) -> Capture:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def capture(
            function: Callable[..., tuple[Any, ...]], static: Sequence[Any]
        ) -> tuple[Callable[[], None], tuple[Any, ...]]:
            graph = torch.cuda.CUDAGraph()
            before = torch.cuda.current_stream(device)
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                # Other threads go on launching copies meanwhile.
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
        """Begin to watch the bytes in use, for `peak`."""
        torch.cuda.reset_peak_memory_stats(device)

    def peak(self, device: torch.device) -> int:
        """Give the most bytes in use since `watch` was called."""
        return torch.cuda.max_memory_allocated(device)


class CudaDevice:
    """A CUDA device, with the methods of `CpuDevice`."""

    def __init__(self, device: torch.device, engine: CudaEngine | None = None) -> None:
        self.device = device
        self.engine = engine or CudaEngine()
        self.compute = self.engine.compute(device)
        self.fetches, self.arrivals, self.departures = (
            self.engine.stream(device) for _ in range(3)
        )
        self.window_bytes = 0
        self._before = self.engine.allocated(device)
        # Copies of new values on their way home: when each is home, and its bytes.
        self._leaving: deque[tuple[Event, int]] = deque()
        self._leaving_bytes = 0

    # ------------------------------------------------------------------ as of a CPU

    def enter(self) -> None:
        self.engine.enter(self.device)

    def begin(self) -> None:
        self.engine.watch(self.device)

    def finish(self) -> None:
        # Look for a while, then sleep: the other devices need the cores.
        done = self.compute.record_event(sleep=True)
        look(done.query, AWAKE_SECONDS)
        done.synchronize()
        self._leaving_bytes = 0
        self._leaving.clear()  # whoever waits for the step waits for all of them

    def record_event(self) -> Event | None:
        return self.compute.record_event()

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.compute.wait(event)

    def bring_input(self, value: Tensor) -> Tensor:
        return value.to(self.device) if value.is_cuda else self.receive(self.copy_here(value))

    def receive(self, sent: SentTensor) -> Tensor:
        if sent.on_host:
            return sent.tensor.to(self.device, non_blocking=True)
        self.wait(sent.arrival)
        self.compute.keep(sent.tensor)
        return sent.tensor

    def settle(self, value: Tensor) -> Tensor:
        return torch.empty_like(value, device=self.device).copy_(value.detach())

    def close(self) -> None:
        """Wait until no stream uses memory that is about to be given back."""
        for stream in (self.compute, self.fetches, self.arrivals, self.departures):
            try:
                stream.record_event().synchronize()
            except RuntimeError as error:  # of the device, already reported by the step
                log.debug("%s: %s", self.device, error)

    def set_clock(self) -> None:
        self.compute.set_clock()

    def stamp(self) -> Any:
        return self.compute.stamp()

    def seconds(self, stamp: Any) -> float:
        return self.compute.seconds(stamp)

    # ------------------------------------------------------------------ copies

    def copy_here(
        self,
        tensor: Tensor,
        after: Sequence[Event | None] = (),
        into: Tensor | None = None,
        source: CudaDevice | None = None,
    ) -> SentTensor:
        """Copy a tensor to this device, from the CPU or from another CUDA device."""
        if source is None and not tensor.is_pinned():
            tensor = self.engine.pinned(tensor).copy_(tensor)
        return self._copy_here(self.arrivals, tensor, after, into, source)

    def post_small(self, tensor: Tensor) -> SentTensor:
        """Put a small tensor of the CPU into pinned memory; the device copies it as it receives it.

        It is copied in the stream that computes: a stream of its own costs the sender more than it
        saves, and so a thread of the CPU that computes does not have to call CUDA.
        """
        return SentTensor(self.engine.pinned(tensor).copy_(tensor), None, on_host=True)

    def hand_small(self, tensor: Tensor) -> SentTensor:
        """Copy a small tensor of this device to the CPU, in the stream that computes."""
        target = self.engine.pinned(tensor)
        target.copy_(tensor, non_blocking=True)
        return SentTensor(target, self.record_event())

    def fetch(self, tensor: Tensor, slot: Tensor, source: CudaDevice | None = None) -> SentTensor:
        """Copy a resident of another device into the window, after all work given so far."""
        return self._copy_here(self.fetches, tensor, (self.record_event(),), slot, source)

    def _copy_here(
        self,
        stream: CudaStream,
        tensor: Tensor,
        after: Sequence[Event | None],
        into: Tensor | None,
        source: CudaDevice | None,
    ) -> SentTensor:
        target = stream.empty_like(tensor) if into is None else into
        for event in after:
            if event is not None:
                stream.wait(event)
                if source is not None:
                    source.departures.wait(event)
        stream.copy(target, tensor, None if source is None else source.departures)
        if source is not None:
            source.departures.keep(tensor)
        return SentTensor(target, stream.record_event())

    def copy_to_cpu(
        self, tensor: Tensor, after: Sequence[Event | None] = (), into: Tensor | None = None
    ) -> SentTensor:
        """Copy a tensor of this device to the CPU."""
        target = self.engine.pinned(tensor) if into is None else into
        for event in after:
            if event is not None:
                self.departures.wait(event)
        self.departures.copy(target, tensor)
        self.departures.keep(tensor)
        # Nobody hurries to see a new value: whoever waits for it may sleep.
        return SentTensor(target, self.departures.record_event(sleep=into is not None))

    # ------------------------------------------------------------------ new values that go home

    def leaving(self, value: Tensor) -> Tensor:
        """Copy a new value out of the window, which goes on to the next parameter.

        Such copies take at most as many bytes as the window: launches may run far ahead of the
        device.
        """
        while self._leaving and self._leaving_bytes + value.nbytes > self.window_bytes:
            arrival, size = self._leaving.popleft()
            arrival.synchronize()
            self._leaving_bytes -= size
        return value.clone()

    def left(self, arrival: Event | None, size: int) -> None:
        """Note when a copy that `leaving` made will be home."""
        if arrival is not None:
            self._leaving.append((arrival, size))
            self._leaving_bytes += size

    # ------------------------------------------------------------------ memory

    @property
    def peak_memory(self) -> int:
        """The most bytes in use in the last step, with residents and window.

        Bytes that were in use before this device was made do not count.
        """
        return self.engine.peak(self.device) - self._before

    def window(self, likes: Sequence[Tensor], offsets: Sequence[int], size: int) -> list[Tensor]:
        """Make the window; give the memory of each copy in it."""
        self.window_bytes = size
        arena = torch.empty(size, dtype=torch.uint8, device=self.device)

        def memory(like: Tensor, offset: int) -> Tensor:
            if not like.numel():
                return torch.empty_like(like, device=self.device)
            own = arena[offset : offset + like.nbytes].view(like.dtype)
            return own.as_strided(like.shape, like.stride(), None)

        return [memory(like, offset) for like, offset in zip(likes, offsets, strict=True)]


RuntimeDevice = CpuDevice | CudaDevice


class PinnedMemory:
    """Makes pinned copies of residents on the CPU, up to a limit.

    A copy from pinned memory to a CUDA device is one transfer.
    """

    def __init__(self, limit: int | None = None) -> None:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self.left = half if limit is None else limit
        self._warned = False

    def pinned_copy(self, value: Tensor, pinned: Callable[[Tensor], Tensor]) -> Tensor:
        """Give a pinned copy of a resident, or a plain copy if that fails."""
        try:
            # PyTorch rounds up to a power of two.
            takes = 1 << (value.nbytes - 1).bit_length() if value.nbytes else 0
            if takes <= self.left:
                copy = pinned(value).copy_(value.detach())
                self.left -= takes
                return copy
            why = "the limit of pinned memory is reached"
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not self._warned:
            log.warning("some parameters are not pinned: copying them takes longer (%s)", why)
            self._warned = True
        return value.detach().to("cpu", copy=True)


def device_named(name: str) -> torch.device:
    """Give PyTorch's device for a name in a cluster: `cpu`, `cpu:N` (some cores) or `cuda:N`."""
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" and (not number or number.isdecimal()):
        return torch.device("cpu")
    if kind == "cuda" and (not number or number.isdecimal()) and int(number or 0) < count:
        return torch.device("cuda", int(number or 0))
    here = ", ".join(["cpu (and cpu:N)", *(f"cuda:{index}" for index in range(count))])
    raise InputError(f"device {name!r} is not on this machine; it has {here}")
