"""Simulated annealing, compiled: sixteen neighbours at a time, no Python per move.

Of fifteen neighbours and the placement itself one is drawn by the Boltzmann distribution of their
scores (a heat bath). Better ones that were not drawn are tried again in the next batch, on top of
the one that was.
"""

from __future__ import annotations

import numpy as np

from roost.placers._annealing.critical_units import critical_units
from roost.placers._annealing.proposals import even_odds, learn_odds, propose, put
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import bare, compiled
from roost.simulator.kernels.batch import run_batch
from roost.simulator.kernels.lane_state import clear_lanes, set_lanes
from roost.simulator.kernels.lanes import run_lanes
from roost.simulator.kernels.vector import LANES

STAY = LANES - 1  # the last lane moves nothing: it is the placement itself
_RETRIES = 4
_CRITICAL_EVERY = 8  # batches between two looks at what the step waits for
_LEARN_EVERY = 16  # batches between two looks at what kinds of moves gain
# Batches beyond the memory, or within it, after which the penalty is changed.
_OVER = 8
_WITHIN = 256
_LEAST_PENALTY = 10.0
_MOST_PENALTY = 1e9
_TINY = 1e-300  # added where a number may be 0


@compiled
def anneal(layout, space, tables, chain, scratch, cooling, exact):
    """Anneal a chain for so many batches; returns the number of simulations.

    `exact` says whether lanes give true step times; otherwise the lane that is drawn is simulated
    by itself.
    """
    lanes = scratch.lanes
    draft = scratch.draft
    number_of = tables.number_of
    is_parameter = tables.is_parameter
    settle(layout, space, tables, chain, scratch)
    even_odds(draft)
    moves = (draft.start, draft.op, draft.device)
    simulations = 0
    num_retries = 0
    num_critical = 0
    beyond_for = 0
    decay = (cooling.cold / cooling.hot) ** (1.0 / max(1, cooling.steps - 1))
    temperature = cooling.hot
    for batch in range(cooling.steps):
        if batch % _CRITICAL_EVERY == 0:
            num_critical = critical_units(
                layout, scratch.device, tables.unit_of, scratch.critical, scratch.mark
            )
        draw_moves(space, chain, scratch, num_retries, num_critical)
        set_lanes(
            layout, lanes, scratch.device, scratch.home, number_of, is_parameter, moves, 0, LANES,
            scratch.fetching,
        )  # fmt: skip
        run_lanes(layout, lanes, scratch.device, scratch.held)
        clear_lanes(layout, lanes, number_of, is_parameter, moves, 0, LANES)
        simulations += STAY
        _score(tables.capacity, chain, scratch)
        _note_gains(scratch)
        if batch % _LEARN_EVERY == _LEARN_EVERY - 1:
            learn_odds(draft, 0.9)
        scale = temperature * scratch.step[STAY]
        chosen = _draw(scratch, scale, chain.rng)
        if chosen != STAY and not exact:
            chosen = _confirm(layout, space, chain, scratch, chosen, scale)
            simulations += 1
        num_retries = 0
        if chosen != STAY:
            num_retries = _keep_retries(scratch, chosen)
            _apply(layout, tables, chain, scratch, chosen)
            chain.step[0] = scratch.step[chosen]
            keep_best(chain, scratch.step[chosen], scratch.excess[chosen])
        beyond_for = change_penalty(chain, scratch.excess[chosen], beyond_for, _OVER, _WITHIN)
        temperature *= decay
    return simulations


@bare
def settle(layout, space, tables, chain, scratch):
    """Write the devices of the units to where the simulators read them."""
    scratch.held[:] = 0
    for unit in range(len(chain.placed)):
        here = chain.placed[unit]
        for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
            op = space.unit_op[member]
            number = tables.number_of[op]
            scratch.devices[0, op] = here
            if tables.is_parameter[op]:
                scratch.home[number] = here
                scratch.held[here] += layout.parameter_bytes[number]
            else:
                scratch.device[number] = here


@bare
def draw_moves(space, chain, scratch, num_retries, num_critical):
    """Draw a move for each lane but the last, those to be tried again first."""
    draft = scratch.draft
    placed = chain.placed
    draft.start[0] = 0
    draft.unit_start[0] = 0
    for lane in range(STAY):
        draft.kind[lane] = -1
        if lane >= num_retries:
            propose(space, draft, placed, scratch.critical, num_critical, lane, chain.rng)
            continue
        draft.unit_start[lane + 1] = draft.unit_start[lane]
        draft.start[lane + 1] = draft.start[lane]
        for number in range(scratch.retry_start[lane], scratch.retry_start[lane + 1]):
            unit = np.int64(scratch.retry_unit[number])
            put(space, draft, placed, lane, unit, np.int64(scratch.retry_device[number]))
    draft.unit_start[LANES] = draft.unit_start[STAY]
    draft.start[LANES] = draft.start[STAY]


@bare
def _score(capacity, chain, scratch):
    """Step time and excess of each lane, and its score: the step, made dearer by the excess."""
    lanes = scratch.lanes
    for lane in range(LANES):
        excess = 0.0
        for d in range(len(capacity)):
            beyond = lanes.peak[d * LANES + lane] - capacity[d]
            if beyond > 0:
                excess += beyond / np.float64(capacity[d] + 1)
        scratch.step[lane] = lanes.step[lane]
        scratch.excess[lane] = excess
        scratch.score[lane] = lanes.step[lane] * (1.0 + chain.penalty[0] * excess)


