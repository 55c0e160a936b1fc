"""A CPU that computes in the order of a GPU's stream, while the program that asks for it goes on.

What is computed there waits for its input to arrive, and the stream waits for what comes of it: on
a word of memory that the CPU writes when it is done. So the host can tell the GPU what comes
afterwards before it is time for it, which takes the host longer than the GPU when a step is one
token. Where the driver lacks that wait, the host waits itself.
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

_HOST = torch.device("cpu")
_SMALL = 2**20  # bytes


class CallTime:
    """Calls of modules on the CPU so far, and their seconds from input there to output there."""

    def __init__(self) -> None:
        self.num_calls, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.num_calls, self.seconds = self.num_calls + 1, self.seconds + seconds


class CpuBesideGpu:
    """A thread that computes for one GPU; a call of a module is one tensor in, one out."""

    def __init__(self, device: torch.device, spent: CallTime | None = None) -> None:
        self.device, self._spent = device, spent or CallTime()
        self._wait = stream_wait()
        self._flags = CudaFlags()
        self._done = self._flags.new()
        self._asked = 0
        self._desks: dict[tuple[Any, ...], _CallBuffers] = {}
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
        """What a module gives for tensors of the GPU, computed on the CPU."""
        if self._wait is None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return self._at_once(forward, *args, **kwargs)[0]
        key = (id(forward), args[0].shape, args[0].dtype)
        if args[0].device != self.device or key not in self._desks:
            returned, wrote = self._at_once(forward, *args)
            if isinstance(returned, Tensor) and args[0].device == self.device and not wrote:
                self._desks[key] = _CallBuffers(args[0], returned)
            return returned
        return self._in_turn(forward, args[0], self._desks[key])

    def join(self) -> None:
        """Wait for all that was asked for; raises what failed."""
        self._work.put(self._idle.release)
        self._idle.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _at_once(
        self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, bool]:
        """What a module gives, and whether it wrote into what it was given."""
        (args, kwargs), copies = lent((args, kwargs), _HOST)
        begun = time.perf_counter()
        returned = forward(*args, **kwargs)
        self._spent.add(time.perf_counter() - begun)
        return moved(returned, self.device), given_back(copies)

    def _in_turn(self, forward: Callable[..., Any], given: Tensor, desk: _CallBuffers) -> Tensor:
        stream = torch.cuda.current_stream(self.device)
        desk.come.copy_(given, non_blocking=True)
        arrived = stream.record_event()
        self._asked += 1
        number = self._asked

        def work() -> None:
            try:
                arrived.synchronize()
                begun = time.perf_counter()
                made = forward(desk.come)
                if made.shape != desk.gone.shape or made.dtype != desk.gone.dtype:
                    raise RuntimeError(
                        f"a module gave {list(made.shape)} of {made.dtype}, and "
                        f"{list(desk.gone.shape)} of "
                        f"{desk.gone.dtype} for the same shape before; it cannot run beside the GPU"
                    )
                desk.gone.copy_(made)
                self._spent.add(time.perf_counter() - begun)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._done.reach(number)  # also after a failure: the stream must not wait for ever

        self._work.put(work)
        assert self._wait is not None
        self._wait(stream.cuda_stream, self._done.address, number)
        return desk.fetched()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # not on every system, nor allowed everywhere
            # Of this thread, and of those that ops are split over.
            os.sched_setaffinity(0, _cores())
        # A thread that has never asked would take over at its first op what another has set.
        torch.get_num_threads()
        torch.set_num_threads(self._threads)  # counted for each thread
        self._ready.set()
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                work()
                del work  # what it holds may be large


def num_threads() -> int:
    """Threads with which the CPU computes: whoever tells the GPU what to do, and what copies, need
    a core too."""
    return min(len(_cores()), max(1, torch.get_num_threads() - 1))


def _cores() -> set[int]:
    return machine.parts(["cpu", "cuda"])[0]


class _CallBuffers:
    """Memory through which the tensors of one module pass, used again in each call: the next waits
    for the last."""

    def __init__(self, given: Tensor, returned: Tensor) -> None:
        self.come = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        self.gone = torch.empty(returned.shape, dtype=returned.dtype, pin_memory=True)
        self._device, self._seen = returned.device, None
        if 0 < self.gone.nbytes <= _SMALL:
            self._seen = torch.as_tensor(_Mapped(self.gone), device=returned.device)

    def fetched(self) -> Tensor:
        """What the CPU has made, on the GPU. A small one is read by a kernel: it would wait behind
        weights else."""
        found = torch.empty(self.gone.shape, dtype=self.gone.dtype, device=self._device)
        if self._seen is None:
            return found.copy_(self.gone, non_blocking=True)
        torch.bitwise_or(self._seen, 0, out=found.view(-1).view(torch.uint8))
        return found


class _Mapped:
    """Locked memory of the host as the GPU sees it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def hop_seconds(device: torch.device, repeats: int = 100) -> float:
    """What it takes a tensor to go to the CPU and come back."""
    aside = CpuBesideGpu(device)
    given = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    try:
        for _ in range(10):
            aside(torch.Tensor.clone, given)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            given = aside(torch.Tensor.clone, given)
        aside.join()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / repeats
    finally:
        aside.close()
