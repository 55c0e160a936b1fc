"""Earliest task first: of all ops that are ready and all devices, the pair that can start first.

Every device has two heaps of ops that it might run: those whose inputs will be there later, by that
time, and those whose inputs are there, by urgency. So the next pair is the best of a few heads, and
a step takes n log n in all. An op that may run on several devices is in several heaps; it is
dropped from the others when they come to it.

A second pair of heaps for each device is for favourites: ops that should follow their favourite
input on its device, which waits for them a while before it takes anything else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.linear_rules import book, clear_desk, new_desk, settle, settle_rest
from roost.placers._listing.memory_room import peak_with
from roost.simulator.kernels.base import ONE, ZERO, compiled
from roost.simulator.kernels.busy import with_ends
from roost.simulator.kernels.heap import heap_pop, heap_push

USABLE, OTHERS, ANY = range(3)  # which devices an op has been offered to


class Queues(NamedTuple):
    """What each device might run next; queue d is that of device d, queue devices + d that of its
    favourites."""

    late_time: Array  # [queues, room] f8 when the inputs will be there
    late_op: Array  # [queues, room] u4
    late: Array  # [queues] i8 how many
    open_time: Array  # [queues, room] f8 urgency, as the position in the dispatch order
    open_op: Array  # [queues, room] u4
    open: Array  # [queues] i8 how many
    offers: Array  # [ops] i4 in how many queues it is
    stage: Array  # [ops] u1 which devices it has been offered to
    done: Array  # [ops] bool
    missing: Array  # [ops] i4 inputs that have not been placed
    awake: Array  # [devices] f8 until when it waits for a favourite
    awaited: Array  # [devices] i4 that favourite, or -1


@compiled
def new_queues(layout, with_favourites):
    num_ops, num_devices = len(layout.op), layout.num_devices
    num_queues = 2 * num_devices
    # Only the queues of favourites can be left without room.
    late_time, late_op = np.empty((num_queues, num_ops)), np.empty((num_queues, num_ops), np.uint32)
    if not with_favourites:
        late_time, late_op = (
            np.empty((num_devices, num_ops)),
            np.empty((num_devices, num_ops), np.uint32),
        )
    return Queues(
        late_time,
        late_op,
        np.zeros(num_queues, np.int64),
        np.empty_like(late_time),
        np.empty_like(late_op),
        np.zeros(num_queues, np.int64),
        np.zeros(num_ops, np.int32),
        np.zeros(num_ops, np.uint8),
        np.zeros(num_ops, np.bool_),
        layout.num_inputs.astype(np.int32),
        np.zeros(num_devices),
        np.full(num_devices, -1, np.int32),
    )


@compiled
def ready_on(layout, desk, op, d):
    """When the inputs of an op can be on a device, if no bus is busy."""
    num_devices = np.uintp(layout.num_devices)
    ready = 0.0
    for edge in range(layout.previous_start[op], layout.previous_start[op + np.uintp(1)]):
        source = np.uintp(layout.previous[edge])
        arrival = desk.arrives[source * num_devices + d]
        if arrival < 0.0:
            pair = np.uintp(desk.device[source]) * num_devices + d
            takes = (
                layout.sent_latency[pair]
                + np.float64(layout.output[source]) * layout.sent_seconds_per_byte[pair]
            )
            arrival = desk.finish[source] + with_ends(layout.busy, takes, pair)
        ready = max(ready, arrival)
    return ready


@compiled
def put(layout, desk, queues, op, queue):
    """Put an op into a queue."""
    d = queue % np.uintp(layout.num_devices)
    heap_push(
        queues.late_time[queue],
        queues.late_op[queue],
        queues.late[queue],
        ready_on(layout, desk, op, d),
        np.uint32(op),
    )
    queues.late[queue] += 1
    queues.offers[op] += 1


@compiled
def offer(layout, listing, desk, queues, usable, op):
    """Offer an op, which is in no queue, to the next devices that may run it; whether there are
    any."""
    unit = np.uintp(listing.unit[op])
    if desk.unit_device[unit] >= 0:
        put(layout, desk, queues, op, np.uintp(desk.unit_device[unit]))
        return True
    while queues.stage[op] < ANY:
        allowed = listing.allowed[unit]
        allowed &= usable if queues.stage[op] == USABLE else ~usable
        queues.stage[op] += 1
        for d in range(np.uintp(layout.num_devices)):
            if (allowed >> np.uint64(d)) & ONE != ZERO:
                put(layout, desk, queues, op, d)
        if queues.offers[op] > 0:
            return True
    return False


@compiled
def drop(layout, listing, desk, queues, usable, op):
    """An op has left a queue unplaced. Where that was the last, offer it to others; true where
    there are none."""
    queues.offers[op] -= 1
    return queues.offers[op] == 0 and not offer(layout, listing, desk, queues, usable, op)


@compiled
def head(layout, listing, desk, queues, queue):
    """The next op of a queue and when it could start; -1 where there is none. An op that is stale
    comes first."""
    num_devices = np.uintp(layout.num_devices)
    d = queue % num_devices
    free = desk.free[d] if queue >= num_devices else max(desk.free[d], queues.awake[d])
    while queues.late[queue] > 0 and queues.late_time[queue, 0] <= free:
        op = queues.late_op[queue, 0]
        heap_pop(queues.late_time[queue], queues.late_op[queue], queues.late[queue])
        queues.late[queue] -= 1
        if not queues.done[op]:
            heap_push(
                queues.open_time[queue],
                queues.open_op[queue],
                queues.open[queue],
                np.float64(op),
                op,
            )
            queues.open[queue] += 1
    while queues.open[queue] > 0 and queues.done[queues.open_op[queue, 0]]:
        heap_pop(queues.open_time[queue], queues.open_op[queue], queues.open[queue])
        queues.open[queue] -= 1
    if queues.open[queue] > 0:
        return np.int64(queues.open_op[queue, 0]), free
    while queues.late[queue] > 0 and queues.done[queues.late_op[queue, 0]]:
        heap_pop(queues.late_time[queue], queues.late_op[queue], queues.late[queue])
        queues.late[queue] -= 1
    if queues.late[queue] > 0:
        return np.int64(queues.late_op[queue, 0]), queues.late_time[queue, 0]
    return np.int64(-1), 0.0


@compiled
def take(queues, queue):
    """Take the head out of a queue."""
    if queues.open[queue] > 0:
        heap_pop(queues.open_time[queue], queues.open_op[queue], queues.open[queue])
        queues.open[queue] -= 1
    else:
        heap_pop(queues.late_time[queue], queues.late_op[queue], queues.late[queue])
        queues.late[queue] -= 1


@compiled
def most_room(layout, listing, desk, unit, capacity):
    """The device where a unit that fits nowhere is least too much."""
    best, least = np.uintp(0), np.inf
    for d in range(np.uintp(layout.num_devices)):
        if (listing.allowed[unit] >> np.uint64(d)) & ONE != ZERO:
            over = (
                np.float64(peak_with(layout, listing, desk.room, unit, d, True, desk.extra))
                - capacity[d]
            )
            if over < least:
                best, least = d, over
    return best


@compiled
def next_pair(layout, listing, desk, queues, num_queues):
    """The queue whose head can start first, and that op; of equals the most urgent."""
    best_queue, best_op, best_start = np.uintp(0), np.int64(-1), np.inf
    for queue in range(num_queues):
        op, start = head(layout, listing, desk, queues, queue)
        if op >= 0 and (start < best_start or (start == best_start and op < best_op)):
            best_queue, best_op, best_start = queue, op, start
    return best_queue, best_op


@compiled
def stay_awake(layout, listing, desk, queues, favourite, op, d):
    """Let a device wait for the favourite of the op it runs, as long as that would need to get
    elsewhere."""
    num_devices = np.uintp(layout.num_devices)
    if queues.awaited[d] == np.int64(op):
        queues.awake[d], queues.awaited[d] = 0.0, -1
    child = favourite[op]
    if child < 0:
        return
    unit = listing.unit[np.uintp(child)]
    there = desk.unit_device[unit]
    if (there >= 0 and np.uintp(there) != d) or (
        listing.allowed[unit] >> np.uint64(d)
    ) & ONE == ZERO:
        return
    nearest = np.inf
    for other in range(num_devices):
        if other != d:
            pair = d * num_devices + other
            takes = (
                layout.sent_latency[pair]
                + np.float64(layout.output[op]) * layout.sent_seconds_per_byte[pair]
            )
            nearest = min(nearest, with_ends(layout.busy, takes, pair))
    if nearest < np.inf:
        queues.awake[d], queues.awaited[d] = desk.finish[op] + nearest, child


@compiled
def welcome(layout, listing, desk, queues, usable, parent, op):
    """An op has all its inputs: put it where its favourite input is, or offer it to all devices."""
    source = parent[op]
    if source >= 0 and len(queues.late_time) > layout.num_devices:
        d = np.uintp(desk.device[np.uintp(source)])
        unit = listing.unit[op]
        there = desk.unit_device[unit]
        if (listing.allowed[unit] >> np.uint64(d)) & ONE != ZERO and (
            there < 0 or np.uintp(there) == d
        ):
            put(layout, desk, queues, op, np.uintp(layout.num_devices) + d)
            return
    offer(layout, listing, desk, queues, usable, op)


@compiled
def earliest_first(
    layout, listing, usable, capacity, favourite, parent, count_memory, unit_device, sequence
):
    """Schedule all ops; writes the device of each unit, and the ops in the order in which they were
    scheduled.

    `favourite` [ops] i4 is the consumer that should follow each op on its device, or -1; `parent`
    the other way round. Both may be empty.
    """
    num_ops, num_devices = len(layout.op), np.uintp(layout.num_devices)
    desk = new_desk(layout, listing)
    clear_desk(desk)
    with_favourites = len(favourite) > 0
    queues = new_queues(layout, with_favourites)
    num_queues = np.uintp(2) * num_devices if with_favourites else num_devices
    nothing = np.full(num_ops, -1, np.int32)
    parents = parent if with_favourites else nothing
    for op in range(np.uintp(num_ops)):
        if queues.missing[op] == 0:
            welcome(layout, listing, desk, queues, usable, parents, op)
    count = 0
    while count < num_ops:
        queue, number = next_pair(layout, listing, desk, queues, num_queues)
        op, d = np.uintp(number), queue % num_devices
        unit = np.uintp(listing.unit[op])
        take(queues, queue)
        if (
            desk.unit_device[unit] < 0
            and count_memory
            and np.float64(desk.room.peak[d] + listing.need[unit]) > capacity[d]
        ):
            most = peak_with(layout, listing, desk.room, unit, d, True, desk.extra)
            if np.float64(most) > capacity[d]:
                if not drop(layout, listing, desk, queues, usable, op):
                    continue
                d = most_room(layout, listing, desk, unit, capacity)
        elif desk.unit_device[unit] >= 0 and np.uintp(desk.unit_device[unit]) != d:
            drop(layout, listing, desk, queues, usable, op)
            continue
        if desk.unit_device[unit] < 0:
            settle(layout, listing, desk, unit, d, True, count_memory)
        book(layout, desk, op, d)
        queues.done[op] = True
        sequence[count] = op
        count += 1
        if with_favourites:
            stay_awake(layout, listing, desk, queues, favourite, op, d)
        for edge in range(layout.next_start[op], layout.next_start[op + np.uintp(1)]):
            consumer = np.uintp(layout.next[edge])
            queues.missing[consumer] -= 1
            if queues.missing[consumer] == 0:
                welcome(layout, listing, desk, queues, usable, parents, consumer)
    settle_rest(layout, listing, desk, capacity)
    unit_device[:] = desk.unit_device
