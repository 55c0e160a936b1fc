"""The machine we are on: its processors, its memory, and threads that keep to some of its cores."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

_SOME_CACHE = 32 * 2**20  # bytes of last-level cache, where the machine does not tell
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # as the C library numbers them


def hardware() -> dict[str, Any]:
    """What measurements depend on: they are kept under this."""
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
    """How PyTorch was asked to compute in single precision. It warns of, or refuses, a mix of its
    old and new ways."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
        except RuntimeError:
            return []


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # not on every system
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def shares(count: int, cores: Sequence[int] | None = None) -> list[set[int]]:
    """Cores, by default those of this process, split evenly over so many devices, at least one for
    each."""
    own = own_cores() if cores is None else cores
    if count >= len(own):
        return [{own[number % len(own)]} for number in range(count)]
    return [
        set(own[number * len(own) // count : (number + 1) * len(own) // count])
        for number in range(count)
    ]


def parts(kinds: Sequence[str]) -> list[set[int]]:
    """Cores of each device of a cluster, by their kinds.

    Those of the kind `cpu` share them evenly. Where there are enough, the threads that tell GPUs
    what to do have one each to themselves, and those that copy one together: beside an op that is
    split over all cores they would hold up the op, and the op would hold up the GPU.
    """
    own, hosts = own_cores(), [kind == "cpu" for kind in kinds]
    if not any(hosts):
        return [set() for _ in kinds]
    gpus = len(kinds) - sum(hosts)
    aside = min(gpus + 1, len(own) // 4) if gpus else 0
    rest, spare = own[: len(own) - aside], set(own[len(own) - aside :])
    shared = iter(shares(sum(hosts), rest))
    return [next(shared) if host else spare for host in hosts]


def cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Of the last-level cache."""
    found = re.fullmatch(
        r"(\d+)([KM])", _text("/sys/devices/system/cpu/cpu0/cache/index3/size").strip()
    )
    return int(found[1]) * {"K": 2**10, "M": 2**20}[found[2]] if found else _SOME_CACHE


def available_memory() -> int:
    """Bytes that programs may still take, within what a container allows."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text("/proc/meminfo"), re.M)
    free = (
        int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    group = Path("/sys/fs/cgroup")
    most, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if most.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.M)
        free = min(free, int(most) - int(used) + (int(cached[1]) if cached else 0))
    return max(free, 0)


def gpu_memory(number: int) -> int:
    """Bytes that this process may have on a GPU: what is free, and what it holds already. Makes a
    CUDA context."""
    import torch

    free, _ = torch.cuda.mem_get_info(number)
    return int(free) + int(torch.cuda.memory_reserved(number))


def _driver() -> str:
    found = re.search(r"\d+\.\d+(\.\d+)*", _text("/proc/driver/nvidia/version"))
    return found[0] if found else ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def keep_memory() -> None:
    """Have the C library keep what is given back, for the tensors to come: of this process, from
    now on.

    Otherwise large ones are taken from the system page by page, and given back, in every step:
    5,000 to 30,000 page faults a step on models of 50 ms to a second, a twentieth of its time on
    one core and more on many.
    """
    with suppress(OSError, AttributeError):  # another library has other ways
        library = ctypes.CDLL("libc.so.6")
        # Older versions refuse more than 32 MiB. The other settings alone would make it worse: with
        # any of them set, what counts as large starts at 128 KiB, and no longer grows with what is
        # given back.
        if any(library.mallopt(_MMAP_THRESHOLD, most) for most in (2**30, 2**25)):
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_TOP_PAD, 64 * 2**20)


class OwnThread:
    """A thread with some threads of PyTorch's, and cores where given, that does what it is asked,
    one by one.

    It is how the runtime has a device of the kind `cpu`, so it is how one is measured.
    """

    def __init__(self, threads: int, cores: set[int] | None = None) -> None:
        import torch

        keep_memory()
        self._before = torch.get_num_threads()
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads, cores), daemon=True)
        self._thread.start()

    def __call__(self, work: Callable[[], Any]) -> Any:
        """What it returns or raises, in that thread."""
        self._work.put(work)
        value, error = self._found.get()
        if error is not None:
            raise error
        return value

    def _run(self, threads: int, cores: set[int] | None) -> None:
        import torch

        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)  # of this thread, and of those that it makes
        # A thread that has never asked would take over at its first op what another has set.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                value: Any = None
                failed: BaseException | None = None
                try:
                    value = work()
                except BaseException as error:
                    failed = error
                del work  # what it holds may be large
                self._found.put((value, failed))
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

        self._work.put(None)
        # With Ctrl-C nobody waits for what it is at.
        if error is None or isinstance(error, Exception):
            self._thread.join()
        torch.set_num_threads(self._before)  # what one thread sets is what new threads begin with
