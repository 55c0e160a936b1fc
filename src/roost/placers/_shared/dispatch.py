"""List scheduling for given devices: a free device begins the most urgent op that is ready."""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, new_moves, send
from roost.simulator.kernels.busy import busy_after, crossings, longer
from roost.simulator.kernels.heap import heap_pop, heap_push


@compiled
def dispatch(layout, device, urgency, begun):
    """Write positions of ops, in the order they begin, into `begun` [ops]; returns the step time.

    Buses are taken in the order of the loop, nothing is fetched, and gaps of devices do not count:
    order and seconds are good, if not always exact.
    """
    num_ops = len(device)
    num_devices = layout.num_devices
    time = layout.time
    next_start = layout.next_start
    next_op = layout.next
    waiting = layout.num_inputs.copy()
    ready = np.zeros(num_ops)
    free = np.zeros(64)
    bus_free = np.zeros(len(layout.bus_gap))
    arrives = np.zeros(64)
    moves = new_moves(0)
    extra, after = crossings(layout.busy, layout, device)
    first = np.zeros(num_devices + 1, np.int64)  # heaps of device d are at first[d]:first[d + 1]
    for op in range(num_ops):
        first[device[op] + 1] += 1
    for d in range(num_devices):
        first[d + 1] += first[d]
    # By the time they become ready.
    later_time = np.empty(num_ops)
    later_op = np.empty(num_ops, np.uint32)
    ready_key, ready_op = np.empty(num_ops), np.empty(num_ops, np.uint32)  # by urgency
    num_later = np.zeros(num_devices, np.int64)
    num_ready = np.zeros(num_devices, np.int64)
    for op in range(num_ops):
        if waiting[op] == 0:
            d = device[op]
            heap_push(
                later_time[first[d] :], later_op[first[d] :], num_later[d], 0.0, np.uint32(op)
            )
            num_later[d] += 1
    last = 0.0
    for turn in range(num_ops):
        here = -1
        begin = np.inf
        for d in range(num_devices):
            if num_ready[d] > 0:
                at = free[d]
            elif num_later[d] > 0:
                at = max(free[d], later_time[first[d]])
            else:
                continue
            if at < begin:
                here = d
                begin = at
        low = first[here]
        while num_later[here] > 0 and later_time[low] <= begin:
            op = later_op[low]
            heap_pop(later_time[low:], later_op[low:], num_later[here])
            num_later[here] -= 1
            heap_push(ready_key[low:], ready_op[low:], num_ready[here], -urgency[op], op)
            num_ready[here] += 1
        op = np.uintp(ready_op[low])
        heap_pop(ready_key[low:], ready_op[low:], num_ready[here])
        num_ready[here] -= 1
        begun[turn] = op
        end = begin + longer(time[op * np.uintp(num_devices) + np.uintp(here)], extra, op)
        free[here] = busy_after(end, after, op)
        last = max(last, end)
        targets = ZERO
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            targets |= ONE << np.uint64(device[next_op[edge]])
        remote = targets & ~(ONE << np.uint64(here))
        arrives[here] = end
        if remote != ZERO:
            send(layout, op, np.uintp(here), remote, end, bus_free, arrives, moves, 0, False)
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            consumer = next_op[edge]
            arrival = arrives[device[consumer]]
            if arrival > ready[consumer]:
                ready[consumer] = arrival
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                d = device[consumer]
                heap_push(
                    later_time[first[d] :],
                    later_op[first[d] :],
                    num_later[d],
                    ready[consumer],
                    np.uint32(consumer),
                )
                num_later[d] += 1
    return last
