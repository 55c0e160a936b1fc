"""A schedule in the making: the compiled list schedulers place its units one after the other.

It keeps when each device and each bus is free, and when each tensor is on each device. A tensor is
sent when the first op that needs it on a device is placed there. It may use the last long pause of
the bus, so that an old tensor does not wait for newer ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.held_memory import (
    MOMENTS,
    HeldBytes,
    clear_held,
    consumers_of,
    hold_unit,
    inputs_of,
)
from roost.simulator.kernels.base import ONE, ZERO, compiled, inlined, lowest_bit
from roost.simulator.kernels.busy import keep_sender, with_ends, with_receiver

KINDS = np.uintp(3)  # of ops before: of the same module, of its parent, of the same role


class PartialSchedule(NamedTuple):
    """Devices and times of the units placed so far, and scratch arrays for the next decision."""

    device: Array  # [ops] u4
    unit_device: Array  # [units] i4, -1 where not placed yet
    finish: Array  # [ops] f8 seconds
    arrives: Array  # [ops * devices] f8 seconds, -1 where it has not been sent
    free: Array  # [devices] f8
    bus_free: Array  # [buses] f8
    pause_start: Array  # [buses] f8 a time in which the bus carries nothing
    pause_end: Array  # [buses] f8
    load: Array  # [devices] f8 seconds
    lasting: Array  # [devices] i8 bytes that last
    held: HeldBytes
    # Scratch of one decision.
    ready: Array  # [devices] f8 seconds, when all inputs can be there
    inbound: Array  # [devices] f8 seconds of transfers of the inputs
    absent: Array  # [devices] f8 share of the input bytes that are not there
    outgoing: Array  # [devices] f8 seconds of transfers of the output
    extra: Array  # [MOMENTS] i8 bytes


@compiled
def new_schedule(layout, listing):
    """An empty schedule for this problem."""
    num_ops = len(layout.op)
    num_units = len(listing.allowed)
    num_devices = layout.num_devices
    num_buses = len(layout.bus_gap)
    held = HeldBytes(
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices * MOMENTS, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_ops * num_devices, np.uint8),
    )
    return PartialSchedule(
        np.zeros(num_ops, np.uint32),
        np.zeros(num_units, np.int32),
        np.zeros(num_ops),
        np.zeros(num_ops * num_devices),
        np.zeros(num_devices),
        np.zeros(num_buses),
        np.zeros(num_buses),
        np.zeros(num_buses),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        held,
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(MOMENTS, np.int64),
    )


@inlined
def clear_schedule(schedule):
    """Take everything out of a schedule."""
    schedule.unit_device[:] = -1
    schedule.arrives[:] = -1.0
    schedule.free[:] = 0.0
    schedule.bus_free[:] = 0.0
    schedule.pause_start[:] = 0.0
    schedule.pause_end[:] = 0.0
    schedule.load[:] = 0.0
    schedule.lasting[:] = 0
    clear_held(schedule.held)


@inlined
def is_in(devices, d):
    """True if the bits of some devices have that of device d."""
    return (devices >> np.uint64(d)) & ONE != ZERO


@inlined
def is_elsewhere(device, here):
    """True if a device is known, that is not -1, and is another one."""
    return device >= 0 and device != here


@inlined
def transfer_seconds(layout, nbytes, pair):
    """Seconds of a transfer between a pair of devices."""
    return layout.sent_latency[pair] + nbytes * layout.sent_seconds_per_byte[pair]


@inlined
def transfer_start(schedule, bus, made, takes):
    """The time at which a bus can begin a transfer of a tensor made at some time."""
    begin = max(made, schedule.pause_start[bus])
    if begin + takes <= schedule.pause_end[bus]:
        return begin
    return max(made, schedule.bus_free[bus])


@inlined
def run_op(layout, schedule, op, d):
    """Run an op on a device: send it its inputs, and write when it finishes."""
    num_devices = np.uintp(layout.num_devices)
    arrives = schedule.arrives
    bus_free = schedule.bus_free
    start = schedule.free[d]
    takes = layout.time[op * num_devices + d]
    for edge in inputs_of(layout, op):
        source = np.uintp(layout.previous[edge])
        arrival = arrives[source * num_devices + d]
        if arrival < 0.0:
            sender = np.uintp(schedule.device[source])
            pair = sender * num_devices + d
            bus = np.uintp(layout.bus[pair])
            lasts = transfer_seconds(layout, np.float64(layout.output[source]), pair)
            begin = transfer_start(schedule, bus, schedule.finish[source], lasts)
            arrival = begin + lasts
            keep_sender(layout.busy, schedule.free, sender, pair)
            takes = with_receiver(layout.busy, takes, pair)
            next_free = arrival + layout.bus_gap[bus]
            if begin < bus_free[bus]:
                schedule.pause_start[bus] = next_free
            else:
                # A short pause does not replace a long one.
                longest_pause = schedule.pause_end[bus] - schedule.pause_start[bus]
                if begin - bus_free[bus] > 0.5 * longest_pause:
                    schedule.pause_start[bus] = bus_free[bus]
                    schedule.pause_end[bus] = begin
                bus_free[bus] = next_free
            arrives[source * num_devices + d] = arrival
        start = max(start, arrival)
    end = start + takes
    schedule.free[d] = end + layout.device_gap[d] if takes > 0.0 else end
    schedule.finish[op] = end
    arrives[op * num_devices + d] = end
    schedule.device[op] = d


@inlined
def measure_transfers(layout, listing, schedule, op):
    """Write `ready`, `inbound`, `absent` and `outgoing` of an op for each device.

    Returns the device of its biggest input, or -1.
    """
    num_devices = np.uintp(layout.num_devices)
    ready = schedule.ready
    inbound = schedule.inbound
    absent = schedule.absent
    outgoing = schedule.outgoing
    arrives = schedule.arrives
    for d in range(num_devices):
        ready[d] = 0.0
        inbound[d] = 0.0
        absent[d] = 0.0
        outgoing[d] = 0.0
    biggest = -1.0
    home = -1
    total = 0.0
    for edge in inputs_of(layout, op):
        source = np.uintp(layout.previous[edge])
        nbytes = np.float64(layout.output[source])
        made = schedule.finish[source]
        row = np.uintp(schedule.device[source]) * num_devices
        total += nbytes
        if nbytes > biggest:
            biggest = nbytes
            home = np.int64(schedule.device[source])
        for d in range(num_devices):
            arrival = arrives[source * num_devices + d]
            if arrival < 0.0:
                takes = transfer_seconds(layout, nbytes, row + d)
                begin = transfer_start(schedule, np.uintp(layout.bus[row + d]), made, takes)
                takes = with_ends(layout.busy, takes, row + d)
                arrival = begin + takes
                inbound[d] += takes
                absent[d] += nbytes
            ready[d] = max(ready[d], arrival)
    if total > 0.0:
        for d in range(num_devices):
            absent[d] /= total
    readers = ZERO
    for edge in consumers_of(layout, op):
        there = schedule.unit_device[listing.unit[layout.next[edge]]]
        if there >= 0:
            readers |= ONE << np.uint64(there)
    nbytes = np.float64(layout.output[op])
    while readers != ZERO:
        there = np.uintp(lowest_bit(readers))
        readers &= readers - ONE
        for d in range(num_devices):
            if d != there:
                pair = d * num_devices + there
                takes = transfer_seconds(layout, nbytes, pair)
                outgoing[d] += with_ends(layout.busy, takes, pair)
    return home


@inlined
def device_of(schedule, op):
    """The device of an earlier op, or -1 if there is no such op."""
    return np.int64(schedule.device[np.uintp(op)]) if op >= 0 else -1


@inlined
def related_devices(listing, schedule, op):
    """Devices of the earlier ops that an op may want to be with, -1 where there is none.

    Of the same module, of its parent, of the same role, and of the op whose output meets its own.
    """
    module = device_of(schedule, listing.before[op * KINDS])
    parent = device_of(schedule, listing.before[op * KINDS + ONE])
    role = device_of(schedule, listing.before[op * KINDS + np.uintp(2)])
    partner = device_of(schedule, listing.partner[op])
    return module, parent, role, partner


@inlined
def rival_device(listing, schedule, op):
    """The device, placed or expected, of the more urgent op that comes soon after; -1 if none."""
    rival = listing.rival[op]
    if rival < 0:
        return np.int64(-1)
    there = np.int64(schedule.unit_device[listing.unit[np.uintp(rival)]])
    home = listing.rival_home[op]
    return there if there >= 0 else device_of(schedule, home)


@inlined
def place_unit(layout, listing, schedule, unit, d, cautious, count_memory):
    """Put a unit on a device."""
    schedule.unit_device[unit] = d
    schedule.load[d] += listing.unit_time[unit * np.uintp(layout.num_devices) + d]
    schedule.lasting[d] += listing.lasting[unit]
    if count_memory:
        hold_unit(layout, listing, schedule.held, unit, d, cautious)
    else:
        schedule.held.base[d] += listing.resident[unit]
        schedule.held.peak[d] = schedule.held.base[d]


@inlined
def place_rest(layout, listing, schedule, capacity):
    """Put units without ops, which are parameters that nobody reads, where most memory is free."""
    for unit in range(np.uintp(len(listing.allowed))):
        if schedule.unit_device[unit] >= 0:
            continue
        best = np.uintp(0)
        most_free = -np.inf
        for d in range(np.uintp(layout.num_devices)):
            left = capacity[d] - np.float64(schedule.held.peak[d])
            if is_in(listing.allowed[unit], d) and left > most_free:
                best = d
                most_free = left
        place_unit(layout, listing, schedule, unit, best, False, True)
