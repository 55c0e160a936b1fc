"""A CPU that computes in the order of a GPU's stream, while the program that asks for it goes on.

`apply.py` makes a `CpuBesideGpu` for modules that run on the CPU. A module there waits for its
input to arrive, and the stream waits for its output: on a word of memory that the CPU writes when
it is done. So the program can launch later work of the GPU ahead of time. For a step of one token
launching takes longer than computing. If the driver lacks that wait, the program waits itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from roost.presets import machine
from roost.runtime.step.device_threads import thread_count_kept
from roost.runtime.whole.cuda_flags import CudaFlags, stream_wait
from roost.runtime.whole.tensor_moves import given_back, lent, moved

_CPU = torch.device("cpu")
_SMALL = 2**20  # bytes


class CallTime:
    """Calls of modules on another device so far, and their seconds, without the transfers."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.num_calls = self.num_calls + 1
        self.seconds = self.seconds + seconds


class CpuBesideGpu:
    """A thread that computes for one GPU; a call of a module has one tensor in, one out."""

    def __init__(self, device: torch.device, call_time: CallTime | None = None) -> None:
        self.device = device
        self._call_time = call_time or CallTime()
        self._wait = stream_wait()
        self._flags = CudaFlags()
        self._done = self._flags.new()
        self._asked = 0
        self._buffers: dict[tuple[Any, ...], _CallBuffers] = {}
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._threads = num_threads()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside the GPU", daemon=True)
        with thread_count_kept():
            self._thread.start()
            self._ready.wait()

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Compute on the CPU what a module returns for tensors of the GPU."""
        if self._wait is None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return self._at_once(forward, *args, **kwargs)[0]
        key = (id(forward), args[0].shape, args[0].dtype)
        if args[0].device != self.device or key not in self._buffers:
            returned, wrote = self._at_once(forward, *args)
            if isinstance(returned, Tensor) and args[0].device == self.device and not wrote:
                self._buffers[key] = _CallBuffers(args[0], returned)
            return returned
        return self._in_turn(forward, args[0], self._buffers[key])

    def join(self) -> None:
        """Wait for all calls; raise the first error."""
        self._work.put(self._idle.release)
        self._idle.acquire()
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _at_once(
        self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, bool]:
        """Call a module and wait; also tell if it wrote into its inputs."""
        (args, kwargs), copies = lent((args, kwargs), _CPU)
        begun = time.perf_counter()
        returned = forward(*args, **kwargs)
        self._call_time.add(time.perf_counter() - begun)
        return moved(returned, self.device), given_back(copies)

    def _in_turn(self, forward: Callable[..., Any], given: Tensor, buffers: _CallBuffers) -> Tensor:
        stream = torch.cuda.current_stream(self.device)
        buffers.given.copy_(given, non_blocking=True)
        arrived = stream.record_event()
        self._asked += 1
        number = self._asked

        def work() -> None:
            try:
                arrived.synchronize()
                begun = time.perf_counter()
                made = forward(buffers.given)
                if made.shape != buffers.returned.shape or made.dtype != buffers.returned.dtype:
                    raise RuntimeError(
                        f"a module gave {list(made.shape)} of {made.dtype}, and for the same shape "
                        f"before {list(buffers.returned.shape)} of {buffers.returned.dtype}; it "
                        f"cannot run beside the GPU"
                    )
                buffers.returned.copy_(made)
                self._call_time.add(time.perf_counter() - begun)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._done.reach(number)  # even after an error: the stream must not wait for ever

        self._work.put(work)
        assert self._wait is not None
        self._wait(stream.cuda_stream, self._done.address, number)
        return buffers.fetched()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # not on every system, nor allowed everywhere
            # For this thread, and for those that its ops are split over.
            os.sched_setaffinity(0, _cores())
        # A thread that never asked would take over, at its first op, the number of another thread.
        torch.get_num_threads()
        torch.set_num_threads(self._threads)  # counted for each thread
        self._ready.set()
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                work()
                del work  # it may hold much memory


def num_threads() -> int:
    """The number of threads for ops of the CPU: launching and copying need a core too."""
    return min(len(_cores()), max(1, torch.get_num_threads() - 1))


def _cores() -> set[int]:
    return machine.parts(["cpu", "cuda"])[0]


class _CallBuffers:
    """Pinned memory for the tensors of one module, used again in each call."""

    def __init__(self, given: Tensor, returned: Tensor) -> None:
        self.given = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        self.returned = torch.empty(returned.shape, dtype=returned.dtype, pin_memory=True)
        self._device = returned.device
        self._seen = None
        if 0 < self.returned.nbytes <= _SMALL:
            self._seen = torch.as_tensor(_Mapped(self.returned), device=returned.device)

    def fetched(self) -> Tensor:
        """Bring the output to the GPU; a kernel reads a small one, as a copy would queue."""
        output = torch.empty(self.returned.shape, dtype=self.returned.dtype, device=self._device)
        if self._seen is None:
            return output.copy_(self.returned, non_blocking=True)
        torch.bitwise_or(self._seen, 0, out=output.view(-1).view(torch.uint8))
        return output


class _Mapped:
    """Pinned memory of the CPU as the GPU sees it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def hop_seconds(device: torch.device, repeats: int = 100) -> float:
    """Measure the seconds in which a tensor goes to the CPU and comes back."""
    cpu = CpuBesideGpu(device)
    given = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    try:
        for _ in range(10):
            cpu(torch.Tensor.clone, given)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            given = cpu(torch.Tensor.clone, given)
        cpu.join()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / repeats
    finally:
        cpu.close()
