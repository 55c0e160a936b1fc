"""m-TOPO of Baechi (Jeon et al., SoCC 2020): fills one device after the other in program order.

A device is full when it holds an equal share of all lasting bytes, plus those of the largest unit.

Differs in: lasting bytes are parameters and outputs that live long. Slower kinds of devices are
tried with and without. The fastest device is filled first. Ops of a module, backward ones too,
follow its first, as Baechi's co-placement has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import best_of
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import (
    ListScheduler,
    device_choices,
    named_rules,
    with_other_orders,
)
from roost.placers._shared.units import Units

# Being with the module counts more than the share, and that more than the position in the line.
_FAR_MORE = 1e6


@dataclass(frozen=True)
class Topo:
    """Fills devices in topological order up to a balanced share of memory."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        units = Units.of(problem)
        rules = named_rules(
            units, {"in_line": 1.0, "over_fair": _FAR_MORE, "not_module": _FAR_MORE**2}
        )
        choices = device_choices(units)
        placements: list[Placement] = []
        for scheduler in ListScheduler.all_of(units, ("program",)):
            lasting = scheduler.listing.lasting
            share = lasting.sum() / choices.sum(axis=1, keepdims=True) + lasting.max(initial=0)
            rules.fair[:] = np.where(choices, share, 0.0)
            for placement in scheduler.schedule(rules).best(count=4):
                placements += with_other_orders(placement)
        return best_of(evaluate(placements)).placement
