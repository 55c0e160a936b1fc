"""One placement in any order, without laying the problem out anew: what a search over orders needs.

As `push`, but ops are numbered in program order and visited in another. Nothing is fetched; buses
that several devices share are taken in the order of the visit.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, lowest_bit, new_moves, send
from roost.simulator.kernels.busy import cross_in_turn, longer, nothing_yet


@compiled
def order_of(layout, urgency, order):
    """Write positions by urgency, highest first, then program order, into `order`.

    `urgency` [positions] is overwritten.
    """
    rewritten = np.full(len(layout.parameter_op), -np.inf)
    for op in range(len(urgency) - 1, -1, -1):
        for number in range(layout.use_start[op], layout.use_start[op + 1]):
            parameter = layout.use[number]
            if layout.is_update[op]:
                rewritten[parameter] = max(rewritten[parameter], urgency[op])
            else:
                urgency[op] = max(urgency[op], rewritten[parameter])
        for edge in range(layout.previous_start[op], layout.previous_start[op + 1]):
            before = layout.previous[edge]
            if urgency[before] < urgency[op]:
                urgency[before] = urgency[op]
        urgency[op] = -urgency[op]
    order[:] = np.argsort(urgency, kind="mergesort")


@compiled
def push_in_order(layout, order, turn_of, device, ready, dying, held, peak):
    """The step time; `peak` [devices] is written.

    `order` are positions in the order of the visit, and `turn_of` says when each is visited.
    `ready` and `dying` [positions] must be zero, and are left so. `held` [devices] is what is
    always held, and is overwritten.
    """
    time = layout.time
    next_start = layout.next_start
    next_op = layout.next
    output = layout.output
    workspace = layout.workspace
    device_gap = layout.device_gap
    copies_count = layout.copies_in_memory
    num_devices = np.uintp(layout.num_devices)
    free = np.zeros(64)
    bus_free = np.zeros(len(layout.bus_gap))
    arrives = np.zeros(64)
    last = np.zeros(64, np.uint32)
    last_turn = np.zeros(64, np.int64)
    busy = layout.busy
    moves = new_moves(0)
    extra = nothing_yet(busy, len(order))
    step_time = 0.0
    for d in range(num_devices):
        peak[d] = held[d]
    for visit in range(len(order)):
        op = np.uintp(order[visit])
        here = np.uintp(device[op])
        begin = ready[op] if ready[op] > free[here] else free[here]
        ready[op] = 0.0
        takes = longer(time[op * num_devices + here], extra, op)
        end = begin + takes
        free[here] = end + device_gap[here] if takes > 0.0 else end
        step_time = end if end > step_time else step_time
        targets = ZERO
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            consumer = next_op[edge]
            there = np.uint64(device[consumer])
            if targets & (ONE << there) == ZERO or turn_of[consumer] > last_turn[there]:
                last[there] = consumer
                last_turn[there] = turn_of[consumer]
            targets |= ONE << there
        remote = targets & ~(ONE << np.uint64(here))
        size = output[op]
        held[here] += size
        most = held[here] + workspace[op]
        peak[here] = most if most > peak[here] else peak[here]
        gone = dying[op]
        dying[op] = 0
        if targets & (ONE << np.uint64(here)):
            dying[last[here]] += size
        else:
            gone += size
        held[here] -= gone
        arrives[here] = end
        if remote != ZERO:
            cross_in_turn(busy, layout, turn_of, device, op, here, remote, extra, free, here)
            send(layout, op, here, remote, end, bus_free, arrives, moves, 0, False)
            left = remote
            while left != ZERO and copies_count:
                there = lowest_bit(left)
                left &= left - ONE
                held[there] += size
                peak[there] = held[there] if held[there] > peak[there] else peak[there]
                dying[last[there]] += size
        for edge in range(next_start[op], next_start[op + np.uintp(1)]):
            consumer = next_op[edge]
            arrival = arrives[device[consumer]]
            if arrival > ready[consumer]:
                ready[consumer] = arrival
    return step_time
