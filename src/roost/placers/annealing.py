"""Simulated annealing over devices and orders (Kirkpatrick, Gelatt, Vecchi 1983), from several
starts.

Differs in: sixteen neighbours are simulated at once and one is drawn by a heat bath; moves take
units, neighbourhoods, module subtrees and windows of consecutive layers, half of them where the
step waits; memory is close to hard, by a penalty that grows while the search stays beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.placers import Evaluate
from roost.placers._annealing.population import Heat, Population
from roost.placers._starts.starting_points import starting_points


@dataclass(frozen=True)
class Annealing:
    """Anneals until the budget is spent."""

    starts: tuple[str, ...] = ("single", "rules")  # placers whose placements it begins with
    heat: Heat = field(default_factory=Heat)
    threads: int | None = None  # as many as there are cores

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        starts = starting_points(problem, evaluate, self.starts, self.heat.groups)
        try:
            Population(problem, evaluate, self.heat, self.threads).run(starts)
        except BudgetSpent:
            if evaluate.best is None:
                raise
        assert evaluate.best is not None
        return evaluate.best.placement
