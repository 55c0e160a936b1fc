"""Where a search begins: what other placers find, in the order of how good it is."""

from __future__ import annotations

from roost import catalog
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate
from roost.placers._offload import needs_offload, offloaded

_MOST_OFFLOADS = 3


def starting_points(problem: Problem, evaluate: Evaluate, placers: tuple[str, ...]) -> list[Placement]:
    """What these placers find, and the best so far, the best first; offloaded where little of it fits."""
    found: list[Trial] = [] if evaluate.best is None else [evaluate.best]
    for name in placers:
        found += ask(name, problem, evaluate.named(name))
    if needs_offload(problem) or not any(trial.feasible for trial in found):
        found += offloads(problem, evaluate, found)
    return [trial.placement for trial in distinct(found)]


def ask(name: str, problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """The trials of what a placer finds: one, or the best few where it has more to offer."""
    placer = catalog.find("placers", name)()
    several = getattr(placer, "several", None)
    return evaluate(several(problem, evaluate) if several is not None else [placer.place(problem, evaluate)])


def offloads(problem: Problem, evaluate: Evaluate, found: list[Trial]) -> list[Trial]:
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
