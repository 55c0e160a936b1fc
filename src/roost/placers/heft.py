"""Heterogeneous earliest finish time: by upward rank, each op goes where it ends first.

Topcuoglu, Hariri, Wu 2002.

Differs in: ops that must share a device go where the first of them ends first. Only devices with
room are candidates. A device takes its ops in the order of their ranks, with no insertion into its
pauses. Transfers queue on buses. Slower kinds of devices are tried with and without.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import best_of
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import ListScheduler, named_rules, with_other_orders
from roost.placers._shared.units import Units


@dataclass(frozen=True)
class Heft:
    """Earliest finish time in rank order."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        units = Units.of(problem)
        rules = named_rules(units, {"finish": 1.0})
        placements: list[Placement] = []
        for scheduler in ListScheduler.all_of(units, ("rank",)):
            for placement in scheduler.schedule(rules).best(count=4):
                placements += with_other_orders(placement)
        return best_of(evaluate(placements)).placement
