"""Times a work on a device of this machine, as the runtime would have it there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from roost.core.cluster import Cluster
from roost.core.units import show_bytes
from roost.cost_models.timing.timed_ops import Work, forget
from roost.errors import InputError
from roost.presets import machine
from roost.presets.clock import cuda_time, host_time

# Inputs are rotated through as much memory as no cache holds, or an op would find in a cache what
# in a step it must fetch from memory. Not beyond so many copies: what is small is in a cache in a
# step too, it was made just before.
_CPU_ROTATION, _GPU_ROTATION = 64 * 2**20, 256 * 10**6  # bytes
_MOST_COPIES = 32
_PINNED, _CHUNK = 512 * 2**20, 64 * 2**20  # bytes


@dataclass(frozen=True)
class Lane:
    """How a device runs: on a GPU, or with some threads, and cores of its own where the CPU is
    several devices."""

    device: torch.device
    hardware: str  # devices that have this alike take alike
    threads: int = 0
    cores: frozenset[int] | None = None


def lanes(cluster: Cluster) -> list[Lane]:
    """Of each device; raises InputError where one is not on this machine."""
    kinds = [device.kind for device in cluster.devices]
    parts = machine.parts(kinds) if len(kinds) > 1 else [set[int]()]
    gpus = {f"cuda:{number}" for number in range(machine.num_gpus())}
    found = []
    for device, cores in zip(cluster.devices, parts, strict=True):
        if device.kind == "cpu":
            threads = len(cores) or torch.get_num_threads()
            if kinds.count("cpu") == 1:
                # As whoever runs this has asked for.
                threads = min(threads, torch.get_num_threads())
            kept = frozenset(cores) if cores else None
            found.append(Lane(torch.device("cpu"), f"cpu*{threads}", threads, kept))
        elif device.kind == "cuda" and device.name in gpus:
            there = torch.device(device.name)
            found.append(Lane(there, torch.cuda.get_device_name(there), cores=frozenset(cores)))
        else:
            known = ", ".join(["cpu", *sorted(gpus)])
            raise InputError(
                f"device {device.name!r} of cluster {cluster.name!r} is not on this machine, "
                f"which has {known}; ops are timed where they run: take roost.probe(), or --on "
                "here"
            )
    return found


class Timer:
    """Times works on one device: (seconds of the device, seconds of the host alone)."""

    def __init__(self, lane: Lane, seconds: float, share: float = 0.25) -> None:
        """`share` of the calls took no longer than what counts, on a CPU."""
        self.lane, self.seconds, self.share = lane, seconds, share
        self._thread: machine.OwnThread | None = None
        self._host: machine.OwnThread | None = None  # that launches, where it has a core of its own

    def __enter__(self) -> Self:
        if self.lane.device.type == "cuda" and self.lane.cores:
            self._host = machine.OwnThread(1, set(self.lane.cores))
        if self.lane.device.type == "cpu":
            self._thread = machine.OwnThread(self.lane.threads, set(self.lane.cores or ()) or None)
            # What is multiplied in place again and again gets so small that a CPU is slow with it;
            # in a step it is not.
            self._thread(lambda: torch.set_flush_denormal(True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        forget()
        for thread in (self._thread, self._host):
            if thread is not None:
                thread.__exit__(kind, error, trace)
        if self._thread is None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def time(self, work: Work) -> tuple[float, float]:
        """Raises whatever the op raises, and MemoryError where there is no room to try it."""
        if self._thread is not None:
            return self._thread(lambda: (self._on_cpu(work), 0.0))  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._on_gpu(work)

    def alone(self, call: Callable[[], Any]) -> Any:
        """Call it as ops are called here: in a thread of its own on a CPU, and for a GPU where it
        has a core."""
        if (thread := self._thread or self._host) is not None:
            return thread(call)
        with torch.no_grad():
            return call()

    def in_a_row(self, works: Sequence[Work]) -> float:
        """Seconds of the host for works one after the other, once each."""
        calls = [work.calls(self.lane.device, 1)[0] for work in works]

        def row() -> None:
            for call in calls:
                call()

        if self._thread is not None:
            return float(self._thread(lambda: host_time([row], self.seconds)))
        with torch.no_grad():
            return cuda_time([row], self.lane.device.index, self.seconds)[1]

    def _on_cpu(self, work: Work) -> float:
        rotation = max(_CPU_ROTATION, 2 * machine.cache_bytes())
        calls = work.calls(
            self.lane.device, _num_copies(work, rotation, machine.available_memory() // 2)
        )
        return host_time(calls, self.seconds, share=self.share)

    def _on_gpu(self, work: Work) -> tuple[float, float]:
        number = self.lane.device.index
        free = torch.cuda.mem_get_info(number)[0]
        free += torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        calls = work.calls(self.lane.device, _num_copies(work, _GPU_ROTATION, int(free * 0.9)))
        return cuda_time(calls, number, self.seconds)


def _num_copies(work: Work, rotation: int, room: int) -> int:
    room -= work.made_bytes
    if work.num_bytes > room:
        raise MemoryError(
            f"needs {show_bytes(work.num_bytes)}, and {show_bytes(max(room, 0))} are free"
        )
    size = max(work.num_bytes, 1)
    return max(1, min(_MOST_COPIES, math.ceil(rotation / size), room // size))


class CopiesBeside:
    """Pinned memory is copied to a GPU as long as this is open, by a thread that does little but
    wait.

    `both_ways`: and other memory from it.
    """

    def __init__(self, device: torch.device, both_ways: bool = False) -> None:
        self.device, self.both_ways = device, both_ways
        self._begun, self._ending = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *details: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.cuda.device(self.device):
                self._copy(
                    min(_PINNED, machine.available_memory() // 8 // _CHUNK * _CHUNK) or _CHUNK
                )
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()

    def _copy(self, size: int) -> None:
        cuda: Any = torch.cuda  # which has no types for these
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True).view(-1, _CHUNK)
        there = [torch.empty(_CHUNK, dtype=torch.uint8, device=self.device) for _ in range(2)]
        back = (
            torch.zeros(size, dtype=torch.uint8, pin_memory=True).view(-1, _CHUNK)
            if self.both_ways
            else None
        )
        from_there = torch.empty(_CHUNK, dtype=torch.uint8, device=self.device)
        # It falls behind by no more than a copy or two: both ways are as fast, or nearly.
        returning = cuda.Stream(self.device)
        # Blocking: to wait is to sleep, and takes no core from those who are timed.
        done = [cuda.Event(blocking=True) for _ in range(2)]
        with cuda.stream(cuda.Stream(self.device)):
            number = 0
            while not self._ending.is_set():
                turn = number % 2
                if number >= 2:
                    done[turn].synchronize()
                    self._begun.set()
                there[turn].copy_(host[number % len(host)], non_blocking=True)
                if back is not None:
                    with cuda.stream(returning):
                        back[number % len(back)].copy_(from_there, non_blocking=True)
                    cuda.current_stream(self.device).wait_event(returning.record_event())
                done[turn].record()
                number += 1
        torch.cuda.synchronize(self.device)
