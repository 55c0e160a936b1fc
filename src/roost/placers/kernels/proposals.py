"""Moves to try: which units to put on which device, many kinds of them, drawn at random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers.kernels.chance import below, uniform
from roost.simulator.kernels.base import ONE, ZERO, bare


class Space(NamedTuple):
    """What can be moved. Blocks are sets of units; the first so many are the units themselves, one each."""

    num_units: int
    num_devices: int
    unit_start: Array  # [units + 1] i8 ops of unit i are unit_op[unit_start[i]:unit_start[i + 1]]
    unit_op: Array  # [ops] i4 index in the graph
    allowed: Array  # [units] u8 a bit for each device
    near_start: Array  # [units + 1] i8 units that give it a tensor or take one, likewise
    near: Array  # [.] i4
    block_start: Array  # [blocks + 1] i8
    block_unit: Array  # [.] i4
    line_start: Array  # [lines + 1] i8 lines are blocks in a row, of which windows are taken
    line: Array  # [.] i4 blocks
    longest_window: int


class Draft(NamedTuple):
    """Moves of up to sixteen neighbours, as the lanes want them, and the units they move."""

    start: Array  # [lanes + 1] i8
    op: Array  # [room] i4
    device: Array  # [room] i4
    unit_start: Array  # [lanes + 1] i8
    unit: Array  # [units room] i4
    unit_device: Array  # [units room] i4


@bare
def put(space, draft, placed, unit, there, num_units, num_ops):
    """Add the move of one unit to the neighbour at hand, where it moves and there is room; what is filled then."""
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
def propose(space, draft, placed, hot, num_hot, lane, state):
    """Draw one move for a lane. `placed` [units] is where they are; `hot` are units that the step waits for.

    The lane is left empty where nothing was found that moves anything.
    """
    begun_units, begun_ops = draft.unit_start[lane], draft.start[lane]
    num_units, num_ops = begun_units, begun_ops
    for _ in range(8):
        if num_hot > 0 and uniform(state) < 0.5:
            unit = np.int64(hot[below(state, num_hot)])
        else:
            unit = below(state, space.num_units)
        there = _target(space, placed, unit, state)
        kind = uniform(state)
        num_lines, num_blocks = len(space.line_start) - 1, len(space.block_start) - 1
        if kind < 0.45:
            num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
        elif kind < 0.60 and num_blocks > space.num_units:
            block = space.num_units + below(state, num_blocks - space.num_units)
            first, beyond = space.block_start[block], space.block_start[block + 1]
            there = _target(space, placed, np.int64(space.block_unit[first + below(state, beyond - first)]), state)
            for member in range(first, beyond):
                num_units, num_ops = put(
                    space, draft, placed, np.int64(space.block_unit[member]), there, num_units, num_ops
                )
        elif kind < 0.75 and num_units < space.num_units:  # a unit and some of its neighbours
            num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
            for member in range(space.near_start[unit], space.near_start[unit + 1]):
                if uniform(state) < 0.4:
                    num_units, num_ops = put(
                        space, draft, placed, np.int64(space.near[member]), there, num_units, num_ops
                    )
        elif kind < 0.93:
            chosen = below(state, num_lines)
            begin, end = space.line_start[chosen], space.line_start[chosen + 1]
            length = 1 + np.int64(np.float64(space.longest_window) ** uniform(state))
            first = begin + below(state, end - begin)
            beyond = min(end, first + length)
            which = uniform(state)
            if which < 0.35 and first > begin:  # as the block before the window
                there = np.int64(placed[space.block_unit[space.block_start[space.line[first - 1]]]])
            elif which < 0.7 and beyond < end:
                there = np.int64(placed[space.block_unit[space.block_start[space.line[beyond]]]])
            else:
                there = below(state, space.num_devices)
            for number in range(first, beyond):
                block = space.line[number]
                for member in range(space.block_start[block], space.block_start[block + 1]):
                    num_units, num_ops = put(
                        space, draft, placed, np.int64(space.block_unit[member]), there, num_units, num_ops
                    )
        else:  # two units change places
            other = below(state, space.num_units)
            here, there = np.int64(placed[unit]), np.int64(placed[other])
            if here != there:
                num_units, num_ops = put(space, draft, placed, unit, there, num_units, num_ops)
                num_units, num_ops = put(space, draft, placed, other, here, num_units, num_ops)
        if num_units > begun_units:
            break
    draft.unit_start[lane + 1] = num_units
    draft.start[lane + 1] = num_ops
