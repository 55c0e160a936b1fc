"""The critical path of a step: the ops on the chain that ends last.

An op waits for an input, a busy device, or a busy link. Shared buses are taken in dispatch order,
and nothing is fetched: near enough for choosing what to move.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, bare, compiled, lowest_bit
from roost.simulator.kernels.busy import cross, longer, nothing_yet


@compiled
def critical_units(layout, device, unit_of, critical, mark):
    """Write the units that the step waits for into `critical` [units]; returns how many.

    `mark` [units] must be false, and is left so.
    """
    cause, late, last = _causes(layout, device)
    count = 0
    while last >= 0:
        count = _taken(unit_of[last], critical, mark, count)
        before = cause[last]
        if before >= 0 and device[before] != device[last] and late[before] >= 0:
            count = _taken(unit_of[before], critical, mark, count)
            before = late[before]
        last = before
    for number in range(count):
        mark[critical[number]] = False
    return count


@bare
def _taken(unit, critical, mark, count):
    """Add a unit to those found, if it is not among them; returns how many there are."""
    if mark[unit]:
        return count
    mark[unit] = True
    critical[count] = unit
    return count + 1


@compiled
def _causes(layout, device):
    """The op that each op waited for, and the op that ends last; -1 for none.

    The second array is of ops that send: the op whose transfers kept the link busy before them.
    """
    num_ops = len(device)
    num_devices = np.uintp(layout.num_devices)
    time = layout.time
    next_start = layout.next_start
    next_op = layout.next
    output = layout.output
    latency = layout.sent_latency
    seconds_per_byte = layout.sent_seconds_per_byte
    ready = np.zeros(num_ops)
    free = np.zeros(64)
    bus_free = np.zeros(len(layout.bus_gap))
    busy = layout.busy
    arrives = np.zeros(64)
    extra = nothing_yet(busy, num_ops)
    after = np.full(num_ops, -1, np.int32)  # the op whose output came last
    cause = np.full(num_ops, -1, np.int32)
    late = np.full(num_ops, -1, np.int32)  # of a producer: the op whose sends kept the link busy
    on_device = np.full(64, -1, np.int32)
    on_bus = np.full(len(layout.bus_gap), -1, np.int32)
    last = -1
    latest = -1.0
    for op in range(np.uintp(num_ops)):
        here = np.uintp(device[op])
        begin = ready[op]
        cause[op] = after[op]
        if free[here] > begin:
            begin = free[here]
            cause[op] = on_device[here]
        end = begin + longer(time[op * num_devices + here], extra, op)
        free[here] = end
        on_device[here] = op
        if end > latest:
            last = np.int64(op)
            latest = end
        targets = ZERO
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            targets |= ONE << np.uint64(device[next_op[edge]])
        arrives[here] = end
        left = targets & ~(ONE << np.uint64(here))
        cross(busy, layout, device, op, here, left, extra, free, here)
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            bus = layout.bus[here * num_devices + there]
            start = end
            if bus_free[bus] > end:
                start = bus_free[bus]
                late[op] = on_bus[bus]
            takes = latency[here * num_devices + there]
            takes += output[op] * seconds_per_byte[here * num_devices + there]
            bus_free[bus] = start + takes
            on_bus[bus] = op
            arrives[there] = start + takes
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            consumer = next_op[edge]
            arrival = arrives[device[consumer]]
            if arrival >= ready[consumer]:
                ready[consumer] = arrival
                after[consumer] = op
    return cause, late, last
