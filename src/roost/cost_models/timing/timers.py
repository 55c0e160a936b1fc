"""Timers of a call on a device of this machine, under the conditions of the runtime."""

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
from roost.cost_models.timing.timed_ops import TimedCall, forget
from roost.errors import InputError
from roost.presets import machine
from roost.presets.clock import cuda_time, host_time

# Calls take their inputs in turn from more memory than a cache holds: a step fetches them from
# memory too. Small inputs have at most so many copies: in a step they are in a cache, just made.
_CPU_ROTATION, _GPU_ROTATION = 64 * 2**20, 256 * 10**6  # bytes
_MOST_COPIES = 32
_PINNED, _CHUNK = 512 * 2**20, 64 * 2**20  # bytes


@dataclass(frozen=True)
class TimedDevice:
    """A device of this machine to time calls on."""

    device: torch.device
    hardware: str  # devices with the same text have the same times
    threads: int = 0
    cores: frozenset[int] | None = None  # of its own, if the CPU is several devices

    @property
    def is_cpu(self) -> bool:
        """Tell whether it is a CPU, and not a GPU."""
        return self.device.type == "cpu"


def timed_devices(cluster: Cluster) -> list[TimedDevice]:
    """The devices of a cluster; raises InputError for one that is not on this machine."""
    kinds = [device.kind for device in cluster.devices]
    parts = machine.parts(kinds) if len(kinds) > 1 else [set[int]()]
    gpus = {f"cuda:{number}" for number in range(machine.num_gpus())}
    timed = []
    for device, cores in zip(cluster.devices, parts, strict=True):
        if device.kind == "cpu":
            threads = len(cores) or torch.get_num_threads()
            if kinds.count("cpu") == 1:
                # PyTorch's setting limits a single CPU.
                threads = min(threads, torch.get_num_threads())
            kept = frozenset(cores) if cores else None
            timed.append(TimedDevice(torch.device("cpu"), f"cpu*{threads}", threads, kept))
        elif device.kind == "cuda" and device.name in gpus:
            gpu = torch.device(device.name)
            hardware = torch.cuda.get_device_name(gpu)
            timed.append(TimedDevice(gpu, hardware, cores=frozenset(cores)))
        else:
            known = ", ".join(["cpu", *sorted(gpus)])
            raise InputError(
                f"device {device.name!r} of cluster {cluster.name!r} is not on this machine, "
                f"which has {known}; ops are timed where they run: take roost.probe(), or --on "
                "here"
            )
    return timed


class Timer:
    """Times calls on one device: seconds of the device, and seconds of the host alone."""

    def __init__(self, timed: TimedDevice, seconds: float, share: float = 0.25) -> None:
        """On a CPU the time that counts is the one that `share` of the calls do not exceed."""
        self.timed = timed
        self.seconds = seconds
        self.share = share
        self._thread: machine.OwnThread | None = None
        self._host: machine.OwnThread | None = None  # launches, if it has a core of its own

    def __enter__(self) -> Self:
        if self.timed.cores and not self.timed.is_cpu:
            self._host = machine.OwnThread(1, set(self.timed.cores))
        if self.timed.is_cpu:
            self._thread = machine.OwnThread(
                self.timed.threads, set(self.timed.cores or ()) or None
            )
            # Numbers multiplied in place again and again become denormal, which slows a CPU. In a
            # step they do not.
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

    def time(self, call: TimedCall) -> tuple[float, float]:
        """Time a call; raises the error of the call, or MemoryError if it has no room."""
        if self._thread is not None:
            return self._thread(lambda: (self._on_cpu(call), 0.0))  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._on_gpu(call)

    def alone(self, call: Callable[[], Any]) -> Any:
        """Call in the thread that times ops here."""
        if (thread := self._thread or self._host) is not None:
            return thread(call)
        with torch.no_grad():
            return call()

    def in_a_row(self, timed_calls: Sequence[TimedCall]) -> float:
        """Seconds of the host for calls one after the other, once each."""
        calls = [call.calls(self.timed.device, 1)[0] for call in timed_calls]

        def row() -> None:
            for call in calls:
                call()

        if self._thread is not None:
            return float(self._thread(lambda: host_time([row], self.seconds)))
        with torch.no_grad():
            return cuda_time([row], self.timed.device.index, self.seconds)[1]

    def _on_cpu(self, call: TimedCall) -> float:
        rotation = max(_CPU_ROTATION, 2 * machine.cache_bytes())
        copies = _num_copies(call, rotation, machine.available_memory() // 2)
        calls = call.calls(self.timed.device, copies)
        return host_time(calls, self.seconds, share=self.share)

    def _on_gpu(self, call: TimedCall) -> tuple[float, float]:
        number = self.timed.device.index
        free = torch.cuda.mem_get_info(number)[0]
        free += torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        copies = _num_copies(call, _GPU_ROTATION, int(free * 0.9))
        calls = call.calls(self.timed.device, copies)
        return cuda_time(calls, number, self.seconds)


def _num_copies(call: TimedCall, rotation: int, room: int) -> int:
    room -= call.made_bytes
    if call.num_bytes > room:
        raise MemoryError(
            f"needs {show_bytes(call.num_bytes)}, and {show_bytes(max(room, 0))} are free"
        )
    size = max(call.num_bytes, 1)
    return max(1, min(_MOST_COPIES, math.ceil(rotation / size), room // size))


class CopiesBeside:
    """Copies pinned memory to a GPU while it is open, in a thread that mostly waits.

    With `both_ways` it copies other memory from the GPU as well.
    """

    def __init__(self, device: torch.device, both_ways: bool = False) -> None:
        self.device = device
        self.both_ways = both_ways
        self._started = threading.Event()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            size = min(_PINNED, machine.available_memory() // 8 // _CHUNK * _CHUNK)
            with torch.cuda.device(self.device):
                self._copy(size or _CHUNK)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def _copy(self, size: int) -> None:
        cuda: Any = torch.cuda  # it has no types for streams and events
        source = _pinned(size)
        targets = [torch.empty(_CHUNK, dtype=torch.uint8, device=self.device) for _ in range(2)]
        returned = _pinned(size) if self.both_ways else None
        on_gpu = torch.empty(_CHUNK, dtype=torch.uint8, device=self.device)
        # Both ways are about equally fast, so this stream falls behind by a copy or two at most.
        returning = cuda.Stream(self.device)
        # A blocking event sleeps while it waits, and leaves the cores to the timed calls.
        done = [cuda.Event(blocking=True) for _ in range(2)]
        with cuda.stream(cuda.Stream(self.device)):
            number = 0
            while not self._stop.is_set():
                turn = number % 2
                if number >= 2:
                    done[turn].synchronize()
                    self._started.set()
                targets[turn].copy_(source[number % len(source)], non_blocking=True)
                if returned is not None:
                    with cuda.stream(returning):
                        returned[number % len(returned)].copy_(on_gpu, non_blocking=True)
                    cuda.current_stream(self.device).wait_event(returning.record_event())
                done[turn].record()
                number += 1
        torch.cuda.synchronize(self.device)


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True).view(-1, _CHUNK)
