"""Simulated annealing over devices and orders (Kirkpatrick, Gelatt, Vecchi 1983), from several starts.

Differs in: sixteen neighbours are simulated at once and one is drawn by a heat bath; moves take units, neighbourhoods,
module subtrees and windows of consecutive layers, half of them where the step waits; memory is close to hard, by a
penalty that grows while the search stays beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roost import catalog
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.errors import BudgetSpent
from roost.placers import Evaluate
from roost.placers._offload import needs_offload, offloaded
from roost.placers._population import Heat, Population

_MOST_OFFLOADS = 3


@dataclass(frozen=True)
class Annealing:
    """Anneals until the budget is spent."""

    starts: tuple[str, ...] = ("single", "rules")  # placers whose placements it begins with
    heat: Heat = field(default_factory=Heat)
    threads: int | None = None  # as many as there are cores

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        starts = starting_points(problem, evaluate, self.starts)
        try:
            Population(problem, evaluate, self.heat, self.threads).run(starts)
        except BudgetSpent:
            if evaluate.best is None:
                raise
        assert evaluate.best is not None
        return evaluate.best.placement


def starting_points(problem: Problem, evaluate: Evaluate, placers: tuple[str, ...]) -> list[Placement]:
    """What these placers find, and the best so far, the best first; offloaded where little of it fits."""
    found: list[Trial] = [] if evaluate.best is None else [evaluate.best]
    for name in placers:
        asked = evaluate.named(name)
        placer = catalog.find("placers", name)()
        several = getattr(placer, "several", None)
        placements = several(problem, asked) if several is not None else [placer.place(problem, asked)]
        found += asked(placements)
    if needs_offload(problem) or not any(trial.feasible for trial in found):
        found += _offloads(problem, evaluate, found)
    return [trial.placement for trial in distinct(found)]


def _offloads(problem: Problem, evaluate: Evaluate, found: list[Trial]) -> list[Trial]:
    """What becomes of the fastest placements, whether they fit or not, where parameters may live elsewhere."""
    fastest = sorted(found, key=lambda trial: trial.step_time)
    seen: list[Trial] = []
    for trial in [t for t in fastest if not t.feasible][:_MOST_OFFLOADS]:
        seen += offloaded(problem, evaluate, problem.check(trial.placement).device)
    return seen


def distinct(trials: list[Trial]) -> list[Trial]:
    """The trials, best first, each placement once."""
    ordered: list[Trial] = []
    for trial in trials:
        spot = next((n for n, other in enumerate(ordered) if trial.better_than(other)), len(ordered))
        ordered.insert(spot, trial)
    seen: set[str] = set()
    return [t for t in ordered if t.placement.digest not in seen and not seen.add(t.placement.digest)]  # type: ignore[func-returns-value]
