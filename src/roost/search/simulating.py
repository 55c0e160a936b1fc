"""The simulator as the source of trials, in this process or in a pool of processes.

Compiled loops simulate batches of placements with the same order. A placement with priorities of
its own takes Python time before it is simulated; for many of these the pool is worth its start.
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
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import missing_memory
from roost.core.trial import Trial
from roost.search.source import Source
from roost.simulator.compiled import Simulator

log = logging.getLogger(__name__)

_POOL_SECONDS = 4.0  # of work that is left in a batch: then a pool is started
_CHUNK_SECONDS = 0.05  # of work that a process of the pool gets at a time


class StepCost(NamedTuple):
    """The simulated cost of one placement."""

    step_time: float
    peak_memory: Array  # [devices] bytes


class Simulating(Source):
    """The simulator as a source of trials."""

    def __init__(self, problem: Problem, workers: int | None = None) -> None:
        self.problem = problem
        self.workers = len(os.sched_getaffinity(0)) if workers is None else max(1, workers)
        self._pool: ProcessPoolExecutor | None = None

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        began = time.perf_counter()
        checked = [self.problem.check(placement) for placement in placements]
        costs = self._costs(checked)
        self.seconds_each = (time.perf_counter() - began) / max(1, len(placements))
        return [self._trial(*pair) for pair in zip(placements, costs, strict=True)]

    def _costs(self, placements: Sequence[Placement]) -> list[StepCost]:
        by_order: dict[tuple[str, bytes], list[int]] = {}
        alone: list[int] = []
        for number, placement in enumerate(placements):
            if placement.order == "priority" or len(placements) == 1:
                alone.append(number)
            else:
                key = (placement.order, np.asarray(placement.prefetch_bytes).tobytes())
                by_order.setdefault(key, []).append(number)
        costs: dict[int, StepCost] = {}
        simulator = Simulator.of(self.problem)
        for numbers in by_order.values():
            first = placements[numbers[0]]
            devices = np.stack([placements[number].device for number in numbers])
            outcome = simulator.evaluate(
                devices, first.order, first.prefetch_bytes, threads=self.workers
            )
            for row, number in enumerate(numbers):
                costs[number] = StepCost(float(outcome.step_time[row]), outcome.peak_memory[row])
        one_by_one = self._one_by_one([placements[number] for number in alone])
        costs |= zip(alone, one_by_one, strict=True)
        return [costs[number] for number in range(len(placements))]

    def _trial(self, placement: Placement, cost: StepCost) -> Trial:
        missing = int(missing_memory(cost.peak_memory, self.problem.cluster.memory).sum())
        return Trial(
            placement,
            cost.step_time,
            np.array(cost.peak_memory),
            missing == 0,
            self.seconds_each,
            missing_bytes=missing,
        )

    def _one_by_one(self, placements: Sequence[Placement]) -> list[StepCost]:
        """The costs of placements that share no loop. A pool takes the rest of a long batch."""
        costs: list[StepCost] = []
        began = time.perf_counter()
        for number, placement in enumerate(placements):
            left = len(placements) - number
            each = (time.perf_counter() - began) / max(1, number)
            is_long = self._pool is not None or each * left > _POOL_SECONDS
            if number > 2 and self.workers > 1 and is_long:
                size = max(1, int(_CHUNK_SECONDS / max(each, 1e-9)))
                rest = self._in_pool(placements[number:], size) if left > 2 * size else None
                if rest is not None:
                    return costs + rest
            costs.append(_cost(self.problem, placement))
        return costs

    def _in_pool(self, placements: Sequence[Placement], size: int) -> list[StepCost] | None:
        """The costs from the pool; None if its processes died. Then no pool is used any more."""
        if self._pool is None:
            # Not forked: this process may have threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _receive, (self.problem,))
        try:
            return list(self._pool.map(_simulate, placements, chunksize=size))
        except BrokenProcessPool as error:
            log.warning("the processes that simulate ended; going on without them: %s", error)
            self.close()
            self.workers = 1
            return None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _cost(problem: Problem, placement: Placement) -> StepCost:
    timeline = Simulator.of(problem).simulate(placement)
    return StepCost(timeline.step_time, timeline.peak_memory)


_received: list[Problem] = []  # the problem, in a process of the pool


def _receive(problem: Problem) -> None:
    # Ctrl-C reaches all processes; the one that searches ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _received[:] = [problem]


def _simulate(placement: Placement) -> StepCost:
    return _cost(_received[0], placement)