@bare
def _note_gains(scratch):
    """Note which kinds of moves gained something: one for a thousandth of the step or more."""
    draft = scratch.draft
    base = scratch.score[STAY]
    for lane in range(STAY):
        kind = draft.kind[lane]
        if kind >= 0:
            draft.tries[kind] += 1.0
            gain = (base - scratch.score[lane]) / (0.001 * base + _TINY)
            if gain > 0.0:
                draft.gains[kind] += min(gain, 1.0)


@bare
def _draw(scratch, scale, rng):
    """A lane, the better the likelier: the least score after noise (the Gumbel trick)."""
    start = scratch.draft.start
    chosen = STAY
    least = np.inf
    for lane in range(LANES):
        if lane == STAY or start[lane + 1] > start[lane]:
            noise = -np.log(-np.log(uniform(rng) + _TINY) + _TINY)
            if scratch.score[lane] - scale * noise < least:
                chosen = lane
                least = scratch.score[lane] - scale * noise
    return chosen


@compiled
def simulate_alone(layout, scratch):
    """Simulate `scratch.devices` exactly, into `one_step` and `one_peak`."""
    run_batch(
        layout, scratch.devices, scratch.window, False, scratch.is_shared[0], True,
        scratch.one_step, scratch.one_peak, scratch.one_count,
    )  # fmt: skip


@compiled
def _confirm(layout, space, chain, scratch, chosen, scale):
    """Simulate the lane that was drawn by itself; returns the lane to go on with."""
    draft = scratch.draft
    for number in range(draft.start[chosen], draft.start[chosen + 1]):
        scratch.devices[0, draft.op[number]] = draft.device[number]
    simulate_alone(layout, scratch)
    scratch.step[chosen] = scratch.one_step[0]
    penalty = chain.penalty[0]
    before = chain.step[0] * (1.0 + penalty * scratch.excess[STAY])
    worse = scratch.one_step[0] * (1.0 + penalty * scratch.excess[chosen]) - before
    if worse <= 0.0 or uniform(chain.rng) < np.exp(-worse / max(scale, _TINY)):
        return chosen
    put_back(space, chain, scratch, draft.unit_start[chosen], draft.unit_start[chosen + 1])
    return STAY


@bare
def put_back(space, chain, scratch, first, beyond):
    """Undo in `scratch.devices` the moves of these units of the draft."""
    for number in range(first, beyond):
        unit = scratch.draft.unit[number]
        for member in range(space.unit_start[unit], space.unit_start[unit + 1]):
            scratch.devices[0, space.unit_op[member]] = chain.placed[unit]


@bare
def _keep_retries(scratch, chosen):
    """Note the moves of other lanes that are better than staying; returns how many."""
    draft = scratch.draft
    score = scratch.score
    count = 0
    scratch.retry_start[0] = 0
    for lane in range(STAY):
        first = draft.unit_start[lane]
        size = draft.unit_start[lane + 1] - first
        at = scratch.retry_start[count]
        if lane == chosen or size == 0 or score[lane] >= score[STAY]:
            continue
        if at + size > len(scratch.retry_unit):
            continue
        for number in range(size):
            scratch.retry_unit[at + number] = draft.unit[first + number]
            scratch.retry_device[at + number] = draft.unit_device[first + number]
        count += 1
        scratch.retry_start[count] = at + size
        if count == _RETRIES:
            break
    return count


@bare
def _apply(layout, tables, chain, scratch, chosen):
    """Make the moves of a lane."""
    draft = scratch.draft
    home = scratch.home
    held = scratch.held
    for number in range(draft.unit_start[chosen], draft.unit_start[chosen + 1]):
        chain.placed[draft.unit[number]] = draft.unit_device[number]
    for number in range(draft.start[chosen], draft.start[chosen + 1]):
        op = draft.op[number]
        there = draft.device[number]
        position = tables.number_of[op]
        scratch.devices[0, op] = there
        if tables.is_parameter[op]:
            size = layout.parameter_bytes[position]
            held[home[position]] -= size
            home[position] = there
            held[there] += size
        else:
            scratch.device[position] = there


@bare
def keep_best(chain, step, excess):
    """Keep the placement where it is the best so far: the excess counts first."""
    is_nearer = excess < chain.best_excess[0]
    is_shorter = excess == chain.best_excess[0] and step < chain.best_step[0]
    if is_nearer or is_shorter:
        chain.best_step[0] = step
        chain.best_excess[0] = excess
        for unit in range(len(chain.placed)):
            chain.best[unit] = chain.placed[unit]


@bare
def change_penalty(chain, excess, run, over, within):
    """Make an excess dearer after `over` steps in a row with one, cheaper after `within` without.

    `run` counts such steps, below 0 those without an excess; returns it.
    """
    if excess > 0.0:
        run = run + 1 if run > 0 else 1
        if run >= over:
            chain.penalty[0] = min(chain.penalty[0] * 2.0, _MOST_PENALTY)
            run = 0
    else:
        run = run - 1 if run < 0 else -1
        if run <= -within:
            chain.penalty[0] = max(chain.penalty[0] * 0.5, _LEAST_PENALTY)
            run = 0
    return run
