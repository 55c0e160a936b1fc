"""The lines of several devices in one order, for one launcher that has a CPU and its GPUs.

`device_code.py` calls `merged`, and `run.py` asks `has_time` first. A launcher of a GPU and a
thread that computes on the CPU share Python's lock: each waits for the other. One thread for both
waits for nobody. Its price: it launches nothing while an op runs on the CPU. So before such an op
it launches all ops of GPUs that will begin before that op ends, by the simulated timeline. A CPU
that is busy for most of a step has too little time left for the GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from roost.core.arrays import Array
from roost.core.timeline import HOME, Timeline
from roost.runtime.ops.lines import Key, Line

# Seconds that the launcher is busy, seen beside an H200: to launch an op, to send and receive a
# tensor, to send a new value home.
_LAUNCH = 10e-6
_CROSSING = 40e-6
_HOME = 100e-6
# Share of a simulated step that one thread may be busy. A step of GPT-2 in which it was to be busy
# for 0.97 took 1.42 of the simulated time, and another with two threads 1.23: everything waits for
# an op that takes longer than expected.
_BUSY = 0.6


def has_time(timeline: Timeline, launched_ahead: Collection[int]) -> bool:
    """Tell if one thread can do the work of all launchers in a simulated step, with spare time."""
    assert timeline.device is not None
    assert timeline.transfers is not None
    ahead = np.isin(np.arange(len(timeline.device_names)), list(launched_ahead))
    homes = int((timeline.transfers.kind == HOME).sum())
    takes = float(timeline.busy[~ahead].sum()) + _LAUNCH * int(ahead[timeline.device].sum())
    takes += _CROSSING * (len(timeline.transfers) - homes) + _HOME * homes
    return takes <= _BUSY * timeline.step_time


def merged(
    rows: Mapping[int, Sequence[Line]],  # [devices]
    launched_ahead: Collection[int],  # devices that work later than they are called
    start: Array,  # [ops] seconds
    finish: Array,  # [ops] seconds
) -> list[Line]:
    """Merge the lines of all devices; each device keeps its order, and no line comes too early."""
    begin = {device: _due(row, start) for device, row in rows.items()}
    end = {device: _due(row, finish) for device, row in rows.items()}
    at = {device: 0 for device, row in rows.items() if row}  # the next line of each device
    given: Counter[Key] = Counter()
    order: list[Line] = []
    while at:
        ready = [device for device in at if _can_run(rows[device][at[device]], given)]
        assert ready, "an order of all ops is known in which each has its inputs"
        ends = [end[device][at[device]] for device in ready if device not in launched_ahead]
        done = min(ends, default=float("inf"))

        def urgency(device: int, done: float = done) -> tuple[bool, bool, float]:
            ahead = device in launched_ahead
            begins = begin[device][at[device]]
            return not ahead or begins >= done, ahead, begins

        device = min(ready, key=urgency)
        line = rows[device][at[device]]
        order.append(line)
        given.update(line.gives)
        at[device] += 1
        if at[device] == len(rows[device]):
            del at[device]
    return order


def _due(row: Sequence[Line], seconds: Array) -> list[float]:
    """Give when each line is due: no later than any line after it, such as the op of a fetch."""
    due = accumulate((float(seconds[line.op]) for line in reversed(row)), min)
    return list(due)[::-1]


def _can_run(line: Line, given: Counter[Key]) -> bool:
    return all(given[key] >= count for key, count in line.needs)
