"""Downhill from one placement, op by op and one move at a time: the most for few simulations.

Annealing in lanes simulates sixteen neighbours for each move that it makes: with a thousand
simulations, sixty moves. One after the other they are a thousand, most of them of what the step
waits for.
"""

from __future__ import annotations

from functools import partial

from roost.core.arrays import taken_devices
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate, Round
from roost.placers._annealing.annealer import Annealer
from roost.placers._annealing.state import ChainState
from roost.placers._shared.units import Units

_MOST_MOVES = 5_000  # after so many, annealing finds more
_ROUND = 1_000  # moves
_MOST_SECONDS = 1.6  # that a round may take, about
_FEW = 16  # simulations: not worth another round
_NONE = 1e-12  # a temperature at which nothing worse is ever taken


def go_downhill(problem: Problem, evaluate: Evaluate, start: Placement) -> Placement:
    """Improve a placement in its order by up to 5,000 moves, or until the budget is spent."""
    units = _whole_units(problem, start)
    annealer = Annealer(problem, units, start, alone=True)
    placed = units.unit_devices(start.device)
    seed = int(evaluate.rng.integers(2**31))
    moves = 0
    longest = min(_ROUND, max(8, int(_MOST_SECONDS / annealer.seconds_per_batch)))
    while moves < _MOST_MOVES and evaluate.simulations_left >= _FEW and evaluate.seconds_left > 0:
        # Where it begins is simulated too.
        length = int(min(longest, evaluate.simulations_left - 2))
        chain = annealer.chain(placed, seed + moves)
        state = evaluate.round(partial(_run, annealer, chain, length))
        placed = taken_devices(state, "placed", units.allowed)
        moves += length
    return annealer.placement(placed)


def _run(annealer: Annealer, chain: ChainState, length: int) -> Round:
    spent = annealer.run(chain, length, _NONE, _NONE)
    return Round([annealer.placement(chain.best)], spent, {"placed": chain.best})


def _whole_units(problem: Problem, placement: Placement) -> Units:
    """The largest units that the placement keeps together."""
    for tie in ("readers", "updates"):
        units = Units.of(problem, tie)
        if (units.devices(units.unit_devices(placement.device)) == placement.device).all():
            return units
    return Units.of(problem, "nothing")
