"""Devices without an order are half an answer: try the orders there are, and take the best."""

from __future__ import annotations

from collections.abc import Iterable

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate


def placement_of(problem: Problem, device: Array, order: str = "program", priority: Array | None = None) -> Placement:
    """A placement that says which graph and which devices it is for."""
    return Placement(
        device, order, priority=priority, devices=problem.cluster.device_names, graph=problem.graph.digest
    )


def best_of(trials: Iterable[Trial]) -> Trial:
    """The best of some trials, the first of equals."""
    found: Trial | None = None
    for trial in trials:
        if trial.better_than(found):
            found = trial
    assert found is not None
    return found


def best_order(problem: Problem, evaluate: Evaluate, device: Array, extra: Iterable[Placement] = ()) -> Placement:
    """The devices in program or in rank order, or one of the others given: whichever is best."""
    tried = [placement_of(problem, device, order) for order in ("program", "rank")]
    return best_of(evaluate([*tried, *extra])).placement
