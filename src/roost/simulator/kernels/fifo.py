"""Placements without a fixed order, whose buses each have one sender and that fetch nothing.

Ops taken from one heap by the time they become ready can be committed to their device at once:
whatever becomes ready later starts later there. So one push and one pop for each op is all the
clock that is needed.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, send
from roost.simulator.kernels.busy import busy_after, crossings, longer
from roost.simulator.kernels.heap import heap_pop, heap_push


@compiled
def fifo(layout, device, begun, start, finish, moves, record):
    """The step time and the number of transfers.

    Writes the ops in the order they were `begun` [ops], their `start` and `finish` [ops], and where
    `record` is set each of the `moves`, for the memory.
    """
    time = layout.time
    next_start = layout.next_start
    next_op = layout.next
    device_gap = layout.device_gap
    num_devices = np.uintp(layout.num_devices)
    num_ops = np.uintp(len(device))
    free = np.zeros(64)
    bus_free = np.zeros(len(layout.bus_gap))
    arrives = np.zeros(64)
    waiting = layout.num_inputs.copy()
    ready = np.zeros(len(device))
    times = np.empty(len(device))
    tags = np.empty(len(device), np.uint32)
    extra, after = crossings(layout.busy, layout, device)
    size = 0
    step_time = 0.0
    num_transfers = 0
    for op in range(num_ops):
        if waiting[op] == 0:
            heap_push(times, tags, size, 0.0, np.uint32(op))
            size += 1
    for turn in range(num_ops):
        op = np.uintp(tags[0])
        here = np.uintp(device[op])
        begin = times[0]
        heap_pop(times, tags, size)
        size -= 1
        begin = begin if begin > free[here] else free[here]
        takes = longer(time[op * num_devices + here], extra, op)
        end = begin + takes
        free[here] = busy_after(end + device_gap[here] if takes > 0.0 else end, after, op)
        step_time = end if end > step_time else step_time
        begun[turn] = op
        start[op] = begin
        finish[op] = end
        first = np.uintp(next_start[op])
        beyond = np.uintp(next_start[op + np.uintp(1)])
        targets = ZERO
        for edge in range(first, beyond):
            targets |= ONE << np.uint64(device[next_op[edge]])
        remote = targets & ~(ONE << here)
        arrives[here] = end
        if remote != ZERO:
            num_transfers = send(
                layout, op, here, remote, end, bus_free, arrives, moves, num_transfers, record
            )
        for edge in range(first, beyond):
            consumer = np.uintp(next_op[edge])
            arrival = arrives[device[consumer]]
            if arrival > ready[consumer]:
                ready[consumer] = arrival
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                heap_push(times, tags, size, ready[consumer], np.uint32(consumer))
                size += 1
    return step_time, num_transfers
