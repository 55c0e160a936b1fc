"""Random moves: each kind puts some units on another device. Kinds that gained lately are likelier.

The loops of both annealings call `propose` for each neighbour.
"""

from __future__ import annotations

import numpy as np

from roost.placers._shared.compiled_random import below, uniform
from roost.simulator.kernels.base import ONE, ZERO, bare

# Kinds of moves. Each level of blocks has a kind of its own, from BLOCK on; each row has one for
# its windows, from WINDOW on.
UNIT = 0
NEAR = 1
SWAP = 2
BLOCK = 3
WINDOW = 7
HOME = 10
TRADE = 11
KINDS = 12

_TRIES = 8  # draws for one neighbour, until one of them moves something
_CRITICAL_SHARE = 0.75  # of the draws, where it is known what the step waits for
_NEIGHBOUR_SHARE = 0.6  # of the target devices are those of a unit that shares a tensor
_FOLLOW_SHARE = 0.4  # of the units near a unit that move along with it


@bare
def put(space, draft, placed, lane, unit, there):
    """Add the move of one unit to a neighbour, where it is a move, is allowed, and has room."""
    if placed[unit] == there or (space.allowed[unit] >> np.uint64(there)) & ONE == ZERO:
        return
    num_units = draft.unit_start[lane + 1]
    num_ops = draft.start[lane + 1]
    first = space.unit_start[unit]
    beyond = space.unit_start[unit + 1]
    if num_ops + beyond - first > len(draft.op) or num_units >= len(draft.unit):
        return
    draft.unit[num_units] = unit
    draft.unit_device[num_units] = there
    for member in range(first, beyond):
        draft.op[num_ops] = space.unit_op[member]
        draft.device[num_ops] = there
        num_ops += 1
    draft.unit_start[lane + 1] = num_units + 1
    draft.start[lane + 1] = num_ops


@bare
def propose(space, draft, placed, critical, num_critical, lane, rng):
    """Draw one move for a lane. `placed` [units] is where they are.

    Most moves take one of the `num_critical` first units of `critical`: the step waits for these.
    The lane is left empty where nothing was drawn that moves anything.
    """
    draft.unit_start[lane + 1] = draft.unit_start[lane]
    draft.start[lane + 1] = draft.start[lane]
    for _ in range(_TRIES):
        if num_critical > 0 and uniform(rng) < _CRITICAL_SHARE:
            unit = np.int64(critical[below(rng, num_critical)])
        else:
            unit = below(rng, space.num_units)
        there = _target(space, placed, unit, rng)
        kind = _kind(space, draft, rng)
        draft.kind[lane] = kind
        if kind <= NEAR:
            put(space, draft, placed, lane, unit, there)
            if kind == NEAR:
                _put_near(space, draft, placed, lane, unit, there, rng)
        elif kind == HOME:
            unit = _home(space, rng)
            put(space, draft, placed, lane, unit, _target(space, placed, unit, rng))
        elif kind in (SWAP, TRADE):
            _put_swapped(space, draft, placed, lane, unit, kind, rng)
        elif kind < WINDOW:
            _put_block(space, draft, placed, lane, 1 + kind - BLOCK, rng)
        else:
            _put_window(space, draft, placed, lane, kind - WINDOW, rng)
        if draft.unit_start[lane + 1] > draft.unit_start[lane]:
            break


@bare
def _target(space, placed, unit, rng):
    """A device for a unit: mostly that of a neighbour, else any."""
    first = space.near_start[unit]
    beyond = space.near_start[unit + 1]
    if beyond > first and uniform(rng) < _NEIGHBOUR_SHARE:
        for _ in range(3):
            there = placed[space.near[first + below(rng, beyond - first)]]
            if there != placed[unit]:
                return there
    return below(rng, space.num_devices)


@bare
def _home(space, rng):
    """A unit whose parameters may be fetched."""
    return np.int64(space.home[below(rng, len(space.home))])


