"""Simulated annealing one move at a time, each simulated exactly.

For placements that fetch parameters, which lanes cannot simulate. And for few simulations: sixteen
neighbours of one placement teach less than sixteen moves in a row.
"""

from __future__ import annotations

import numpy as np

from roost.placers._annealing.critical_units import critical_units
from roost.placers._annealing.proposals import even_odds, learn_odds, propose
from roost.placers._annealing.sixteen_moves import (
    change_penalty,
    keep_best,
    put_back,
    settle,
    simulate_alone,
)
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import compiled

# Moves beyond the memory, or within it, after which the penalty is changed.
_OVER = 32
_WITHIN = 512
_CRITICAL_EVERY = 16  # moves between two looks at what the step waits for
_LEARN_EVERY = 256  # moves between two looks at what kinds of moves gain
_TINY = 1e-300  # added where a number may be 0


@compiled
def anneal_singly(layout, space, tables, chain, scratch, cooling, by_critical):
    """Anneal a chain for so many moves; returns the number of simulations.

    `by_critical` says whether what the step waits for is moved more often.
    """
    draft = scratch.draft
    placed = chain.placed
    capacity = tables.capacity
    settle(layout, space, tables, chain, scratch)
    simulate_alone(layout, scratch)
    step = scratch.one_step[0]
    excess = _excess(scratch, capacity)
    decay = (cooling.cold / cooling.hot) ** (1.0 / max(1, cooling.steps - 1))
    temperature = cooling.hot
    beyond_for = 0
    lane = np.int64(0)
    num_critical = np.int64(0)
    moved = True
    even_odds(draft)
    for number_of_move in range(cooling.steps):
        if by_critical and moved and number_of_move % _CRITICAL_EVERY == 0:
            for position in range(len(layout.op)):
                scratch.device[position] = scratch.devices[0, layout.op[position]]
            num_critical = np.int64(
                critical_units(
                    layout, scratch.device, tables.unit_of, scratch.critical, scratch.mark
                )
            )
            moved = False
        draft.start[0] = 0
        draft.unit_start[0] = 0
        propose(space, draft, placed, scratch.critical, num_critical, lane, chain.rng)
        for number in range(draft.start[1]):
            scratch.devices[0, draft.op[number]] = draft.device[number]
        simulate_alone(layout, scratch)
        new_step = scratch.one_step[0]
        new_excess = _excess(scratch, capacity)
        penalty = chain.penalty[0]
        worse = new_step * (1.0 + penalty * new_excess) - step * (1.0 + penalty * excess)
        kind = draft.kind[0]
        draft.tries[kind] += 1.0
        if worse < 0.0:
            draft.gains[kind] += min(1.0, -worse / (0.001 * step + _TINY))
        if number_of_move % _LEARN_EVERY == _LEARN_EVERY - 1:
            learn_odds(draft, 0.9)
        if worse <= 0.0 or uniform(chain.rng) < np.exp(-worse / max(temperature * step, _TINY)):
            step = new_step
            excess = new_excess
            moved = True
            for number in range(draft.unit_start[1]):
                placed[draft.unit[number]] = draft.unit_device[number]
            keep_best(chain, step, excess)
        else:
            put_back(space, chain, scratch, 0, draft.unit_start[1])
        beyond_for = change_penalty(chain, excess, beyond_for, _OVER, _WITHIN)
        temperature *= decay
    chain.step[0] = step
    return cooling.steps + 1


@compiled
def _excess(scratch, capacity):
    """Memory beyond the capacities in the last simulation, as shares of them."""
    excess = 0.0
    for d in range(len(capacity)):
        beyond = scratch.one_peak[0, d] - capacity[d]
        if beyond > 0:
            excess += beyond / np.float64(capacity[d] + 1)
    return excess
