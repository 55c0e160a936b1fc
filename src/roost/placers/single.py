"""Everything on one device, whichever is best: the Single-CPU and Single-GPU baselines of Mirhoseini et al. 2017.

What may not run there goes to the fastest device on which it may, as an op without a GPU kernel went to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._fitting import best_or_nearest, fastest_allowed
from roost.placers._orders import in_orders
from roost.placers._units import Units


@dataclass(frozen=True)
class Single:
    """The best one device; parameters are with the ops that read them."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """On every device in turn, devices that cannot differ tried once."""
        units = Units.of(problem)
        tried = [
            placement
            for device in _distinct(units)
            for placement in in_orders(problem, units.devices(fastest_allowed(units, np.full(units.num_units, device))))
        ]
        return best_or_nearest(problem, evaluate(tried)).placement


def _distinct(units: Units) -> list[int]:
    """Devices that give different steps: where nothing is sent, links make no difference."""
    problem, seen, found = units.problem, set(), []
    for number, device in enumerate(problem.cluster.devices):
        alone = bool(units.allowed[:, number].all())
        key = (device.memory, device.gap, problem.op_time[:, number].tobytes()) if alone else (number,)
        if key not in seen:
            seen.add(key)
            found.append(number)
    return found
