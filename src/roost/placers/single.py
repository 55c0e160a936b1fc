"""Everything on one device, whichever is best: the Single-CPU and Single-GPU baselines of
Mirhoseini et al. 2017.

What may not run there goes to the fastest device on which it may, as an op without a GPU kernel
went to the CPU. Where all of it is on one device every order takes as long: priorities of its own
are tried where the plain orders do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import best_of
from roost.placers import Evaluate
from roost.placers._shared.fitting import fastest_allowed
from roost.placers._shared.orders import common_orders
from roost.placers._shared.units import Units


@dataclass(frozen=True)
class Single:
    """The best one device; parameters are with the ops that read them."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Try every device; of devices that cannot differ only the first."""
        units = Units.of(problem)
        first: list[Placement] = []
        # Numbers of trials in plain orders, and the orders to try where none of these fits.
        spare: list[tuple[range, list[Placement]]] = []
        for device in _distinct(units):
            placed = units.devices(fastest_allowed(units, np.full(units.num_units, device)))
            orders = common_orders(problem, placed)
            plain = [each for each in orders if each.priority is None]
            if len(plain) < len(orders) and (placed == device).all():
                spare.append((range(len(first), len(first) + len(plain)), orders[len(plain) :]))
                orders = plain
            first += orders
        trials = evaluate(first)
        more: list[Placement] = []
        for own, others in spare:
            if not any(trials[number].feasible for number in own):
                more += others
        return best_of([*trials, *evaluate(more)]).placement


def _distinct(units: Units) -> list[int]:
    """Devices that give different steps: where nothing is sent, links make no difference."""
    problem = units.problem
    first_of: dict[object, int] = {}
    for number, device in enumerate(problem.cluster.devices):
        alone = bool(units.allowed[:, number].all())
        figures = (device.memory, device.gap, problem.op_time[:, number].tobytes())
        first_of.setdefault(figures if alone else number, number)
    return list(first_of.values())
