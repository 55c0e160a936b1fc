"""The longest way to each op from one end of the step, with transfers, one op at a time on a
device."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import compiled

MOST_SERIAL = 48  # inputs whose work is added up; more cost time and bring nothing


@compiled
def heads(
    order: Array,  # [ops] i8 each after its inputs
    start: Array,  # [ops + 1] i8
    source: Array,  # [edges] i8 the inputs, by the ops that take them
    sent: Array,  # [edges] f8 bytes
    unit: Array,  # [ops] i8
    time: Array,  # [ops, devices] f8, infinite where it may not run
    latency: Array,  # [devices, devices] f8 from, to
    seconds_per_byte: Array,  # [devices, devices] f8
    gap: Array,  # [devices] f8
    backwards: bool,  # time runs backwards: a device rests before an op
    # [ops, devices] f8 given: what is known already; becomes the earliest start on each device.
    found: Array,
) -> None:
    """An op waits for each input: for its transfer, or for all the inputs that run before it on its
    own device.

    Sorted by when their transfers would arrive, some of the first must run on the op's own device,
    one after the other; the op then waits for the transfer of the next one. The best number of them
    counts.
    """
    num_devices = time.shape[1]
    widest = 1
    for op in range(len(order)):
        widest = max(widest, start[op + 1] - start[op])
    arrives = np.empty(widest)
    picked = np.empty(min(widest, MOST_SERIAL), np.int64)
    for op in order:
        first = start[op]
        count = start[op + 1] - start[op]
        for d in range(num_devices):
            if count == 0 or time[op, d] == np.inf:
                continue
            for i in range(count):
                p = source[first + i]
                best = np.inf
                if unit[p] != unit[op]:
                    for e in range(num_devices):
                        if e != d:
                            takes = latency[e, d] + sent[first + i] * seconds_per_byte[e, d]
                            best = min(best, found[p, e] + time[p, e] + takes)
                arrives[i] = best
            known = found[op, d]
            last = np.inf  # bound with the inputs taken so far on this device
            serial = 0.0
            taken = 0
            rest = gap[d] if backwards and time[op, d] == 0 else 0.0
            while True:
                late = -1.0
                late_at = -1
                for i in range(count):
                    if arrives[i] > late:
                        late = arrives[i]
                        late_at = i
                if late_at < 0:
                    last = min(last, serial)
                    break
                last = min(last, max(serial, late))
                if serial >= late or taken == len(picked):
                    last = min(last, max(serial, 0.0))
                    break
                arrives[late_at] = -2.0
                p = source[first + late_at]
                if time[p, d] == np.inf:
                    break  # it cannot run here, so it arrives by a transfer
                # Insert it by its earliest start, the latest first, then add up the work from each
                # start on.
                at = taken
                while at > 0 and found[picked[at - 1], d] < found[p, d]:
                    picked[at] = picked[at - 1]
                    at -= 1
                picked[at] = p
                taken += 1
                work = 0.0
                positive = False
                for k in range(taken):
                    q = picked[k]
                    positive = positive or time[q, d] > 0
                    work += time[q, d] + (gap[d] if time[q, d] > 0 else 0.0)
                    serial = max(serial, found[q, d] + (work - rest if positive else work))
            found[op, d] = max(known, last)
