"""Simulated annealing one move at a time: for placements that fetch parameters, which lanes cannot
simulate.

And for few simulations: sixteen neighbours of one placement teach less than sixteen moves in a row.
"""

from __future__ import annotations

import numpy as np

from roost.placers._annealing.critical_units import hot_units
from roost.placers._annealing.proposals import even_odds, learn_odds, propose
from roost.placers._annealing.sixteen_moves import PENALTY, STEP, change_penalty, keep_best
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import compiled
from roost.simulator.kernels.batch import run_batch

# Moves beyond the memory, or within it, after which the penalty is changed.
_OVER, _WITHIN = 32, 512
_HOT_EVERY = 16  # moves between two looks at what the step waits for, where it is looked at


@compiled
def _simulate(layout, work, capacity):
    """The step time and the excess of memory of `work.row`."""
    flags = work.flags
    run_batch(
        layout,
        work.row,
        work.window,
        flags[0],
        flags[1],
        flags[2],
        work.one_step,
        work.one_peak,
        work.one_count,
    )
    excess = 0.0
    for d in range(len(capacity)):
        beyond = work.one_peak[0, d] - capacity[d]
        if beyond > 0:
            excess += beyond / np.float64(capacity[d] + 1)
    return work.one_step[0], excess


@compiled
def walk(
    layout, space, draft, work, unit_of, capacity,
    best_placed, figures, state, num_moves, hot_temperature, cold_temperature, look
):  # fmt: skip
    """Anneal `work.placed` for so many moves; as `anneal`, with every move simulated exactly.

    `look` says whether what the step waits for is moved more often.
    """
    placed, row = work.placed, work.row
    for unit in range(len(placed)):
        for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
            row[0, space.unit_op[member]] = placed[unit]
    step, excess = _simulate(layout, work, capacity)
    cooling = (cold_temperature / hot_temperature) ** (1.0 / max(1, num_moves - 1))
    temperature = hot_temperature
    run, lane, num_hot, moved = 0, np.int64(0), np.int64(0), True
    even_odds(draft)
    for number_of_move in range(num_moves):
        if look and moved and number_of_move % _HOT_EVERY == 0:
            for position in range(len(layout.op)):
                work.device[position] = row[0, layout.op[position]]
            num_hot = np.int64(hot_units(layout, work.device, unit_of, work.hot, work.mark))
            moved = False
        draft.start[0] = 0
        draft.unit_start[0] = 0
        propose(space, draft, placed, work.hot, num_hot, lane, state)
        for number in range(draft.start[1]):
            row[0, draft.op[number]] = draft.device[number]
        new_step, new_excess = _simulate(layout, work, capacity)
        penalty = figures[PENALTY]
        worse = new_step * (1.0 + penalty * new_excess) - step * (1.0 + penalty * excess)
        kind = draft.kind[0]
        draft.tried[kind] += 1.0
        if worse < 0.0:
            draft.gained[kind] += min(1.0, -worse / (0.001 * step + 1e-300))
        if number_of_move % 256 == 255:
            learn_odds(draft, 0.9)
        if worse <= 0.0 or uniform(state) < np.exp(-worse / max(temperature * step, 1e-300)):
            step, excess, moved = new_step, new_excess, True
            for number in range(draft.unit_start[1]):
                placed[draft.unit[number]] = draft.unit_device[number]
            keep_best(placed, best_placed, figures, step, excess)
        else:
            for number in range(draft.unit_start[1]):
                unit = draft.unit[number]
                for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
                    row[0, space.unit_op[member]] = placed[unit]
        run = change_penalty(figures, excess, run, _OVER, _WITHIN)
        temperature *= cooling
    figures[STEP] = step
    return num_moves + 1
