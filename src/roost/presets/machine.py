"""This machine: its processors, its memory, and threads on some of its cores."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

_SOME_CACHE = 32 * 2**20  # bytes of last-level cache, if the machine does not say
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # the C library's numbers for them


def hardware() -> dict[str, Any]:
    """The facts that measurements depend on, which are the key of the measurement cache."""
    import torch

    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(num_gpus())],
        "driver": _driver(),
        "cpu": cpu_model(),
        "cores": len(own_cores()),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "precision": _precision(),
    }


def _precision() -> list[Any]:
    """PyTorch's settings for single precision; empty if old and new settings are mixed."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
        except RuntimeError:
            return []


def num_gpus() -> int:
    """The number of GPUs that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # not on every system
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def shares(count: int, cores: Sequence[int] | None = None) -> list[set[int]]:
    """Cores split evenly over so many devices, by default the cores of this process."""
    own = own_cores() if cores is None else cores
    if count >= len(own):
        return [{own[number % len(own)]} for number in range(count)]
    bounds = [number * len(own) // count for number in range(count + 1)]
    return [set(own[first:end]) for first, end in pairwise(bounds)]


def parts(kinds: Sequence[str]) -> list[set[int]]:
    """The cores of each device of a cluster, by device kind.

    Devices of the kind `cpu` share the cores evenly. If there are enough, each launcher of a GPU
    has a core of its own, and the threads that copy share one. On a core of a CPU op a launcher
    would hold up the op, and the op would hold up the GPU.
    """
    own = own_cores()
    is_cpu = [kind == "cpu" for kind in kinds]
    if not any(is_cpu):
        return [set() for _ in kinds]
    gpus = len(kinds) - sum(is_cpu)
    launchers = min(gpus + 1, len(own) // 4) if gpus else 0
    computing = own[: len(own) - launchers]
    spare = set(own) - set(computing)
    shared = iter(shares(sum(is_cpu), computing))
    return [next(shared) if cpu else spare for cpu in is_cpu]


def cpu_model() -> str:
    """The name of the CPU."""
    name = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Bytes of the last-level cache."""
    text = _text("/sys/devices/system/cpu/cpu0/cache/index3/size").strip()
    size = re.fullmatch(r"(\d+)([KM])", text)
    return int(size[1]) * {"K": 2**10, "M": 2**20}[size[2]] if size else _SOME_CACHE


def available_memory() -> int:
    """Bytes that programs may still take, within what a container allows."""
    kibibytes = re.search(r"^MemAvailable:\s*(\d+) kB$", _text("/proc/meminfo"), re.M)
    if kibibytes:
        free = int(kibibytes[1]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    most = _text(group / "memory.max").strip()
    used = _text(group / "memory.current").strip()
    if most.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.M)
        free = min(free, int(most) - int(used) + (int(cached[1]) if cached else 0))
    return max(free, 0)


def gpu_memory(number: int) -> int:
    """Bytes that this process may have on a GPU, free or held already. It makes a CUDA context."""
    import torch

    free, _ = torch.cuda.mem_get_info(number)
    return int(free) + int(torch.cuda.memory_reserved(number))


def _driver() -> str:
    version = re.search(r"\d+\.\d+(\.\d+)*", _text("/proc/driver/nvidia/version"))
    return version[0] if version else ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def keep_memory() -> None:
    """Make the C library keep freed memory for later tensors, in this process from now on.

    Otherwise every step takes large tensors from the system page by page and gives them back. That
    was 5,000 to 30,000 page faults a step for models of 50 ms to a second: a twentieth of the time
    on one core, and more on many.
    """
    with suppress(OSError, AttributeError):  # another C library has no such settings
        library = ctypes.CDLL("libc.so.6")
        # Older versions refuse more than 32 MiB. The other settings alone would make it worse: with
        # any of them set, a block is large from 128 KiB on, and this limit no longer grows.
        if any(library.mallopt(_MMAP_THRESHOLD, most) for most in (2**30, 2**25)):
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_TOP_PAD, 64 * 2**20)


class OwnThread:
    """A thread with PyTorch threads and cores of its own, which runs calls one by one.

    The runtime runs a device of the kind `cpu` in one, so devices are measured in one.
    """

    def __init__(self, threads: int, cores: set[int] | None = None) -> None:
        import torch

        keep_memory()
        self._before = torch.get_num_threads()
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads, cores), daemon=True)
        self._thread.start()

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Call in the thread; return its result or raise its error here."""
        self._calls.put(call)
        value, error = self._results.get()
        if error is not None:
            raise error
        return value

    def _run(self, threads: int, cores: set[int] | None) -> None:
        import torch

        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)  # for this thread and the threads that it makes
        # Without this call the thread's first op would take over the setting of another thread.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        with torch.no_grad():
            while (call := self._calls.get()) is not None:
                value: Any = None
                failed: BaseException | None = None
                try:
                    value = call()
                except BaseException as error:
                    failed = error
                del call  # it may hold large tensors
                self._results.put((value, failed))
                del value, failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import torch

        self._calls.put(None)
        # After Ctrl-C nobody waits for the current call.
        if error is None or isinstance(error, Exception):
            self._thread.join()
        torch.set_num_threads(self._before)  # new threads begin with the last setting of any thread
