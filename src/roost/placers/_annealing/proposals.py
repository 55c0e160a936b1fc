"""Moves to try: which units to put on which device, many kinds of them, drawn at random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._shared.compiled_random import below, uniform
from roost.simulator.kernels.base import ONE, ZERO, bare


class Space(NamedTuple):
    """What can be moved. Blocks are sets of units; the first so many are the units themselves, one
    each."""

    num_units: int
    num_devices: int
    unit_start: Array  # [units + 1] i8 ops of unit i are unit_op[unit_start[i]:unit_start[i + 1]]
    unit_op: Array  # [ops] i4 index in the graph
    allowed: Array  # [units] u8 a bit for each device
    near_start: Array  # [units + 1] i8 units that give it a tensor or take one, likewise
    near: Array  # [.] i4
    block_start: Array  # [blocks + 1] i8
    block_unit: Array  # [.] i4
    # [levels + 1] i8 blocks of one level: units, then parts of modules, modules, modules of
    # modules.
    level: Array
    line_start: Array  # [lines + 1] i8 lines are blocks in a row, of which windows are taken
    line: Array  # [.] i4 blocks
    longest_window: int
    # [.] i4 units that are parameters and their updates, where others read them; these may be
    # fetched.
    home: Array


class Draft(NamedTuple):
    """Moves of up to sixteen neighbours, as the lanes want them, and the units they move."""

    start: Array  # [lanes + 1] i8
    op: Array  # [room] i4
    device: Array  # [room] i4
    unit_start: Array  # [lanes + 1] i8
    unit: Array  # [units room] i4
    unit_device: Array  # [units room] i4
    kind: Array  # [lanes] i8 of the move
    tried: Array  # [kinds] f8 how often, lately
    gained: Array  # [kinds] f8 and how much was gained by it
    odds: Array  # [kinds] f8 of each kind or one before it


# Kinds of moves. A block of a level is a kind of its own for each level, up to so many; likewise
# windows for each line.
UNIT, NEAR, SWAP, BLOCK, WINDOW, HOME, TRADE = 0, 1, 2, 3, 7, 10, 11
KINDS = 12


@bare
def put(space, draft, placed, unit, there, num_units, num_ops):
    """Add the move of one unit to the neighbour at hand, where it moves and there is room; what is
    filled then."""
    if placed[unit] == there or (space.allowed[unit] >> np.uint64(there)) & ONE == ZERO:
        return num_units, num_ops
    first, beyond = space.unit_start[unit], space.unit_start[unit + 1]
    if num_ops + beyond - first > len(draft.op) or num_units >= len(draft.unit):
        return num_units, num_ops
    draft.unit[num_units] = unit
    draft.unit_device[num_units] = there
    for member in range(first, beyond):
        draft.op[num_ops] = space.unit_op[member]
        draft.device[num_ops] = there
        num_ops += 1
    return num_units + 1, num_ops


@bare
def _target(space, placed, unit, state):
    """A device for a unit: mostly that of a neighbour, else any."""
    first, beyond = space.near_start[unit], space.near_start[unit + 1]
    if beyond > first and uniform(state) < 0.6:
        for _ in range(3):
            there = placed[space.near[first + below(state, beyond - first)]]
            if there != placed[unit]:
                return there
    return below(state, space.num_devices)


@bare
def _window(space, placed, line, state):
    """A window of blocks of a line, and a device for it: mostly that of the block before or after
    it."""
    begin, end = space.line_start[line], space.line_start[line + 1]
    length = 1 + np.int64(np.float64(space.longest_window) ** uniform(state))
    first = begin + below(state, end - begin)
    beyond = min(end, first + length)
    which = uniform(state)
    if which < 0.35 and first > begin:
        there = np.int64(placed[space.block_unit[space.block_start[space.line[first - 1]]]])
    elif which < 0.7 and beyond < end:
        there = np.int64(placed[space.block_unit[space.block_start[space.line[beyond]]]])
    else:
        there = below(state, space.num_devices)
    return first, beyond, there


@bare
def _kind(space, draft, state):
    """A kind of move that there is, those that gained most lately likelier."""
    drawn = uniform(state)
    kind = 0
    while kind < KINDS - 1 and draft.odds[kind] < drawn:
        kind += 1
    if BLOCK <= kind < WINDOW:
        level = 1 + kind - BLOCK
        if level + 1 >= len(space.level) or space.level[level + 1] == space.level[level]:
            return UNIT
    elif WINDOW <= kind < HOME and kind - WINDOW >= len(space.line_start) - 1:
        return WINDOW
    elif kind >= HOME and len(space.home) < 2:
        return UNIT
    return kind


@bare
def propose(space, draft, placed, hot, num_hot, lane, state):
    """Draw one move for a lane. `placed` [units] is where they are; `hot` are units that the step
    waits for.

    The lane is left empty where nothing was found that moves anything.
    """
    begun_units = draft.unit_start[lane]
    num_units, num_ops = begun_units, draft.start[lane]
    for _ in range(8):
        if num_hot > 0 and uniform(state) < 0.75:
            unit = np.int64(hot[below(state, num_hot)])
        else:
            unit = below(state, space.num_units)
        there = _target(space, placed, unit, state)
        kind = _kind(space, draft, state)
        draft.kind[lane] = kind
        if kind <= NEAR:
            num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
            if kind == NEAR:
                for member in range(space.near_start[unit], space.near_start[unit + 1]):
                    if uniform(state) < 0.4:
                        other = np.int64(space.near[member])
                        num_units, num_ops = put(
                            space, draft, placed, other, there, num_units, num_ops
                        )
        elif kind == HOME:
            unit = np.int64(space.home[below(state, len(space.home))])
            there = _target(space, placed, unit, state)
            num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
        elif kind in (SWAP, TRADE):
            other = below(state, space.num_units)
            if kind == TRADE:  # where memory is full, one parameter must make room for another
                unit = np.int64(space.home[below(state, len(space.home))])
                other = np.int64(space.home[below(state, len(space.home))])
            here, there = np.int64(placed[unit]), np.int64(placed[other])
            if here != there:
                num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
                num_units, num_ops = put(space, draft, placed, other, here, num_units, num_ops)
        elif kind < WINDOW:
            level = 1 + kind - BLOCK
            block = space.level[level] + below(state, space.level[level + 1] - space.level[level])
            first, beyond = space.block_start[block], space.block_start[block + 1]
            unit = np.int64(space.block_unit[first + below(state, beyond - first)])
            there = _target(space, placed, unit, state)
            for member in range(first, beyond):
                unit = np.int64(space.block_unit[member])
                num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
        else:
            first, beyond, there = _window(space, placed, kind - WINDOW, state)
            for number in range(first, beyond):
                block = space.line[number]
                for member in range(space.block_start[block], space.block_start[block + 1]):
                    unit = np.int64(space.block_unit[member])
                    num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
        if num_units > begun_units:
            break
    draft.unit_start[lane + 1] = num_units
    draft.start[lane + 1] = num_ops


@bare
def learn_odds(draft, decay):
    """Make kinds likelier by what they gained for each time they were tried; none is given up."""
    total = 0.0
    for kind in range(KINDS):
        total += (draft.gained[kind] + 0.02) / (draft.tried[kind] + 1.0)
        draft.tried[kind] *= decay
        draft.gained[kind] *= decay
    upto = 0.0
    for kind in range(KINDS):
        share = (draft.gained[kind] + 0.02 * decay) / (draft.tried[kind] + decay) / total
        upto += 0.7 * share + 0.3 / KINDS
        draft.odds[kind] = upto


@bare
def even_odds(draft):
    """Every kind as likely as any other."""
    for kind in range(KINDS):
        draft.tried[kind] = 0.0
        draft.gained[kind] = 0.0
        draft.odds[kind] = (kind + 1.0) / KINDS