@bare
def _kind(space, draft, rng):
    """A kind of move that this space has, those that gained most lately likelier."""
    drawn = uniform(rng)
    kind = 0
    while kind < KINDS - 1 and draft.odds[kind] < drawn:
        kind += 1
    if BLOCK <= kind < WINDOW:
        level = 1 + kind - BLOCK
        if level + 1 >= len(space.level) or space.level[level + 1] == space.level[level]:
            return UNIT
    elif WINDOW <= kind < HOME and kind - WINDOW >= len(space.row_start) - 1:
        return WINDOW
    elif kind >= HOME and len(space.home) < 2:
        return UNIT
    return kind


@bare
def _put_near(space, draft, placed, lane, unit, there, rng):
    """Some of the units that share a tensor with a unit follow it."""
    for member in range(space.near_start[unit], space.near_start[unit + 1]):
        if uniform(rng) < _FOLLOW_SHARE:
            put(space, draft, placed, lane, np.int64(space.near[member]), there)


@bare
def _put_swapped(space, draft, placed, lane, unit, kind, rng):
    """Two units change places."""
    other = below(rng, space.num_units)
    if kind == TRADE:  # where memory is full, one parameter must make room for another
        unit = _home(space, rng)
        other = _home(space, rng)
    here = np.int64(placed[unit])
    there = np.int64(placed[other])
    if here != there:
        put(space, draft, placed, lane, unit, there)
        put(space, draft, placed, lane, other, here)


@bare
def _put_block(space, draft, placed, lane, level, rng):
    """All units of a block of this level go to one device."""
    block = space.level[level] + below(rng, space.level[level + 1] - space.level[level])
    first = space.block_start[block]
    beyond = space.block_start[block + 1]
    unit = np.int64(space.block_unit[first + below(rng, beyond - first)])
    there = _target(space, placed, unit, rng)
    for member in range(first, beyond):
        put(space, draft, placed, lane, np.int64(space.block_unit[member]), there)


@bare
def _put_window(space, draft, placed, lane, row, rng):
    """A window of blocks of a row goes mostly to the device of the block before or after it."""
    begin = space.row_start[row]
    end = space.row_start[row + 1]
    length = 1 + np.int64(np.float64(space.longest_window) ** uniform(rng))
    first = begin + below(rng, end - begin)
    beyond = min(end, first + length)
    drawn = uniform(rng)
    if drawn < 0.35 and first > begin:
        there = _device_of(space, placed, first - 1)
    elif drawn < 0.7 and beyond < end:
        there = _device_of(space, placed, beyond)
    else:
        there = below(rng, space.num_devices)
    for number in range(first, beyond):
        block = space.row_block[number]
        for member in range(space.block_start[block], space.block_start[block + 1]):
            put(space, draft, placed, lane, np.int64(space.block_unit[member]), there)


@bare
def _device_of(space, placed, number):
    """The device of the first unit of a block, by its number in the rows."""
    return np.int64(placed[space.block_unit[space.block_start[space.row_block[number]]]])


@bare
def learn_odds(draft, decay):
    """Make kinds likelier by what they gained for each try; no kind is given up."""
    total = 0.0
    for kind in range(KINDS):
        total += (draft.gains[kind] + 0.02) / (draft.tries[kind] + 1.0)
        draft.tries[kind] *= decay
        draft.gains[kind] *= decay
    upto = 0.0
    for kind in range(KINDS):
        share = (draft.gains[kind] + 0.02 * decay) / (draft.tries[kind] + decay) / total
        upto += 0.7 * share + 0.3 / KINDS
        draft.odds[kind] = upto


@bare
def even_odds(draft):
    """Make every kind as likely as any other."""
    for kind in range(KINDS):
        draft.tries[kind] = 0.0
        draft.gains[kind] = 0.0
        draft.odds[kind] = (kind + 1.0) / KINDS
