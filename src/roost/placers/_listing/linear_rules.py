"""List scheduling by a linear rule: ops in dispatch order; a unit goes where its first op has the
lowest score.

The loop keeps when each device and each bus is free, and when each tensor is on each device. A
tensor is sent when the first op that needs it on a device is placed there; it may use the last long
pause of the bus, so that what was made long ago does not wait for what was sent since.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.memory_room import MOMENTS, Room, clear_room, hold, peak_with
from roost.simulator.kernels.base import ONE, ZERO, compiled, inlined, lowest_bit, new_moves
from roost.simulator.kernels.busy import keep_sender, with_ends, with_receiver
from roost.simulator.kernels.push import push

# What a rule adds up for a device, each times a weight. The first ones are in seconds.
FEATURES = (
    "start",  # of the op at hand
    "finish",
    "load",  # seconds of all the ops there, with this unit
    "over_share",  # that load beyond the device's share
    "unit_time",  # seconds of all ops of the unit
    "inbound",  # transfers of inputs that are not there
    "outgoing",  # transfers of the output to consumers already placed
    # Transfer between the output and what it will be combined with, where that is elsewhere.
    "partner",
    "absent",  # share of the input bytes that are not there
    "not_home",  # 1 where the biggest input was not made there
    "not_previous",  # 1 where the unit before was not placed there
    # 1 where the op before of the same module, or of the same call of it, is not there.
    "not_module",
    "not_parent",  # the same for the module that this one is part of
    "not_role",  # the same for the op before of the same module, kind and phase, in any call
    "in_line",  # the number of the device in the line
    "memory",  # share of the device's memory in use, with this unit
    # Bytes of parameters and long-lived outputs beyond what is fair, as a share of its memory.
    "over_fair",
    "unused",  # 1 where nothing has been placed there yet
    "in_way",  # seconds of the op, where a more urgent op that comes soon after is expected there
    "price",  # bytes that last as a share of the device's memory: dear where memory is scarce
)
NUM_FEATURES = len(FEATURES)
KINDS = np.uintp(3)  # of ops before: of the same module, of its parent, of the same role


class LinearRules(NamedTuple):
    """Many rules, a row for each."""

    weights: Array  # [rules, features] f8
    usable: Array  # [rules] u8 a bit for each device; others are taken only where nothing else fits
    line: Array  # [rules, devices] f8 where each device stands in the line
    share: Array  # [rules, devices] f8 seconds
    fair: Array  # [rules, devices] f8 bytes
    # [rules] bool whether outputs count where they were made until their last use anywhere.
    cautious: Array
    # [rules, units] i4 the device of each unit in another placement, or -1; not read where `hold`
    # is 0.
    kept: Array
    hold: Array  # [rules] f8 what is added to the score of every other device


class Desk(NamedTuple):
    """The state of a schedule in the making."""

    device: Array  # [ops] u4
    unit_device: Array  # [units] i4, -1 where not placed yet
    finish: Array  # [ops] f8 seconds
    arrives: Array  # [ops * devices] f8 seconds, -1 where it has not been sent
    free: Array  # [devices] f8
    bus_free: Array  # [buses] f8
    pause_start: Array  # [buses] f8 a time in which the bus carries nothing
    pause_end: Array  # [buses] f8
    load: Array  # [devices] f8 seconds
    filled: Array  # [devices] i8 bytes that last
    ready: Array  # [devices] f8 scratch of one decision, as are the next ones
    inbound: Array  # [devices] f8
    absent: Array  # [devices] f8
    outgoing: Array  # [devices] f8
    extra: Array  # [MOMENTS] i8
    room: Room


@compiled
def new_desk(layout, listing):
    """An empty desk for this problem."""
    num_ops, num_units, num_devices = len(layout.op), len(listing.allowed), layout.num_devices
    room = Room(
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices * MOMENTS, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_ops * num_devices, np.uint8),
    )
    return Desk(
        np.zeros(num_ops, np.uint32),
        np.zeros(num_units, np.int32),
        np.zeros(num_ops),
        np.zeros(num_ops * num_devices),
        np.zeros(num_devices),
        np.zeros(len(layout.bus_gap)),
        np.zeros(len(layout.bus_gap)),
        np.zeros(len(layout.bus_gap)),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(MOMENTS, np.int64),
        room,
    )


@inlined
def clear_desk(desk):
    """Nothing is placed."""
    desk.unit_device[:] = -1
    desk.arrives[:] = -1.0
    desk.free[:] = 0.0
    desk.bus_free[:] = 0.0
    desk.pause_start[:] = 0.0
    desk.pause_end[:] = 0.0
    desk.load[:] = 0.0
    desk.filled[:] = 0
    clear_room(desk.room)


@inlined
def begin_on(desk, bus, made, takes):
    """When a bus can begin a transfer of something made at a time."""
    begin = max(made, desk.pause_start[bus])
    if begin + takes <= desk.pause_end[bus]:
        return begin
    return max(made, desk.bus_free[bus])


@inlined
def book(layout, desk, op, d):
    """Run an op on a device: send it what it needs, and note when it has finished."""
    num_devices = np.uintp(layout.num_devices)
    arrives, previous, bus_free = desk.arrives, layout.previous, desk.bus_free
    start, takes = desk.free[d], layout.time[op * num_devices + d]
    for edge in range(layout.previous_start[op], layout.previous_start[op + np.uintp(1)]):
        source = np.uintp(previous[edge])
        arrival = arrives[source * num_devices + d]
        if arrival < 0.0:
            pair = np.uintp(desk.device[source]) * num_devices + d
            bus = np.uintp(layout.bus[pair])
            lasts = (
                layout.sent_latency[pair]
                + np.float64(layout.output[source]) * layout.sent_seconds_per_byte[pair]
            )
            begin = begin_on(desk, bus, desk.finish[source], lasts)
            arrival = begin + lasts
            keep_sender(layout.busy, desk.free, np.uintp(desk.device[source]), pair)
            takes = with_receiver(layout.busy, takes, pair)
            if begin < bus_free[bus]:
                desk.pause_start[bus] = arrival + layout.bus_gap[bus]
            else:
                # A short pause does not replace a long one.
                if begin - bus_free[bus] > 0.5 * (desk.pause_end[bus] - desk.pause_start[bus]):
                    desk.pause_start[bus] = bus_free[bus]
                    desk.pause_end[bus] = begin
                bus_free[bus] = arrival + layout.bus_gap[bus]
            arrives[source * num_devices + d] = arrival
        start = max(start, arrival)
    end = start + takes
    desk.free[d] = end + layout.device_gap[d] if takes > 0.0 else end
    desk.finish[op] = end
    arrives[op * num_devices + d] = end
    desk.device[op] = d
    return start


@inlined
def look(layout, listing, desk, op):
    """Write when the inputs of an op can be on each device, and what they and its output have to
    travel.

    Gives the device of its biggest input, or -1.
    """
    num_devices = np.uintp(layout.num_devices)
    ready, inbound, absent, outgoing, arrives = (
        desk.ready,
        desk.inbound,
        desk.absent,
        desk.outgoing,
        desk.arrives,
    )
    latency, seconds_per_byte = layout.sent_latency, layout.sent_seconds_per_byte
    for d in range(num_devices):
        ready[d] = 0.0
        inbound[d] = 0.0
        absent[d] = 0.0
        outgoing[d] = 0.0
    biggest, home, total = -1.0, -1, 0.0
    for edge in range(layout.previous_start[op], layout.previous_start[op + np.uintp(1)]):
        source = np.uintp(layout.previous[edge])
        nbytes = np.float64(layout.output[source])
        made = desk.finish[source]
        row = np.uintp(desk.device[source]) * num_devices
        total += nbytes
        if nbytes > biggest:
            biggest, home = nbytes, np.int64(desk.device[source])
        for d in range(num_devices):
            arrival = arrives[source * num_devices + d]
            if arrival < 0.0:
                takes = latency[row + d] + nbytes * seconds_per_byte[row + d]
                begin = begin_on(desk, np.uintp(layout.bus[row + d]), made, takes)
                takes = with_ends(layout.busy, takes, row + d)
                arrival = begin + takes
                inbound[d] += takes
                absent[d] += nbytes
            ready[d] = max(ready[d], arrival)
    if total > 0.0:
        for d in range(num_devices):
            absent[d] /= total
    targets = ZERO
    for edge in range(layout.next_start[op], layout.next_start[op + np.uintp(1)]):
        there = desk.unit_device[listing.unit[layout.next[edge]]]
        if there >= 0:
            targets |= ONE << np.uint64(there)
    nbytes = np.float64(layout.output[op])
    while targets != ZERO:
        there = np.uintp(lowest_bit(targets))
        targets &= targets - ONE
        for d in range(num_devices):
            if d != there:
                pair = d * num_devices + there
                outgoing[d] += with_ends(
                    layout.busy, latency[pair] + nbytes * seconds_per_byte[pair], pair
                )
    return home


@inlined
def device_of(desk, op):
    """The device of an earlier op, or -1 where there is none."""
    return np.int64(desk.device[np.uintp(op)]) if op >= 0 else -1


@inlined
def rival_device(listing, desk, op):
    """Where the more urgent op that comes soon after is placed, or is expected to be; -1 where
    there is none."""
    rival = listing.rival[op]
    if rival < 0:
        return np.int64(-1)
    there = np.int64(desk.unit_device[listing.unit[np.uintp(rival)]])
    home = listing.rival_home[op]
    return there if there >= 0 else device_of(desk, home)


@inlined
def choose(layout, listing, rules, row, capacity, desk, op, unit, previous, count_memory):
    """The device with the lowest score among those where the unit fits, or that with the most
    room."""
    num_devices = np.uintp(layout.num_devices)
    weights, room = rules.weights, desk.room
    home = look(layout, listing, desk, op)
    module = device_of(desk, listing.before[op * KINDS])
    parent = device_of(desk, listing.before[op * KINDS + np.uintp(1)])
    role = device_of(desk, listing.before[op * KINDS + np.uintp(2)])
    partner = device_of(desk, listing.partner[op])
    rival = rival_device(listing, desk, op)
    hold = rules.hold[row]
    kept = np.int64(rules.kept[row, unit]) if hold > 0.0 else np.int64(-1)
    usable, allowed = rules.usable[row], listing.allowed[unit]
    best, best_rank, best_score = np.uintp(0), 9, 0.0
    for d in range(num_devices):
        if (allowed >> np.uint64(d)) & ONE == ZERO:
            continue
        rank = 0 if (usable >> np.uint64(d)) & ONE != ZERO else 1
        there = d
        most = room.peak[d] + listing.need[unit]
        if count_memory and np.float64(most) > capacity[d]:
            most = peak_with(layout, listing, room, unit, d, rules.cautious[row], desk.extra)
            if np.float64(most) > capacity[d]:
                rank = 2
        if rank == 2:
            score = np.float64(most) - capacity[d]
        else:
            start = max(desk.ready[d], desk.free[d])
            unit_time = listing.unit_time[unit * num_devices + d]
            load = desk.load[d] + unit_time
            score = (
                weights[row, 0] * start
                + weights[row, 1] * (start + layout.time[op * num_devices + d])
                + weights[row, 2] * load
                + weights[row, 3] * max(0.0, load - rules.share[row, d])
                + weights[row, 4] * unit_time
                + weights[row, 5] * desk.inbound[d]
                + weights[row, 6] * desk.outgoing[d]
                + weights[row, 8] * desk.absent[d]
                + weights[row, 14] * rules.line[row, d]
                + weights[row, 15] * np.float64(most) / capacity[d]
            )
            if partner >= 0 and partner != there:
                score += weights[row, 7] * listing.partner_time[op]
            if home >= 0 and home != there:
                score += weights[row, 9]
            if previous >= 0 and previous != there:
                score += weights[row, 10]
            if module >= 0 and module != there:
                score += weights[row, 11]
            if parent >= 0 and parent != there:
                score += weights[row, 12]
            if role >= 0 and role != there:
                score += weights[row, 13]
            beyond = np.float64(desk.filled[d] + listing.lasting[unit]) - rules.fair[row, d]
            if beyond > 0.0:
                score += weights[row, 16] * beyond / capacity[d]
            if desk.load[d] == 0.0:
                score += weights[row, 17]
            if rival == np.int64(there):
                score += weights[row, 18] * layout.time[op * num_devices + d]
            score += weights[row, 19] * np.float64(listing.lasting[unit]) / capacity[d]
            if kept >= 0 and kept != np.int64(there):
                score += hold
        if rank < best_rank or (rank == best_rank and score < best_score):
            best, best_rank, best_score = d, rank, score
    return best


@inlined
def settle(layout, listing, desk, unit, d, cautious, count_memory):
    """Put a unit on a device."""
    desk.unit_device[unit] = d
    desk.load[d] += listing.unit_time[unit * np.uintp(layout.num_devices) + d]
    desk.filled[d] += listing.lasting[unit]
    if count_memory:
        hold(layout, listing, desk.room, unit, d, cautious)
    else:
        desk.room.base[d] += listing.resident[unit]
        desk.room.peak[d] = desk.room.base[d]


@inlined
def settle_rest(layout, listing, desk, capacity):
    """Units without ops, which are parameters that nobody reads: where there is most room."""
    for unit in range(np.uintp(len(listing.allowed))):
        if desk.unit_device[unit] >= 0:
            continue
        best, best_room = np.uintp(0), -np.inf
        for d in range(np.uintp(layout.num_devices)):
            left = capacity[d] - np.float64(desk.room.peak[d])
            if (listing.allowed[unit] >> np.uint64(d)) & ONE != ZERO and left > best_room:
                best, best_room = d, left
        settle(layout, listing, desk, unit, best, False, True)


@compiled
def roll(layout, listing, rules, row, capacity, desk, count_memory):
    """One schedule by one rule, left on the desk."""
    clear_desk(desk)
    previous = np.int64(-1)
    for op in range(np.uintp(len(layout.op))):
        unit = np.uintp(listing.unit[op])
        d = np.uintp(max(desk.unit_device[unit], 0))
        if desk.unit_device[unit] < 0:
            d = choose(
                layout, listing, rules, row, capacity, desk, op, unit, previous, count_memory
            )
            settle(layout, listing, desk, unit, d, rules.cautious[row], count_memory)
            previous = np.int64(d)
        book(layout, desk, op, d)
    settle_rest(layout, listing, desk, capacity)


@compiled
def run_rules(layout, listing, rules, memory, scales, count_memory, unit_device, step_time, excess):
    """A schedule for each rule, with memory [devices] bytes scaled by each of `scales` until the
    placement fits.

    Writes unit_device [rules, units], and the step time [rules] and the bytes over memory [rules]
    of each. Gives the number of placements simulated, those that did not fit included.
    """
    simulations = 0
    num_ops, num_devices = len(layout.op), layout.num_devices
    desk = new_desk(layout, listing)
    capacity = np.zeros(num_devices)
    held, peak = np.zeros(num_devices, np.int64), np.zeros(num_devices, np.int64)
    ready, dying = np.zeros(num_ops), np.zeros(num_ops, np.int64)
    free, bus_free, arrives = np.zeros(64), np.zeros(len(layout.bus_gap)), np.zeros(64)
    last, moves = np.zeros(64, np.uint32), new_moves(0)
    for row in range(len(rules.weights)):
        for number in range(len(scales)):
            for d in range(num_devices):
                capacity[d] = max(1.0, np.float64(memory[d]) * scales[number])
                held[d] = 0
            roll(layout, listing, rules, row, capacity, desk, count_memory)
            for unit in range(len(desk.unit_device)):
                held[desk.unit_device[unit]] += listing.resident[unit]
            takes, _ = push(
                layout, desk.device, ready, dying, free, bus_free, arrives, last, held, peak, moves
            )
            simulations += 1
            over = np.int64(0)
            for d in range(num_devices):
                over += max(0, peak[d] - memory[d])
            if number == 0 or over < excess[row]:
                unit_device[row] = desk.unit_device
                step_time[row], excess[row] = takes, over
            if over == 0:
                break
    return simulations


@compiled
def everything_on_one(layout, listing):
    """The most bytes held where one device runs everything."""
    num_ops = len(layout.op)
    device, last, moves = np.zeros(num_ops, np.uint32), np.zeros(64, np.uint32), new_moves(0)
    ready, dying = np.zeros(num_ops), np.zeros(num_ops, np.int64)
    free, bus_free, arrives = np.zeros(64), np.zeros(len(layout.bus_gap)), np.zeros(64)
    held, peak = np.zeros(layout.num_devices, np.int64), np.zeros(layout.num_devices, np.int64)
    held[0] = listing.resident.sum()
    push(layout, device, ready, dying, free, bus_free, arrives, last, held, peak, moves)
    return peak[0]
