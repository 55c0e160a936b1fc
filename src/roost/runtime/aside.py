"""A CPU that computes in the order of a GPU's stream, while the program that asks for it goes on.

What is computed there waits for its input to arrive, and the stream waits for what comes of it: on a word of memory
that the CPU writes when it is done. So the host can tell the GPU what comes afterwards before it is time for it, which
takes the host longer than the GPU when a step is one token. Where the driver lacks that wait, the host waits itself.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from roost.runtime.moves import moved

log = logging.getLogger(__name__)

_HOST = torch.device("cpu")


class Aside:
    """A thread that computes for one GPU; a call of a module is one tensor in, one out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wait = _stream_wait()
        self._done: Any = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._word = self._done.numpy()  # the same memory, written without a kernel
        self._asked = 0
        self._shapes: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype]] = {}
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="beside the GPU", daemon=True)
        self._thread.start()

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a module gives for tensors of the GPU, computed on the CPU."""
        if self._wait is None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return self._at_once(forward, *args, **kwargs)
        key = (id(forward), args[0].shape, args[0].dtype)
        if args[0].device != self.device or key not in self._shapes:
            returned = self._at_once(forward, *args)
            if isinstance(returned, Tensor) and args[0].device == self.device:
                self._shapes[key] = (returned.shape, returned.dtype)
            return returned
        return self._in_turn(forward, args[0], *self._shapes[key])

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

    def _at_once(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = moved((args, kwargs), _HOST)
        return moved(forward(*args, **kwargs), self.device)

    def _in_turn(self, forward: Callable[..., Any], given: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        stream = torch.cuda.current_stream(self.device)
        come = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        gone = torch.empty(shape, dtype=dtype, pin_memory=True)
        come.copy_(given, non_blocking=True)
        arrived = stream.record_event()
        self._asked += 1
        number = self._asked % 2**31

        def work() -> None:
            try:
                arrived.synchronize()
                gone.copy_(forward(come))
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._word[0] = number  # also after a failure: the stream must not wait for ever

        self._work.put(work)
        assert self._wait is not None
        self._wait(stream.cuda_stream, self._done.data_ptr(), number)
        found = torch.empty(shape, dtype=dtype, device=self.device)
        found.copy_(gone, non_blocking=True)
        return found

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # counted for each thread
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                work()
                del work  # what it holds may be large


def _stream_wait() -> Callable[[int, int, int], None] | None:
    """Makes a stream wait until a word of memory is at least a number; None where that cannot be."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ask = driver.cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        log.info("the driver has no cuStreamWaitValue32: the host waits for what runs on the CPU")
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    ask.restype = ctypes.c_int

    def wait(stream: int, address: int, number: int) -> None:
        code = ask(stream, address, number, 0)
        if code != 0:
            raise RuntimeError(f"cuStreamWaitValue32 failed with error {code}")

    return wait
