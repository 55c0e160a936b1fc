"""Sixteen neighbours of one placement at a time: the inner loop of a search.

Neighbours differ from the base placement in a few ops. An op is *odd* in a lane where it, or one of its consumers, is
on another device than in the base; nearly all ops are odd in no lane. Those are run once for all lanes: their times as
vectors, and their memory as plain numbers, since it is the same in every lane up to a shift that only odd ops change.
An op that is odd somewhere is run for all lanes as if it were not; then its odd lanes are put back, and run alone.

For placements that `push` can run: a fixed order, one sender to each bus, nothing fetched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import ONE, ZERO, compiled, lowest_bit
from roost.simulator.kernels.vector import LANES, run_op, run_transfer, wait_for

WIDE = np.uintp(LANES)


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
    dying: Array  # [ops * lanes] i8 bytes given back at an op beyond those of the base, zero between runs
    is_dying: Array  # [ops] bool, false between runs
    odd: Array  # [ops] u8 a bit for each odd lane, zero between runs
    slot: Array  # [ops] i4 row in `device` of an op that some lane moves, or -1, -1 between runs
    device: Array  # [slots * lanes] u4
    home_slot: Array  # [parameters] i4 the same for parameters
    home: Array  # [slots * lanes] u4
    saved: Array  # [lanes * most] f8


@compiled
def new_lanes(layout, most_moves):
    """Room for lanes that move at most so many ops between them."""
    num_ops, num_devices, num_parameters = len(layout.op), layout.num_devices, len(layout.parameter_op)
    most_consumers = 0
    for op in range(num_ops):
        most_consumers = max(most_consumers, np.int64(layout.next_start[op + 1]) - np.int64(layout.next_start[op]))
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
        np.zeros(LANES * (3 + num_devices + most_consumers)),
    )


@compiled
def _device_in(lanes, device, op, lane):
    slot = lanes.slot[op]
    return np.uintp(device[op]) if slot < 0 else np.uintp(lanes.device[np.uintp(slot) * WIDE + lane])


@compiled
def _home_in(lanes, home, parameter, lane):
    slot = lanes.home_slot[parameter]
    return np.uintp(home[parameter]) if slot < 0 else np.uintp(lanes.home[np.uintp(slot) * WIDE + lane])


@compiled
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


@compiled
def set_lanes(layout, lanes, device, home, number_of, is_parameter, moves, first, count, fetching):
    """Move the ops of so many neighbours, from the first on; mark the odd ops, and the lanes that would fetch.

    `moves` are the neighbours' starts in, and the columns of, ops of the graph and devices.
    """
    start, move_op, move_device = moves
    num_slots, num_home_slots = 0, 0
    lanes.shift[:] = 0
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            number, there = number_of[move_op[move]], move_device[move]
            if is_parameter[move_op[move]]:
                num_home_slots = _move(lanes.home_slot, lanes.home, home, number, num_home_slots, lane, there)
            else:
                num_slots = _move(lanes.slot, lanes.device, device, number, num_slots, lane, there)
    for lane in range(count):
        wide = np.uintp(lane)
        fetching[first + lane] = False
        bit = ONE << wide
        for move in range(start[first + lane], start[first + lane + 1]):
            number = np.uintp(number_of[move_op[move]])
            if is_parameter[move_op[move]]:
                there = _home_in(lanes, home, number, wide)
                # A parameter that is moved twice in one lane must be counted once: set, do not add.
                for user in range(layout.user_start[number], layout.user_start[number + np.uintp(1)]):
                    if _device_in(lanes, device, np.uintp(layout.user[user]), wide) != there:
                        fetching[first + lane] = True
            else:
                there = _device_in(lanes, device, number, wide)
                lanes.odd[number] |= bit
                for edge in range(layout.previous_start[number], layout.previous_start[number + np.uintp(1)]):
                    lanes.odd[layout.previous[edge]] |= bit
                for use in range(layout.use_start[number], layout.use_start[number + np.uintp(1)]):
                    if _home_in(lanes, home, np.uintp(layout.use[use]), wide) != there:
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
                lanes.home[slot * LANES + lane] = home[number]  # counted: a second mention moves nothing


@compiled
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


@compiled
def _flush(lanes, most, held, num_devices, skip):
    """Take the peaks of the base since the last flush into those of each lane but the ones to skip."""
    for d in range(num_devices):
        for lane in range(WIDE):
            if not (skip >> lane) & ONE:
                peak = most[d] + lanes.shift[d * WIDE + lane]
                if peak > lanes.peak[d * WIDE + lane]:
                    lanes.peak[d * WIDE + lane] = peak
        most[d] = held[d]


@compiled
def run_lanes(layout, lanes, device, always_held):
    """Simulate sixteen neighbours; the lanes then hold their step times and peaks. Returns transfers of the base."""
    next_start, next_op, output = layout.next_start, layout.next, layout.output
    num_devices = np.uintp(layout.num_devices)
    held, before, most = np.zeros(64, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    last, gone_at = np.zeros(64, np.uint32), np.zeros(len(device), np.int64)
    num_transfers = 0
    lanes.free[:] = 0.0
    lanes.bus_free[:] = 0.0
    lanes.step[:] = 0.0
    lanes.transfers[:] = 0
    lanes.peak[:] = 0
    for d in range(num_devices):
        held[d] = most[d] = always_held[d]
    first = np.uintp(next_start[0])
    for op in range(np.uintp(len(device))):
        here = np.uintp(device[op])
        beyond = np.uintp(next_start[op + np.uintp(1)])
        takes = layout.time[op * num_devices + here]
        targets = ZERO
        for edge in range(first, beyond):
            there = np.uintp(device[next_op[edge]])
            targets |= ONE << there
            last[there] = next_op[edge]
        remote = targets & ~(ONE << here)
        odd = lanes.odd[op]
        if odd != ZERO:
            _save(layout, lanes, device, op, here, remote, odd)
            _flush(lanes, most, held, num_devices, ZERO)
            before[:] = held

        busy = layout.device_gap[here] if takes > 0.0 else 0.0
        run_op(lanes.ready, op * WIDE, lanes.free, here * WIDE, lanes.arrives, here * WIDE, lanes.step, takes, busy)
        size = output[op]
        gone = gone_at[op]
        held[here] += size
        filled = held[here] + layout.workspace[op]
        most[here] = filled if filled > most[here] else most[here]
        if targets & (ONE << here):
            gone_at[last[here]] += size
            held[here] -= gone
        else:
            held[here] -= gone + size
        if remote != ZERO:
            num_transfers += _send(layout, lanes, op, here, remote)
            if layout.copies_in_memory:
                left = remote
                while left != ZERO:
                    there = lowest_bit(left)
                    left &= left - ONE
                    held[there] += size
                    most[there] = held[there] if held[there] > most[there] else most[there]
                    gone_at[last[there]] += size
        for edge in range(first, beyond):
            consumer = np.uintp(next_op[edge])
            wait_for(lanes.ready, consumer * WIDE, lanes.arrives, np.uintp(device[consumer]) * WIDE)

        if odd != ZERO or lanes.is_dying[op]:
            _flush(lanes, most, held, num_devices, odd)
            for lane in range(WIDE):
                if not (odd >> lane) & ONE:
                    lanes.shift[here * WIDE + lane] -= lanes.dying[op * WIDE + lane]
                    lanes.dying[op * WIDE + lane] = 0
            left = odd
            number = 0
            while left != ZERO:
                lane = lowest_bit(left)
                left &= left - ONE
                for d in range(num_devices):
                    lanes.shift[d * WIDE + lane] -= held[d] - before[d]
                _run_odd(layout, lanes, device, held, op, here, targets, last, gone, lane, number)
                number += 1
            lanes.is_dying[op] = False
        first = beyond
    _flush(lanes, most, held, num_devices, ZERO)
    return num_transfers


@compiled
def _send(layout, lanes, op, here, remote):
    """Send the output of an op from its place in the base to the devices whose bit is set, in every lane."""
    num_devices = np.uintp(layout.num_devices)
    nbytes = np.float64(layout.output[op])
    pair = here * num_devices
    count = 0
    slowest = 0.0
    if layout.broadcast:
        left = remote
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            needs = layout.latency[pair + there] + nbytes * layout.seconds_per_byte[pair + there]
            slowest = needs if needs > slowest else slowest
    left = remote
    while left != ZERO:
        there = lowest_bit(left)
        bus = np.uintp(layout.bus[pair + there])
        if not layout.broadcast:
            takes = layout.latency[pair + there] + nbytes * layout.seconds_per_byte[pair + there]
            run_transfer(
                lanes.arrives, here * WIDE, there * WIDE, lanes.bus_free, bus * WIDE, takes, layout.bus_gap[bus]
            )
        elif left == remote:
            run_transfer(
                lanes.arrives, here * WIDE, there * WIDE, lanes.bus_free, bus * WIDE, slowest, layout.bus_gap[bus]
            )
        else:
            for lane in range(WIDE):
                lanes.arrives[there * WIDE + lane] = lanes.arrives[lowest_bit(remote) * WIDE + lane]
        left &= left - ONE
        count += 1
    return count


@compiled
def _save(layout, lanes, device, op, here, remote, odd):
    """Keep what running the op as in the base will change, in its odd lanes."""
    num_devices = np.uintp(layout.num_devices)
    at = np.uintp(0)
    while odd != ZERO:
        lane = lowest_bit(odd)
        odd &= odd - ONE
        lanes.saved[at] = lanes.ready[op * WIDE + lane]
        lanes.saved[at + np.uintp(1)] = lanes.free[here * WIDE + lane]
        lanes.saved[at + np.uintp(2)] = lanes.step[lane]
        at += np.uintp(3)
        left = remote
        while left != ZERO:
            line = np.uintp(layout.bus[here * num_devices + lowest_bit(left)])
            left &= left - ONE
            lanes.saved[at] = lanes.bus_free[line * WIDE + lane]
            at += np.uintp(1)
        for edge in range(np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])):
            lanes.saved[at] = lanes.ready[np.uintp(layout.next[edge]) * WIDE + lane]
            at += np.uintp(1)


@compiled
def _run_odd(layout, lanes, device, held, op, base_here, base_targets, base_last, base_gone, lane, number):
    """Put one lane back to where it was before the op, and run the op there as that lane has it."""
    num_devices = np.uintp(layout.num_devices)
    first, beyond = np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
    base_remote = base_targets & ~(ONE << base_here)
    num_remote = np.uintp(0)
    left = base_remote
    while left != ZERO:
        left &= left - ONE
        num_remote += np.uintp(1)
    at = np.uintp(number) * (np.uintp(3) + num_remote + beyond - first)
    ready = lanes.saved[at]
    lanes.free[base_here * WIDE + lane] = lanes.saved[at + np.uintp(1)]
    lanes.step[lane] = lanes.saved[at + np.uintp(2)]
    at += np.uintp(3)
    left = base_remote
    while left != ZERO:
        line = np.uintp(layout.bus[base_here * num_devices + lowest_bit(left)])
        left &= left - ONE
        lanes.bus_free[line * WIDE + lane] = lanes.saved[at]
        at += np.uintp(1)
    for edge in range(first, beyond):
        lanes.ready[np.uintp(layout.next[edge]) * WIDE + lane] = lanes.saved[at]
        at += np.uintp(1)
    # What the base will give back of this output, this lane will not.
    size = layout.output[op]
    left = base_targets
    while left != ZERO:
        there = lowest_bit(left)
        left &= left - ONE
        if there == base_here or layout.copies_in_memory:
            lanes.dying[np.uintp(base_last[there]) * WIDE + lane] -= size
            lanes.is_dying[base_last[there]] = True

    here = _device_in(lanes, device, op, lane)
    idle = lanes.free[here * WIDE + lane]
    takes = layout.time[op * num_devices + here]
    end = (ready if ready > idle else idle) + takes
    lanes.free[here * WIDE + lane] = end + layout.device_gap[here] if takes > 0.0 else end
    if end > lanes.step[lane]:
        lanes.step[lane] = end
    targets = ZERO
    last = np.empty(64, np.uint32)
    for edge in range(first, beyond):
        there = _device_in(lanes, device, np.uintp(layout.next[edge]), lane)
        targets |= ONE << there
        last[there] = layout.next[edge]
    remote = targets & ~(ONE << here)

    spot = here * WIDE + lane
    lanes.shift[spot] += size
    filled = held[here] + lanes.shift[spot] + layout.workspace[op]
    if filled > lanes.peak[spot]:
        lanes.peak[spot] = filled
    gone = base_gone + lanes.dying[op * WIDE + lane]
    lanes.dying[op * WIDE + lane] = 0
    if targets & (ONE << here):
        lanes.dying[np.uintp(last[here]) * WIDE + lane] += size
        lanes.is_dying[last[here]] = True
    else:
        gone += size
    lanes.shift[spot] -= gone

    lanes.arrives[spot] = end
    nbytes = np.float64(size)
    pair = here * num_devices
    slowest = 0.0
    if layout.broadcast:
        left = remote
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            needs = layout.latency[pair + there] + nbytes * layout.seconds_per_byte[pair + there]
            slowest = needs if needs > slowest else slowest
    begin = 0.0
    left = remote
    while left != ZERO:
        there = lowest_bit(left)
        line = np.uintp(layout.bus[pair + there]) * WIDE + lane
        takes = slowest
        if not layout.broadcast:
            takes = layout.latency[pair + there] + nbytes * layout.seconds_per_byte[pair + there]
        if not layout.broadcast or left == remote:
            begin = end if end > lanes.bus_free[line] else lanes.bus_free[line]
            lanes.bus_free[line] = begin + takes + layout.bus_gap[layout.bus[pair + there]]
        left &= left - ONE
        spot = there * WIDE + lane
        lanes.arrives[spot] = begin + takes
        lanes.transfers[lane] += 1
        if layout.copies_in_memory:
            lanes.shift[spot] += size
            filled = held[there] + lanes.shift[spot]
            if filled > lanes.peak[spot]:
                lanes.peak[spot] = filled
            lanes.dying[np.uintp(last[there]) * WIDE + lane] += size
            lanes.is_dying[last[there]] = True
    lanes.transfers[lane] -= np.int64(num_remote)
    for edge in range(first, beyond):
        consumer = np.uintp(layout.next[edge])
        arrival = lanes.arrives[_device_in(lanes, device, consumer, lane) * WIDE + lane]
        if arrival > lanes.ready[consumer * WIDE + lane]:
            lanes.ready[consumer * WIDE + lane] = arrival


@compiled
def run_neighbours(layout, device, home, number_of, is_parameter, moves, fetching, step_time, peak, num_transfers):
    """Simulate neighbours of a placement; `fetching` [neighbours] marks those that must be run another way."""
    count = len(moves[0]) - 1
    most = 0
    for first in range(0, count, LANES):
        beyond = min(first + LANES, count)
        most = max(most, moves[0][beyond] - moves[0][first])
    lanes = new_lanes(layout, most)
    held = np.zeros(64, np.int64)
    for parameter in range(len(home)):
        held[home[parameter]] += layout.parameter_bytes[parameter]
    for first in range(0, count, LANES):
        filled = min(LANES, count - first)
        set_lanes(layout, lanes, device, home, number_of, is_parameter, moves, first, filled, fetching)
        base = run_lanes(layout, lanes, device, held)
        for lane in range(filled):
            step_time[first + lane] = lanes.step[lane]
            num_transfers[first + lane] = base + lanes.transfers[lane]
            for d in range(layout.num_devices):
                peak[first + lane, d] = lanes.peak[d * LANES + lane]
        clear_lanes(layout, lanes, number_of, is_parameter, moves, first, filled)
