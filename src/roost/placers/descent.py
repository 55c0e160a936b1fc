"""Strict descent: from the best start downhill until nothing better is found, then from the next.

Differs in: sixteen neighbours are simulated at once and the best of them is taken, as `annealing`
with no temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._annealing.population import Heat
from roost.placers.annealing import Annealing

_NONE = 1e-12  # a temperature at which nothing worse is ever taken


@dataclass(frozen=True)
class Descent:
    """Goes downhill until the budget is spent, each start by itself."""

    starts: tuple[str, ...] = ("single", "rules")
    members: int = 4
    threads: int | None = None

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        heat = Heat(members=self.members, hot=_NONE, warm=_NONE, cold=_NONE)
        return Annealing(self.starts, heat, self.threads).place(problem, evaluate)
