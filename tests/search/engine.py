"""What tests of the search engine share: a clock that stands still, a source that counts, placers
that do as told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating
from roost.search.source import Source
from roost.testing.tiny_problems import tiny_problem


@dataclass
class Clock:
    """Goes on only when it is told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Counting(Source):
    """The simulator, with what was asked of it; each trial takes so long by the clock."""

    def __init__(
        self, problem: Problem, clock: Clock | None = None, seconds_each: float = 0.0
    ) -> None:
        self._source, self.clock, self.seconds_each = Simulating(problem, 1), clock, seconds_each
        self.asked: list[str] = []
        self.closed = False

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        self.asked += [placement.digest for placement in placements]
        if self.clock is not None:
            self.clock.now += self.seconds_each * len(placements)
        return self._source.trials(placements)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Told:
    """A placer that does what a test tells it, and is the same for all of them."""

    run: Callable[[Problem, Evaluate], Any] = field(repr=False)

    def place(self, problem: Problem, evaluate: Evaluate) -> Any:
        if problem.graph.name == "warm-up":
            return problem.placement(np.zeros(problem.graph.num_ops, np.int32))
        return self.run(problem, evaluate)


def fork_join() -> Problem:
    return tiny_problem("fork_join")


def placements(problem: Problem, count: int, seed: int = 0) -> list[Placement]:
    """Distinct placements of a problem whose ops may go anywhere."""
    rng = np.random.default_rng(seed)
    found: dict[str, Placement] = {}
    while len(found) < count:
        placement = problem.placement(
            rng.integers(0, problem.cluster.num_devices, problem.graph.num_ops)
        )
        found[placement.digest] = placement
    return list(found.values())


def searching(
    problem: Problem, clock: Clock | None = None, each: float = 0.0, **limits: Any
) -> tuple[Search, Evaluation]:
    """A search by a clock that a test moves, and its `evaluate`."""
    clock = clock or Clock()
    search = Search(problem, Counting(problem, clock, each), Budget(clock=clock, **limits))
    return search, Evaluation(search, "test")
