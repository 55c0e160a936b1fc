"""One pass for placements with a fixed order whose buses each have one sender and that fetch
nothing.

Each bus then carries its transfers in the order in which its sender's ops finish, which is dispatch
order. So no clock is needed: visit the ops in dispatch order, and push the time of each output on
to its consumers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, lowest_bit, send
from roost.simulator.kernels.busy import cross, longer, nothing_yet


def _build(with_memory: bool) -> Any:
    """The pass with or without memory; two compiled functions from one text."""

    def push(layout, device, ready, dying, free, bus_free, arrives, last, held, peak, moves):
        """The step time and the number of transfers.

        `ready` and `dying` [ops] must be zero, and are left so. `held` [devices] is what is always
        held, and is overwritten; `peak` [devices] is written. The others are scratch, and `moves`
        is not used.
        """
        time = layout.time
        next_start = layout.next_start
        next_op = layout.next
        output = layout.output
        workspace = layout.workspace
        device_gap = layout.device_gap
        copies_count = layout.copies_in_memory
        num_devices = np.uintp(layout.num_devices)
        busy = layout.busy
        extra = nothing_yet(busy, len(device))
        step_time = 0.0
        num_transfers = 0
        for d in range(num_devices):
            free[d] = 0.0
            if with_memory:
                peak[d] = held[d]
        for b in range(np.uintp(len(bus_free))):
            bus_free[b] = 0.0
        first = np.uintp(next_start[0])
        for op in range(np.uintp(len(device))):
            here = np.uintp(device[op])
            beyond = np.uintp(next_start[op + np.uintp(1)])
            begin = ready[op]
            idle = free[here]
            begin = begin if begin > idle else idle
            ready[op] = 0.0
            takes = longer(time[op * num_devices + here], extra, op)
            end = begin + takes
            free[here] = end + device_gap[here] if takes > 0.0 else end
            step_time = end if end > step_time else step_time
            targets = ZERO
            for edge in range(first, beyond):
                there = np.uintp(device[next_op[edge]])
                targets |= ONE << there
                if with_memory:
                    last[there] = next_op[edge]
            remote = targets & ~(ONE << here)
            if with_memory:
                size = output[op]
                held[here] += size
                most = held[here] + workspace[op]
                if most > peak[here]:
                    peak[here] = most
                gone = dying[op]
                dying[op] = 0
                if targets & (ONE << here):
                    dying[last[here]] += size
                else:
                    gone += size
                held[here] -= gone
            if remote == ZERO:
                for edge in range(first, beyond):
                    consumer = np.uintp(next_op[edge])
                    if end > ready[consumer]:
                        ready[consumer] = end
            else:
                arrives[here] = end
                cross(busy, layout, device, op, here, remote, extra, free, here)
                num_transfers = send(
                    layout, op, here, remote, end, bus_free, arrives, moves, num_transfers, False
                )
                left = remote
                while left != ZERO:
                    there = lowest_bit(left)
                    left &= left - ONE
                    if with_memory and copies_count:
                        held[there] += size
                        if held[there] > peak[there]:
                            peak[there] = held[there]
                        dying[last[there]] += size
                for edge in range(first, beyond):
                    consumer = np.uintp(next_op[edge])
                    arrival = arrives[device[consumer]]
                    if arrival > ready[consumer]:
                        ready[consumer] = arrival
            first = beyond
        return step_time, num_transfers

    return compiled(push)


push_times = _build(with_memory=False)
push = _build(with_memory=True)
