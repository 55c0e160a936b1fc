"""The lines of all devices in one order, for a host that is one thread.

A thread that tells a GPU what to do and a thread that computes on the CPU share one interpreter:
whoever needs its lock waits for the other. One thread for both has nobody to wait for. What it
loses is that nothing is launched while an op runs on the CPU; so before such an op the devices that
are told ahead of time are told all that they will begin before it ends, as the simulator has it.
And where the CPU is busy much of the time, it has too little left for the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from roost.core.arrays import Array
from roost.core.timeline import HOME, Timeline
from roost.runtime.ops.lines import Key, Line

# Seconds of Python, with what it calls, as seen beside an H200: to launch an op, to have a tensor
# cross (what the host does on both sides), to send a new value home.
_LAUNCH, _CROSSING, _HOME = 10e-6, 40e-6, 100e-6
# Share of a step, as simulated, that one thread may be busy. A step of GPT-2 for 0.97 of which it
# was to be busy took 1.42 of what was simulated, another with a thread each 1.23: what takes longer
# than expected delays all.
_BUSY = 0.6


def has_time(timeline: Timeline, launched_ahead: Collection[int]) -> bool:
    """Whether one thread can do all that hosts do within a step as it was simulated, and have time
    to spare."""
    assert timeline.device is not None
    assert timeline.transfers is not None
    ahead = np.isin(np.arange(len(timeline.device_names)), list(launched_ahead))
    homes = int((timeline.transfers.kind == HOME).sum())
    takes = float(timeline.busy[~ahead].sum()) + _LAUNCH * int(ahead[timeline.device].sum())
    takes += _CROSSING * (len(timeline.transfers) - homes) + _HOME * homes
    return takes <= _BUSY * timeline.step_time


def merged(
    rows: Mapping[int, Sequence[Line]],  # [devices]
    launched_ahead: Collection[int],  # devices that only have to be told
    start: Array,  # [ops] seconds
    finish: Array,  # [ops] seconds
) -> list[Line]:
    """All lines, those of each device in their order, and none before what it needs was given."""
    begin = {device: _before(row, start) for device, row in rows.items()}
    end = {device: _before(row, finish) for device, row in rows.items()}
    left = {device: 0 for device, row in rows.items() if row}  # where each is
    given: Counter[Key] = Counter()
    found: list[Line] = []
    while left:
        ready = [device for device, at in left.items() if _can(rows[device][at], given)]
        assert ready, "an order of all ops is known in which each has what it needs"
        done = min(
            (end[device][left[device]] for device in ready if device not in launched_ahead),
            default=float("inf"),
        )
        device = min(
            ready,
            key=lambda device: (
                device not in launched_ahead or begin[device][left[device]] >= done,
                device in launched_ahead,
                begin[device][left[device]],
            ),
        )
        line = rows[device][left[device]]
        found.append(line)
        given.update(line.gives)
        left[device] += 1
        if left[device] == len(rows[device]):
            del left[device]
    return found


def _before(row: Sequence[Line], seconds: Array) -> list[float]:
    """When each line is due: no later than any that comes after it, such as an op that a fetch is
    asked for early."""
    due = accumulate((float(seconds[line.op]) for line in reversed(row)), min)
    return list(due)[::-1]


def _can(line: Line, given: Counter[Key]) -> bool:
    return all(given[key] >= count for key, count in line.needs)
