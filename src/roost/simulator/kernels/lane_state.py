"""The state of sixteen lanes: room for it, and the moves that set them apart from the base."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import ONE, ZERO, bare, compiled, inlined
from roost.simulator.kernels.vector import (
    LANES,
)

WIDE = np.uintp(LANES)
NOTHING = np.int64(2**62)  # more than all sizes of a graph together


class Lanes(NamedTuple):
    """The state of sixteen simulations; lane l of row i is at i * 16 + l."""

    ready: Array  # [ops * lanes] f8, zero between runs
    free: Array  # [devices * lanes] f8
    bus_free: Array  # [buses * lanes] f8
    arrives: Array  # [devices * lanes] f8
    step: Array  # [lanes] f8
    transfers: Array  # [lanes] i8 more than in the base
    shift: Array  # [devices * lanes] i8 bytes held beyond the base
    peak: Array  # [devices * lanes] i8
    # [ops * lanes] i8 bytes given back at an op beyond those of the base, zero between runs.
    dying: Array
    is_dying: Array  # [ops] bool, false between runs
    odd: Array  # [ops] u8 a bit for each odd lane, zero between runs
    slot: Array  # [ops] i4 row in `device` of an op that some lane moves, or -1, -1 between runs
    device: Array  # [slots * lanes] u4
    home_slot: Array  # [parameters] i4 the same for parameters
    home: Array  # [slots * lanes] u4
    saved: Array  # [lanes * most] f8
    last: Array  # [devices] u4 the last consumer on each device in one odd lane
    base_last: Array  # [devices] u4 the same in the base
    held: Array  # [devices] i8 bytes, in the base
    before: Array  # [devices] i8 the same before the op at hand
    most: Array  # [devices] i8 the most since the lanes last took it over
    gone: Array  # [ops] i8 bytes given back at an op, in the base, zero between runs
    # [ops * lanes] f8 seconds that it takes longer, zero between runs; empty where nothing keeps
    # busy.
    extra: Array


@compiled
def new_lanes(layout, most_moves):
    """Room for lanes that move at most so many ops between them."""
    num_ops = len(layout.op)
    num_devices = layout.num_devices
    num_parameters = len(layout.parameter_op)
    most_consumers = 0
    for op in range(num_ops):
        most_consumers = max(
            most_consumers, np.int64(layout.next_start[op + 1]) - np.int64(layout.next_start[op])
        )
    return Lanes(
        np.zeros(num_ops * LANES),
        np.zeros(num_devices * LANES),
        np.zeros(len(layout.bus_gap) * LANES),
        np.zeros(num_devices * LANES),
        np.zeros(LANES),
        np.zeros(LANES, np.int64),
        np.zeros(num_devices * LANES, np.int64),
        np.zeros(num_devices * LANES, np.int64),
        np.zeros(num_ops * LANES, np.int64),
        np.zeros(num_ops, np.bool_),
        np.zeros(num_ops, np.uint64),
        np.full(num_ops, -1, np.int32),
        np.zeros(most_moves * LANES, np.uint32),
        np.full(num_parameters, -1, np.int32),
        np.zeros(most_moves * LANES, np.uint32),
        np.zeros(LANES * (4 + num_devices + 2 * most_consumers)),
        np.zeros(64, np.uint32),
        np.zeros(64, np.uint32),
        np.zeros(64, np.int64),
        np.zeros(64, np.int64),
        np.zeros(64, np.int64),
        np.zeros(num_ops, np.int64),
        np.zeros(num_ops * LANES if layout.busy is not None else 0),
    )


@inlined
def place_in(base, slot_of, moved, number, lane):
    """The device of an op or parameter in one lane."""
    slot = slot_of[number]
    return np.uintp(base[number]) if slot < 0 else np.uintp(moved[np.uintp(slot) * WIDE + lane])


@inlined
def _move(slot_of, devices, base, number, num_slots, lane, device):
    """Put op or parameter `number` on `device` in one lane; returns the number of slots in use."""
    slot = slot_of[number]
    if slot < 0:
        slot = slot_of[number] = num_slots
        num_slots += 1
        for other in range(LANES):
            devices[slot * LANES + other] = base[number]
    devices[slot * LANES + lane] = device
    return num_slots


@bare
def set_lanes(layout, lanes, device, home, number_of, is_parameter, moves, first, count, fetching):
    """Move the ops of so many neighbours, from the first on; mark the odd ops, and the lanes that
    would fetch.

    `moves` are the neighbours' starts in, and the columns of, ops of the graph and devices.
    """
    start, move_op, move_device = moves
    num_slots = 0
    num_home_slots = 0
    lanes.shift[:] = 0
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            number = number_of[move_op[move]]
            there = move_device[move]
            if is_parameter[move_op[move]]:
                num_home_slots = _move(
                    lanes.home_slot, lanes.home, home, number, num_home_slots, lane, there
                )
            else:
                num_slots = _move(lanes.slot, lanes.device, device, number, num_slots, lane, there)
    for lane in range(count):
        wide = np.uintp(lane)
        fetching[first + lane] = False
        bit = ONE << wide
        for move in range(start[first + lane], start[first + lane + 1]):
            number = np.uintp(number_of[move_op[move]])
            if is_parameter[move_op[move]]:
                there = place_in(home, lanes.home_slot, lanes.home, number, wide)
                # A parameter that is moved twice in one lane must be counted once: set, do not add.
                for user in range(
                    layout.user_start[number], layout.user_start[number + np.uintp(1)]
                ):
                    if (
                        place_in(
                            device, lanes.slot, lanes.device, np.uintp(layout.user[user]), wide
                        )
                        != there
                    ):
                        fetching[first + lane] = True
            else:
                there = place_in(device, lanes.slot, lanes.device, number, wide)
                lanes.odd[number] |= bit
                for edge in range(
                    layout.previous_start[number], layout.previous_start[number + np.uintp(1)]
                ):
                    lanes.odd[layout.previous[edge]] |= bit
                for use in range(layout.use_start[number], layout.use_start[number + np.uintp(1)]):
                    if (
                        place_in(home, lanes.home_slot, lanes.home, np.uintp(layout.use[use]), wide)
                        != there
                    ):
                        fetching[first + lane] = True
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            if is_parameter[move_op[move]]:
                number = number_of[move_op[move]]
                slot = lanes.home_slot[number]
                there = lanes.home[slot * LANES + lane]
                size = layout.parameter_bytes[number]
                lanes.shift[home[number] * np.uint32(LANES) + np.uint32(lane)] -= size
                lanes.shift[there * np.uint32(LANES) + np.uint32(lane)] += size
                # Counted: a second mention moves nothing.
                lanes.home[slot * LANES + lane] = home[number]


@bare
def clear_lanes(layout, lanes, number_of, is_parameter, moves, first, count):
    """Forget what `set_lanes` set."""
    start, move_op, _ = moves
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            number = number_of[move_op[move]]
            if is_parameter[move_op[move]]:
                lanes.home_slot[number] = -1
            else:
                lanes.slot[number] = -1
                lanes.odd[number] = ZERO
                for edge in range(layout.previous_start[number], layout.previous_start[number + 1]):
                    lanes.odd[layout.previous[edge]] = ZERO
