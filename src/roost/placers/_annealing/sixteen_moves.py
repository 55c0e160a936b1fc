"""Simulated annealing, compiled: sixteen neighbours at a time, no Python per move.

Of fifteen neighbours and the placement itself one is drawn by the Boltzmann distribution of their
scores (a heat bath). Better ones that were not drawn are tried again in the next batch, on top of
the one that was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._annealing.critical_units import hot_units
from roost.placers._annealing.proposals import even_odds, learn_odds, propose, put
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import bare, compiled
from roost.simulator.kernels.batch import run_batch
from roost.simulator.kernels.lanes import clear_lanes, run_lanes, set_lanes
from roost.simulator.kernels.vector import LANES

PENALTY, BEST_STEP, BEST_EXCESS, STEP = range(4)  # in `figures`
STAY = LANES - 1  # the last lane moves nothing: it is the placement itself
_RETRIES = 4
_HOT_EVERY = 8  # batches between two looks at what the step waits for
_LEARN_EVERY = 16  # batches between two looks at what kinds of moves gain
# Batches beyond the memory, or within it, after which the penalty is changed.
_OVER, _WITHIN = 8, 256
_LEAST_PENALTY, _MOST_PENALTY = 10.0, 1e9


class Work(NamedTuple):
    """A placement that is being annealed, and room to work in."""

    placed: Array  # [units] i4
    device: Array  # [positions] u4
    home: Array  # [parameters] u4
    held: Array  # [64] i8 bytes of parameters on each device
    row: Array  # [1, ops] i4 the same placement as rows of a batch have it
    step: Array  # [lanes] f8
    excess: Array  # [lanes] f8 memory beyond the capacities, as shares of them
    score: Array  # [lanes] f8
    hot: Array  # [units] i4
    mark: Array  # [units] bool
    retry_start: Array  # [lanes + 1] i8
    retry_unit: Array  # [room] i4
    retry_device: Array  # [room] i4
    fetching: Array  # [lanes] bool, not used
    window: Array  # [devices] i8 bytes
    flags: Array  # [3] bool: fifo, shared, memory, as `run_batch` wants them
    one_step: Array  # [1] f8
    one_peak: Array  # [1, devices] i8
    one_count: Array  # [1] i8


@bare
def _settle(layout, space, work, number_of, is_parameter):
    """Write the devices of the units to where the simulators read them."""
    work.held[:] = 0
    for unit in range(len(work.placed)):
        here = work.placed[unit]
        for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
            op = space.unit_op[member]
            work.row[0, op] = here
            if is_parameter[op]:
                work.home[number_of[op]] = here
                work.held[here] += layout.parameter_bytes[number_of[op]]
            else:
                work.device[number_of[op]] = here


@bare
def _draft(space, draft, work, num_retries, num_hot, state):
    """Draw a move for each lane but the last, those to be tried again first."""
    draft.start[0] = 0
    draft.unit_start[0] = 0
    for lane in range(STAY):
        draft.kind[lane] = -1
        if lane >= num_retries:
            propose(space, draft, work.placed, work.hot, num_hot, lane, state)
            continue
        num_units, num_ops = draft.unit_start[lane], draft.start[lane]
        for number in range(work.retry_start[lane], work.retry_start[lane + 1]):
            unit, there = np.int64(work.retry_unit[number]), np.int64(work.retry_device[number])
            num_units, num_ops = put(space, draft, work.placed, unit, there, num_units, num_ops)
        draft.unit_start[lane + 1] = num_units
        draft.start[lane + 1] = num_ops
    draft.unit_start[LANES] = draft.unit_start[STAY]
    draft.start[LANES] = draft.start[STAY]


@bare
def _score(lanes, work, capacity, penalty):
    """Step time and excess of each lane, and its score: the step, made dearer by what is beyond the
    memory."""
    for lane in range(LANES):
        excess = 0.0
        for d in range(len(capacity)):
            beyond = lanes.peak[d * LANES + lane] - capacity[d]
            if beyond > 0:
                excess += beyond / np.float64(capacity[d] + 1)
        work.step[lane] = lanes.step[lane]
        work.excess[lane] = excess
        work.score[lane] = lanes.step[lane] * (1.0 + penalty * excess)


@bare
def _note_gains(draft, work):
    """Remember which kinds of moves gained something: one for a thousandth of the step or more."""
    base = work.score[STAY]
    for lane in range(STAY):
        kind = draft.kind[lane]
        if kind >= 0:
            draft.tried[kind] += 1.0
            gain = (base - work.score[lane]) / (0.001 * base + 1e-300)
            if gain > 0.0:
                draft.gained[kind] += min(gain, 1.0)


@bare
def _draw(draft, work, scale, state):
    """A lane, the better the likelier: the least score after noise (the Gumbel trick)."""
    chosen, least = STAY, np.inf
    for lane in range(LANES):
        if lane == STAY or draft.start[lane + 1] > draft.start[lane]:
            noise = -np.log(-np.log(uniform(state) + 1e-300) + 1e-300)
            if work.score[lane] - scale * noise < least:
                chosen, least = lane, work.score[lane] - scale * noise
    return chosen


@compiled
def _confirm(layout, space, draft, work, chosen, figures, scale, state):
    """Simulate the lane that was drawn by itself, where lanes are only near the truth; the lane to
    go on with."""
    for number in range(draft.start[chosen], draft.start[chosen + 1]):
        work.row[0, draft.op[number]] = draft.device[number]
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
    work.step[chosen] = work.one_step[0]
    before = figures[STEP] * (1.0 + figures[PENALTY] * work.excess[STAY])
    worse = work.one_step[0] * (1.0 + figures[PENALTY] * work.excess[chosen]) - before
    if worse <= 0.0 or uniform(state) < np.exp(-worse / max(scale, 1e-300)):
        return chosen
    for number in range(draft.unit_start[chosen], draft.unit_start[chosen + 1]):
        unit = draft.unit[number]
        for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
            work.row[0, space.unit_op[member]] = work.placed[unit]
    return STAY


@bare
def _keep_retries(draft, work, chosen):
    """Note the moves of other lanes that are better than staying; how many."""
    count = 0
    work.retry_start[0] = 0
    for lane in range(STAY):
        size = draft.unit_start[lane + 1] - draft.unit_start[lane]
        at = work.retry_start[count]
        if (
            lane == chosen
            or size == 0
            or work.score[lane] >= work.score[STAY]
            or at + size > len(work.retry_unit)
        ):
            continue
        for number in range(size):
            work.retry_unit[at + number] = draft.unit[draft.unit_start[lane] + number]
            work.retry_device[at + number] = draft.unit_device[draft.unit_start[lane] + number]
        count += 1
        work.retry_start[count] = at + size
        if count == _RETRIES:
            break
    return count


@bare
def _apply(layout, draft, work, number_of, is_parameter, chosen):
    """Make the moves of a lane."""
    for number in range(draft.unit_start[chosen], draft.unit_start[chosen + 1]):
        work.placed[draft.unit[number]] = draft.unit_device[number]
    for number in range(draft.start[chosen], draft.start[chosen + 1]):
        op, there = draft.op[number], draft.device[number]
        work.row[0, op] = there
        if is_parameter[op]:
            size = layout.parameter_bytes[number_of[op]]
            work.held[work.home[number_of[op]]] -= size
            work.home[number_of[op]] = there
            work.held[there] += size
        else:
            work.device[number_of[op]] = there


@bare
def keep_best(placed, best_placed, figures, step, excess):
    """Remember a placement where it is the best so far: what is beyond the memory counts first."""
    if excess < figures[BEST_EXCESS] or (
        excess == figures[BEST_EXCESS] and step < figures[BEST_STEP]
    ):
        figures[BEST_STEP] = step
        figures[BEST_EXCESS] = excess
        for unit in range(len(placed)):
            best_placed[unit] = placed[unit]


@bare
def change_penalty(figures, excess, run, over, within):
    """Memory is close to hard: the longer a search stays beyond it the dearer that gets. The length
    of the run."""
    if excess > 0.0:
        run = run + 1 if run > 0 else 1
        if run >= over:
            figures[PENALTY] = min(figures[PENALTY] * 2.0, _MOST_PENALTY)
            run = 0
    else:
        run = run - 1 if run < 0 else -1
        if run <= -within:
            figures[PENALTY] = max(figures[PENALTY] * 0.5, _LEAST_PENALTY)
            run = 0
    return run


@compiled
def anneal(
    layout, lanes, space, draft, work, number_of, is_parameter, unit_of, capacity,
    best_placed, figures, state, num_batches, hot_temperature, cold_temperature, exact
):  # fmt: skip
    """Anneal `work.placed` for so many batches; `best_placed` [units] gets the best. Returns
    simulations.

    `figures` f8 holds what is kept from call to call: penalty, step time and excess of memory (0
    where it fits) of the best, and the step time of the placement. `exact` says whether lanes give
    true step times; otherwise the one drawn is simulated by itself. Temperatures are shares of the
    step time.
    """
    _settle(layout, space, work, number_of, is_parameter)
    even_odds(draft)
    moves = (draft.start, draft.op, draft.device)
    simulations, num_retries, num_hot, run = 0, 0, 0, 0
    cooling = (cold_temperature / hot_temperature) ** (1.0 / max(1, num_batches - 1))
    temperature = hot_temperature
    for batch in range(num_batches):
        if batch % _HOT_EVERY == 0:
            num_hot = hot_units(layout, work.device, unit_of, work.hot, work.mark)
        _draft(space, draft, work, num_retries, num_hot, state)
        set_lanes(
            layout,
            lanes,
            work.device,
            work.home,
            number_of,
            is_parameter,
            moves,
            0,
            LANES,
            work.fetching,
        )
        run_lanes(layout, lanes, work.device, work.held)
        clear_lanes(layout, lanes, number_of, is_parameter, moves, 0, LANES)
        simulations += STAY
        _score(lanes, work, capacity, figures[PENALTY])
        _note_gains(draft, work)
        if batch % _LEARN_EVERY == _LEARN_EVERY - 1:
            learn_odds(draft, 0.9)
        scale = temperature * work.step[STAY]
        chosen = _draw(draft, work, scale, state)
        if chosen != STAY and not exact:
            chosen = _confirm(layout, space, draft, work, chosen, figures, scale, state)
            simulations += 1
        num_retries = 0
        if chosen != STAY:
            num_retries = _keep_retries(draft, work, chosen)
            _apply(layout, draft, work, number_of, is_parameter, chosen)
            figures[STEP] = work.step[chosen]
            keep_best(work.placed, best_placed, figures, work.step[chosen], work.excess[chosen])
        run = change_penalty(figures, work.excess[chosen], run, _OVER, _WITHIN)
        temperature *= cooling
    return simulations
