"""Placements -> trials on this machine, by simulating: in this process, or in a pool of them where
that pays.

Batches under one order are compiled loops already. Under an order of its own a placement must first
be laid out, in Python, and that is what the pool is for.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import missing_memory
from roost.core.trial import Trial
from roost.simulator.compiled import Simulator

log = logging.getLogger(__name__)

# A pool is started when a batch would take this long by itself, and a process gets at least so much
# at a time.
_START_SECONDS = 4.0
_CHUNK_SECONDS = 0.05


class Simulating:
    """The simulator as a source of trials."""

    def __init__(self, problem: Problem, workers: int | None = None) -> None:
        self.problem = problem
        self.workers = len(os.sched_getaffinity(0)) if workers is None else max(1, workers)
        self.capacity = problem.cluster.memory
        self.seconds_each = 0.0  # what a trial took lately
        self._pool: ProcessPoolExecutor | None = None

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        """One trial for each placement, in their order."""
        began = time.perf_counter()
        by_order: dict[Any, list[int]] = {}
        alone: list[int] = []
        # Devices as this cluster counts them.
        checked = [self.problem.check(placement) for placement in placements]
        for number, placement in enumerate(checked):
            if placement.order == "priority" or len(placements) == 1:
                alone.append(number)
            else:
                key = (placement.order, np.asarray(placement.prefetch_bytes).tobytes())
                by_order.setdefault(key, []).append(number)
        found: dict[int, tuple[float, Any]] = {}
        simulator = Simulator.of(self.problem)
        for numbers in by_order.values():
            first = checked[numbers[0]]
            devices = np.stack([checked[n].device for n in numbers])
            outcome = simulator.evaluate(
                devices, first.order, first.prefetch_bytes, threads=self.workers
            )
            for row, number in enumerate(numbers):
                found[number] = (float(outcome.step_time[row]), outcome.peak_memory[row])
        for number, cost in zip(alone, self._alone([checked[n] for n in alone]), strict=True):
            found[number] = cost
        seconds = (time.perf_counter() - began) / max(1, len(placements))
        self.seconds_each = seconds
        return [
            self._trial(placement, *found[number], seconds)
            for number, placement in enumerate(placements)
        ]

    def _trial(self, placement: Placement, step_time: float, peak: Any, seconds: float) -> Trial:
        missing = int(missing_memory(peak, self.capacity).sum())
        return Trial(
            placement, step_time, np.array(peak), missing == 0, seconds, missing_bytes=missing
        )

    def _alone(self, placements: Sequence[Placement]) -> list[tuple[float, Any]]:
        """Placements that share no layout, one by one."""
        found: list[tuple[float, Any]] = []
        began = time.perf_counter()
        for number, placement in enumerate(placements):
            left = len(placements) - number
            each = (time.perf_counter() - began) / max(1, number)
            if (
                number > 2
                and self.workers > 1
                and (self._pool is not None or each * left > _START_SECONDS)
            ):
                size = max(1, int(_CHUNK_SECONDS / max(each, 1e-9)))
                if (
                    left > 2 * size
                    and (rest := self._in_processes(placements[number:], size)) is not None
                ):
                    return found + rest
            timeline = Simulator.of(self.problem).simulate(placement)
            found.append((timeline.step_time, timeline.peak_memory))
        return found

    def _in_processes(
        self, placements: Sequence[Placement], size: int
    ) -> list[tuple[float, Any]] | None:
        """By the pool, so many at a time; None where its processes do not live, and then they are
        not asked again."""
        try:
            return list(self._processes().map(_simulate, placements, chunksize=size))
        except BrokenProcessPool as error:
            log.warning("the processes that simulate ended; going on without them: %s", error)
            self.close()
            self.workers = 1
            return None

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: this process may have threads, of ours or of a library.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _receive, (self.problem,))
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


_received: list[Problem] = []  # in a process of the pool, the problem


def _receive(problem: Problem) -> None:
    # Ctrl-C reaches all processes; the one that searches ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _received[:] = [problem]


def _simulate(placement: Placement) -> tuple[float, Any]:
    timeline = Simulator.of(_received[0]).simulate(placement)
    return timeline.step_time, timeline.peak_memory
