"""Earliest task first: of all ready ops and all devices, take the pair that can start first.

Every device has a queue of ops that it might run. A queue has two heaps: ops whose inputs arrive
later, by that time, and ops whose inputs are there, by urgency. So the next pair is the best of a
few heads, and a step takes n log n in all. An op that may run on several devices is in several
queues; a queue drops it when it comes to an op that was placed elsewhere.

A second queue of each device is for favourites: ops that should follow their favourite input on its
device. The device waits for them a while before it takes anything else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.held_memory import consumers_of, inputs_of, peak_with
from roost.placers._listing.partial_schedule import (
    clear_schedule,
    is_in,
    new_schedule,
    place_rest,
    place_unit,
    run_op,
    transfer_seconds,
)
from roost.simulator.kernels.base import compiled, inlined
from roost.simulator.kernels.busy import with_ends
from roost.simulator.kernels.heap import heap_pop, heap_push

USABLE, OTHERS, ANY = range(3)  # which devices an op has been offered to


class Heaps(NamedTuple):
    """A heap of ops for each queue, the op with the lowest key first."""

    key: Array  # [queues, ops] f8
    op: Array  # [queues, ops] u4
    size: Array  # [queues] i8 ops in each


class Queues(NamedTuple):
    """Ops that each device might run next.

    Queue d is that of device d, queue devices + d that of its favourites.
    """

    late: Heaps  # by the time when the inputs will be there
    ready: Heaps  # by urgency, which is the position in the dispatch order
    offers: Array  # [ops] i4 in how many queues it is
    stage: Array  # [ops] u1 which devices it has been offered to
    done: Array  # [ops] bool
    missing: Array  # [ops] i4 inputs that have not been placed
    awake: Array  # [devices] f8 until when it waits for a favourite
    awaited: Array  # [devices] i4 that favourite, or -1


@compiled
def new_heaps(num_queues, num_ops):
    """Empty heaps."""
    key = np.empty((num_queues, num_ops))
    op = np.empty((num_queues, num_ops), np.uint32)
    return Heaps(key, op, np.zeros(num_queues, np.int64))


@inlined
def push(heaps, queue, key, op):
    """Put an op into the heap of a queue."""
    heap_push(heaps.key[queue], heaps.op[queue], heaps.size[queue], key, np.uint32(op))
    heaps.size[queue] += 1


@inlined
def pop(heaps, queue):
    """Take the first op out of the heap of a queue."""
    op = heaps.op[queue, 0]
    heap_pop(heaps.key[queue], heaps.op[queue], heaps.size[queue])
    heaps.size[queue] -= 1
    return op


@compiled
def drop_done(queues, heaps, queue):
    """Drop the first ops that have been scheduled on other devices; true if others are left."""
    while heaps.size[queue] > 0 and queues.done[heaps.op[queue, 0]]:
        pop(heaps, queue)
    return heaps.size[queue] > 0


@compiled
def new_queues(layout, with_favourites):
    """Empty queues."""
    num_ops = len(layout.op)
    num_devices = layout.num_devices
    num_queues = 2 * num_devices if with_favourites else num_devices
    return Queues(
        new_heaps(num_queues, num_ops),
        new_heaps(num_queues, num_ops),
        np.zeros(num_ops, np.int32),
        np.zeros(num_ops, np.uint8),
        np.zeros(num_ops, np.bool_),
        layout.num_inputs.astype(np.int32),
        np.zeros(num_devices),
        np.full(num_devices, -1, np.int32),
    )


@compiled
def ready_on(layout, schedule, op, d):
    """The time when the inputs of an op can be on a device, if no bus is busy."""
    num_devices = np.uintp(layout.num_devices)
    ready = 0.0
    for edge in inputs_of(layout, op):
        source = np.uintp(layout.previous[edge])
        arrival = schedule.arrives[source * num_devices + d]
        if arrival < 0.0:
            pair = np.uintp(schedule.device[source]) * num_devices + d
            takes = transfer_seconds(layout, np.float64(layout.output[source]), pair)
            arrival = schedule.finish[source] + with_ends(layout.busy, takes, pair)
        ready = max(ready, arrival)
    return ready


@compiled
def enqueue(layout, schedule, queues, op, queue):
    """Put an op into a queue."""
    d = queue % np.uintp(layout.num_devices)
    push(queues.late, queue, ready_on(layout, schedule, op, d), op)
    queues.offers[op] += 1


@compiled
def offer(layout, listing, schedule, queues, usable, op):
    """Offer an op, which is in no queue, to the next devices that may run it; true if any may."""
    unit = np.uintp(listing.unit[op])
    if schedule.unit_device[unit] >= 0:
        enqueue(layout, schedule, queues, op, np.uintp(schedule.unit_device[unit]))
        return True
    while queues.stage[op] < ANY:
        allowed = listing.allowed[unit]
        allowed &= usable if queues.stage[op] == USABLE else ~usable
        queues.stage[op] += 1
        for d in range(np.uintp(layout.num_devices)):
            if is_in(allowed, d):
                enqueue(layout, schedule, queues, op, d)
        if queues.offers[op] > 0:
            return True
    return False


@compiled
def withdraw(layout, listing, schedule, queues, usable, op):
    """Count an op that left a queue unplaced, and offer it to other devices if that was the last.

    Returns true if no other device may run it.
    """
    queues.offers[op] -= 1
    return queues.offers[op] == 0 and not offer(layout, listing, schedule, queues, usable, op)


@compiled
def head(layout, schedule, queues, queue):
    """The next op of a queue, or -1 where there is none, and when it could start.

    An op that cannot start there any more comes first.
    """
    num_devices = np.uintp(layout.num_devices)
    d = queue % num_devices
    late = queues.late
    ready = queues.ready
    free = schedule.free[d] if queue >= num_devices else max(schedule.free[d], queues.awake[d])
    while late.size[queue] > 0 and late.key[queue, 0] <= free:
        op = pop(late, queue)
        if not queues.done[op]:
            push(ready, queue, np.float64(op), op)
    if drop_done(queues, ready, queue):
        return np.int64(ready.op[queue, 0]), free
    if drop_done(queues, late, queue):
        return np.int64(late.op[queue, 0]), late.key[queue, 0]
    return np.int64(-1), 0.0


@compiled
def least_overfull(layout, listing, schedule, unit, capacity):
    """The device that a unit which fits nowhere overfills least."""
    best = np.uintp(0)
    least = np.inf
    for d in range(np.uintp(layout.num_devices)):
        if is_in(listing.allowed[unit], d):
            most = peak_with(layout, listing, schedule.held, unit, d, True, schedule.extra)
            over = np.float64(most) - capacity[d]
            if over < least:
                best = d
                least = over
    return best


@compiled
def next_pair(layout, schedule, queues, num_queues):
    """The queue whose head can start first, and that op; of equals the most urgent."""
    best_queue = np.uintp(0)
    best_op = np.int64(-1)
    best_start = np.inf
    for queue in range(num_queues):
        op, start = head(layout, schedule, queues, queue)
        if op >= 0 and (start < best_start or (start == best_start and op < best_op)):
            best_queue = queue
            best_op = op
            best_start = start
    return best_queue, best_op


@compiled
def may_run_on(listing, schedule, op, d):
    """True if an op may run on a device, and its unit is not placed elsewhere."""
    unit = listing.unit[np.uintp(op)]
    there = schedule.unit_device[unit]
    return (there < 0 or np.uintp(there) == d) and is_in(listing.allowed[unit], d)


@compiled
def stay_awake(layout, listing, schedule, queues, favourite, op, d):
    """Let a device wait for the favourite of the op it ran, as long as a transfer elsewhere takes.

    The shortest transfer counts.
    """
    num_devices = np.uintp(layout.num_devices)
    if queues.awaited[d] == np.int64(op):
        queues.awake[d] = 0.0
        queues.awaited[d] = -1
    child = favourite[op]
    if child < 0 or not may_run_on(listing, schedule, child, d):
        return
    nearest = np.inf
    for other in range(num_devices):
        if other != d:
            pair = d * num_devices + other
            takes = transfer_seconds(layout, np.float64(layout.output[op]), pair)
            nearest = min(nearest, with_ends(layout.busy, takes, pair))
    if nearest < np.inf:
        queues.awake[d] = schedule.finish[op] + nearest
        queues.awaited[d] = child


@compiled
def welcome(layout, listing, schedule, queues, usable, parent, op):
    """Put an op that has all inputs where its favourite input is, or offer it to all devices."""
    if len(parent) > 0 and parent[op] >= 0:
        d = np.uintp(schedule.device[np.uintp(parent[op])])
        if may_run_on(listing, schedule, op, d):
            enqueue(layout, schedule, queues, op, np.uintp(layout.num_devices) + d)
            return
    offer(layout, listing, schedule, queues, usable, op)


@compiled
def earliest_first(
    layout, listing, usable, capacity, favourite, parent, count_memory, unit_device, sequence
):
    """Schedule all ops; write the device of each unit, and the ops in the order of scheduling.

    `favourite` [ops] i4 is the consumer that should follow each op on its device, or -1; `parent`
    is the inverse. Both may be empty.
    """
    num_ops = len(layout.op)
    num_devices = np.uintp(layout.num_devices)
    schedule = new_schedule(layout, listing)
    clear_schedule(schedule)
    with_favourites = len(favourite) > 0
    queues = new_queues(layout, with_favourites)
    num_queues = np.uintp(len(queues.late.size))
    for op in range(np.uintp(num_ops)):
        if queues.missing[op] == 0:
            welcome(layout, listing, schedule, queues, usable, parent, op)
    count = 0
    while count < num_ops:
        queue, number = next_pair(layout, schedule, queues, num_queues)
        op = np.uintp(number)
        d = queue % num_devices
        unit = np.uintp(listing.unit[op])
        pop(queues.ready if queues.ready.size[queue] > 0 else queues.late, queue)
        there = schedule.unit_device[unit]
        if there < 0:
            most = schedule.held.peak[d] + listing.need[unit]
            if count_memory and np.float64(most) > capacity[d]:
                most = peak_with(layout, listing, schedule.held, unit, d, True, schedule.extra)
                if np.float64(most) > capacity[d]:
                    if not withdraw(layout, listing, schedule, queues, usable, op):
                        continue
                    d = least_overfull(layout, listing, schedule, unit, capacity)
            place_unit(layout, listing, schedule, unit, d, True, count_memory)
        elif np.uintp(there) != d:
            withdraw(layout, listing, schedule, queues, usable, op)
            continue
        run_op(layout, schedule, op, d)
        queues.done[op] = True
        sequence[count] = op
        count += 1
        if with_favourites:
            stay_awake(layout, listing, schedule, queues, favourite, op, d)
        for edge in consumers_of(layout, op):
            consumer = np.uintp(layout.next[edge])
            queues.missing[consumer] -= 1
            if queues.missing[consumer] == 0:
                welcome(layout, listing, schedule, queues, usable, parent, consumer)
    place_rest(layout, listing, schedule, capacity)
    unit_device[:] = schedule.unit_device
