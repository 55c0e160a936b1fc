"""Placements that are ready to be timed in a worker process, which is replaced after a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import ExecutionError, InputError
from roost.search.measured.model_source import ModelSource
from roost.search.measured.worker import WorkerFailed, WorkerProcess, available_bytes
from roost.simulator.compiled import Simulator

if TYPE_CHECKING:
    from roost.search.measured.served_model import ReadyPlacement

# One sample of short steps covers several steps, or reading the clock would count.
_SAMPLE_SECONDS = 0.02
_MOST_STEPS = 50
_CHECKED_STEPS = 2  # of a placement before it is warmed up
_MEMORY_FACTOR = 1.5  # times the simulated peak
_HOST_SPARE_BYTES = 2**30  # of the machine, never used


@dataclass(frozen=True)
class Limits:
    """The time and memory that a placement may take before it counts as failed."""

    floor: float = 20.0  # seconds, for any request
    multiple: float = 10.0  # times the best step time so far, for each step; added to the floor
    most: float = 300.0  # seconds, for a whole trial
    start: float = 900.0  # seconds, for building and capturing the model in a new process
    # Bytes of the process beyond the model and three times the simulated peak.
    spare_bytes: int = 4 * 2**30
    share: float = 0.8  # of the free memory of the machine, at most


class Candidates:
    """The worker process and the candidates in it: placements that are ready to be timed."""

    def __init__(
        self,
        problem: Problem,
        model: ModelSource,
        warm_up: int,
        limits: Limits,
        runtime: Callable[..., Any] | None = None,
    ) -> None:
        check_devices(problem.cluster)
        self.problem = problem
        self.model = model
        self.warm_up = warm_up
        self.limits = limits
        self.runtime = runtime
        self.best_seconds = inf  # of the best step so far: much slower ones are not waited for
        self.num_started = 0  # processes
        self._until = inf  # end of the current trial, by the monotonic clock
        self._worker: WorkerProcess | None = None
        self._peaks: dict[str, Array] = {}  # by digest
        self._ready: dict[str, tuple[Placement, ReadyPlacement]] = {}  # the last used comes last

    def open(self) -> WorkerProcess:
        """The process, started if needed. Raises if the model cannot run in it."""
        if self._worker is None:
            began = time.monotonic()
            most = self.limits.share * available_bytes()
            try:
                self._worker = WorkerProcess(
                    self.model, self.problem, self.runtime, self.limits.start, most
                )
            except WorkerFailed as error:
                if error.kind == "refused":
                    raise InputError(str(error)) from None
                raise ExecutionError(f"the model cannot be run: {error}") from None
            self.num_started += 1
            self._until += time.monotonic() - began  # the trial does not pay for the start
        return self._worker

    def close(self) -> None:
        """End the process. The next request starts another."""
        worker = self._worker
        self._worker = None
        self._ready = {}
        if worker is not None:
            worker.close()

    def begin_trial(self) -> None:
        """Start the time limit of a trial."""
        self._until = time.monotonic() + self.limits.most

    def make_ready(self, placement: Placement) -> ReadyPlacement:
        """Make a placement ready, beside others if there is room. Raises `WorkerFailed`."""
        key = placement.digest
        if key in self._ready:
            self._ready[key] = self._ready.pop(key)
        else:
            while self._ready and not self.has_room(placement):
                self.drop(next(iter(self._ready.values()))[0])
            crowded = bool(self._ready)
            try:
                built = self._build(placement)
            except WorkerFailed as error:
                if error.kind != "memory" or not crowded:
                    raise
                built = self._build(placement)  # alone: all others ended with the process
            self._ready[key] = placement, built
        return self._ready[key][1]

    def is_ready(self, placement: Placement) -> bool:
        return placement.digest in self._ready

    def drop(self, placement: Placement) -> None:
        if self._ready.pop(placement.digest, None) is not None:
            self._ask("drop", placement.digest)

    def time_step(self, placement: Placement) -> float:
        """Seconds of a step, timed now."""
        about = self.make_ready(placement).seconds
        steps = min(_MOST_STEPS, max(1, ceil(_SAMPLE_SECONDS / max(about, 1e-6))))
        return float(self._ask("time", placement.digest, steps, steps=steps))

    def has_room(self, placement: Placement) -> bool:
        """True if a placement fits beside the candidates."""
        need = _MEMORY_FACTOR * self._peak(placement)
        host = self._is_host
        if need[host].sum() > available_bytes() - _HOST_SPARE_BYTES:
            return False
        free = {} if host.all() else self._ask("free")
        return all(need[device] <= left for device, left in free.items())

    @property
    def _is_host(self) -> Array:  # [devices]
        return np.array([device.kind == "cpu" for device in self.problem.cluster.devices])

    def _peak(self, placement: Placement) -> Array:  # [devices] bytes, simulated
        key = placement.digest
        if key not in self._peaks:
            self._peaks[key] = Simulator.of(self.problem).simulate(placement).peak_memory
        return self._peaks[key]

    def _build(self, placement: Placement) -> ReadyPlacement:
        steps = _CHECKED_STEPS + self.warm_up
        args = (placement.digest, placement, self.warm_up)
        ready: ReadyPlacement = self._ask("build", *args, steps=steps, more=placement)
        return ready

    def _ask(self, command: str, *args: Any, steps: int = 0, more: Placement | None = None) -> Any:
        """The answer of the process to a request of so many steps, which holds `more` in memory."""
        worker = self.open()
        limits = self.limits
        seconds = limits.floor + (limits.multiple * self.best_seconds * steps if steps else 0.0)
        limit = max(0.0, min(limits.most, seconds, self._until - time.monotonic()))
        most_bytes = self._most_bytes(worker, more)
        try:
            return worker.ask(command, *args, limit=limit, most_bytes=most_bytes)
        except BaseException as error:
            if not (isinstance(error, WorkerFailed) and error.kind == "refused"):
                self.close()
            raise

    def _most_bytes(self, worker: WorkerProcess, more: Placement | None) -> float:
        """The memory limit of the process: endless allocation must not take the machine with it."""
        held = [placement for placement, _ in self._ready.values()]
        if more is not None:
            held.append(more)
        need = 3.0 * sum(float(self._peak(placement)[self._is_host].sum()) for placement in held)
        by_need = worker.rss + need + self.limits.spare_bytes
        return min(by_need, worker.held_bytes() + self.limits.share * available_bytes())


def check_devices(cluster: Cluster) -> None:
    """Raise InputError if this machine lacks a device of the cluster."""
    for device in cluster.devices:
        named = re.fullmatch(r"(cpu|cuda)(?::(\d{1,4}))?", device.name)
        where = f"device {device.name!r} of cluster {cluster.name!r}"
        if named is None or named[1] != device.kind:
            raise InputError(
                f"{where} is a {device.kind}, and cannot be run on here; placements that are "
                "measured run on cpu, cpu:N (threads with cores of their own) and cuda:N"
            )
        if device.kind == "cuda":
            import torch

            count = torch.cuda.device_count()
            if int(named[2] or 0) >= count:
                devices = f"{count or 'no'} CUDA device{'s' * (count != 1)}"
                raise InputError(f"{where} is not here: PyTorch finds {devices}")
