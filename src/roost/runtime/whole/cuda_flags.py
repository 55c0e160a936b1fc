"""Words of memory on which a stream of a GPU waits until the CPU has written them.

`cpu_beside_gpu.py` uses them: the GPU's later work is launched before the CPU has made its inputs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

_AT_ONCE = 1024  # words


class CudaFlag:
    """A word that grows: a stream that waits for a number goes on when it is reached."""

    def __init__(self, words: Any, number: int) -> None:
        self._words = words
        self._number = number
        self.address = words.ctypes.data + number * words.itemsize

    def reach(self, number: int) -> None:
        self._words[self._number] = number % 2**31


class CudaFlags:
    """Makes flags in pinned memory."""

    def __init__(self) -> None:
        self._words: Any = None
        self._memory: list[torch.Tensor] = []
        self._used = _AT_ONCE

    def new(self) -> CudaFlag:
        if self._used == _AT_ONCE:
            self._memory.append(torch.zeros(_AT_ONCE, dtype=torch.int32, pin_memory=True))
            # The same memory, written without a kernel.
            self._words = self._memory[-1].numpy()
            self._used = 0
        self._used += 1
        return CudaFlag(self._words, self._used - 1)


def stream_wait() -> Callable[[int, int, int], None] | None:
    """Give the function that makes a stream wait until a word is at least a number.

    None if the driver has no such wait.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ask = driver.cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        log.info("the driver has no cuStreamWaitValue32: each call on the CPU is waited for")
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    ask.restype = ctypes.c_int

    def wait(stream: int, address: int, number: int) -> None:
        code = ask(stream, address, number % 2**31, 0)
        if code != 0:
            raise RuntimeError(f"cuStreamWaitValue32 failed with error {code}")

    return wait
