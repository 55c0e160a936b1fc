"""Refinement of the best placement op by op, with the budget that learning leaves."""

from __future__ import annotations

from dataclasses import replace
from math import isinf

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._annealing.downhill import go_downhill
from roost.placers._annealing.population import Heat, Population
from roost.placers._shared.orders import all_orders

_FEW = 40  # trials: too few to refine with


def refine_best(problem: Problem, evaluate: Evaluate) -> None:
    """Try the best placement in other orders, then move its ops until the budget is spent.

    With a limit of trials it moves downhill first: that needs few. Then it anneals.
    """
    if evaluate.best is None or evaluate.trials_left < _FEW:
        return
    best = _best(evaluate)
    device = np.asarray(best.device)
    window = best.prefetch_bytes
    placements = all_orders(problem, device)
    evaluate([replace(placement, prefetch_bytes=window) for placement in placements])
    if not isinf(evaluate.simulations_left):
        go_downhill(problem, evaluate.named("descent"), _best(evaluate))
    if evaluate.trials_left >= _FEW:
        annealing = Population(problem, evaluate.named("annealing"), Heat(members=1), None)
        annealing.run([_best(evaluate)])


def _best(evaluate: Evaluate) -> Placement:
    assert evaluate.best is not None
    return evaluate.best.placement
