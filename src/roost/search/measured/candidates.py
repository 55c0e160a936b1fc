"""Placements that stand ready to be timed, in a process that is replaced where one of them
fails."""

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
from roost.search.measured.worker import Failed, Worker, available_bytes
from roost.simulator.compiled import Simulator

if TYPE_CHECKING:
    from roost.search.measured.worker_process import Built

# A sample of short steps is of several: reading a clock is nothing beside it.
_SAMPLE_SECONDS, _MOST_STEPS = 0.02, 50
_CHECKED_STEPS = 2  # that a placement takes before it is warmed up
# Times what the simulator says; bytes of the machine that are left alone.
_ROOM, _HOST_ROOM = 1.5, 2**30


@dataclass(frozen=True)
class Limits:
    """What a placement may take before it counts as failed."""

    floor: float = 20.0  # seconds, for anything
    multiple: float = 10.0  # times the step of the best so far, for each step; on top of the floor
    most: float = 300.0  # seconds, for all of a trial
    start: float = 900.0  # seconds, for building and capturing the model in a new process
    # Of the process, beyond the model and three times what the simulator says.
    spare_bytes: int = 4 * 2**30
    share: float = 0.8  # of the memory of the machine that is free, at most


class Stand:
    """The process, and what is ready in it."""

    def __init__(
        self,
        problem: Problem,
        model: ModelSource,
        warm_up: int,
        limits: Limits,
        runtime: Callable[..., Any] | None = None,
    ) -> None:
        check_devices(problem.cluster)
        self.problem, self.model, self.warm_up, self.limits, self.runtime = (
            problem,
            model,
            warm_up,
            limits,
            runtime,
        )
        # Of the step of the best so far: what is very much slower is not waited for.
        self.best_seconds = inf
        self.num_started = 0  # processes
        self._until = inf  # by the clock: then what was allowed is over
        self._worker: Worker | None = None
        self._peaks: dict[str, Array] = {}  # by digest
        # By digest, what was used last comes last.
        self._ready: dict[str, tuple[Placement, Built]] = {}

    def open(self) -> Worker:
        """The process. Raises where the model cannot be run in it."""
        if self._worker is None:
            began = time.monotonic()
            most = self.limits.share * available_bytes()
            try:
                self._worker = Worker(
                    self.model, self.problem, self.runtime, self.limits.start, most
                )
            except Failed as error:
                if error.kind == "refused":
                    raise InputError(str(error)) from None
                raise ExecutionError(f"the model cannot be run: {error}") from None
            self.num_started += 1
            self._until += time.monotonic() - began  # nobody's fault
        return self._worker

    def close(self) -> None:
        """End the process; it is started again where something is asked."""
        worker, self._worker, self._ready = self._worker, None, {}
        if worker is not None:
            worker.close()

    def allow(self) -> None:
        """All that follows, up to when this is called again, may take as long as one trial may."""
        self._until = time.monotonic() + self.limits.most

    def hold(self, placement: Placement) -> Built:
        """Have a placement ready, beside others where there is room; raises `Failed` where it
        fails."""
        key = placement.digest
        if key in self._ready:
            self._ready[key] = self._ready.pop(key)
        else:
            while self._ready and not self.has_room(placement):
                self.drop(next(iter(self._ready.values()))[0])
            crowded = bool(self._ready)
            try:
                built = self._build(placement)
            except Failed as error:
                if error.kind != "memory" or not crowded:
                    raise
                built = self._build(placement)  # alone: with the process all others went
            self._ready[key] = placement, built
        return self._ready[key][1]

    def holds(self, placement: Placement) -> bool:
        return placement.digest in self._ready

    def drop(self, placement: Placement) -> None:
        if self._ready.pop(placement.digest, None) is not None:
            self._ask("drop", placement.digest)

    def lap(self, placement: Placement) -> float:
        """Seconds of a step, now."""
        about = self.hold(placement).seconds
        steps = min(_MOST_STEPS, max(1, ceil(_SAMPLE_SECONDS / max(about, 1e-6))))
        return float(self._ask("time", placement.digest, steps, steps=steps))

    def has_room(self, placement: Placement) -> bool:
        """Whether a placement can be held beside those that are ready."""
        need = _ROOM * self._peak(placement)
        host = self._is_host
        if need[host].sum() > available_bytes() - _HOST_ROOM:
            return False
        free = {} if host.all() else self._ask("free")
        return all(need[device] <= left for device, left in free.items())

    @property
    def _is_host(self) -> Array:  # [devices]
        return np.array([device.kind == "cpu" for device in self.problem.cluster.devices])

    def _peak(self, placement: Placement) -> Array:  # [devices] bytes
        if placement.digest not in self._peaks:
            self._peaks[placement.digest] = (
                Simulator.of(self.problem).simulate(placement).peak_memory
            )
        return self._peaks[placement.digest]

    def _build(self, placement: Placement) -> Built:
        steps = _CHECKED_STEPS + self.warm_up
        args = (placement.digest, placement, self.warm_up)
        found: Built = self._ask("build", *args, steps=steps, more=placement)
        return found

    def _ask(self, command: str, *args: Any, steps: int = 0, more: Placement | None = None) -> Any:
        worker, limits = self.open(), self.limits
        seconds = limits.floor + (limits.multiple * self.best_seconds * steps if steps else 0.0)
        limit = max(0.0, min(limits.most, seconds, self._until - time.monotonic()))
        try:
            return worker.ask(
                command, *args, limit=limit, most_bytes=self._most_bytes(worker, more)
            )
        except BaseException as error:
            if not (isinstance(error, Failed) and error.kind == "refused"):
                self.close()
            raise

    def _most_bytes(self, worker: Worker, more: Placement | None) -> float:
        """What the process may hold: one that allocates without end must not take the machine with
        it."""
        held = [placement for placement, _ in self._ready.values()] + (
            [] if more is None else [more]
        )
        need = 3.0 * sum(float(self._peak(placement)[self._is_host].sum()) for placement in held)
        now = worker.held_bytes()
        return min(
            worker.rss + need + self.limits.spare_bytes, now + self.limits.share * available_bytes()
        )


def check_devices(cluster: Cluster) -> None:
    """Raise where a device of a cluster is none that this machine has."""
    for device in cluster.devices:
        named = re.fullmatch(r"(cpu|cuda)(?::(\d{1,4}))?", device.name)
        where = f"device {device.name!r} of cluster {cluster.name!r}"
        if named is None or named[1] != device.kind:
            raise InputError(
                f"{where} is a {device.kind}, and cannot be run on here; what is measured runs on "
                f"cpu, cpu:N (threads "
                "with cores of their own) and cuda:N"
            )
        if device.kind == "cuda":
            import torch

            count = torch.cuda.device_count()
            if int(named[2] or 0) >= count:
                raise InputError(
                    f"{where} is not here: PyTorch finds {count or 'no'} CUDA "
                    f"device{'s' * (count != 1)}"
                )
