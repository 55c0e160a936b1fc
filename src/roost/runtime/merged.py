"""The lines of several devices in one order, for a host that is one thread.

A thread that tells a GPU what to do and a thread that computes on the CPU share one interpreter: whoever needs its lock
may wait for milliseconds while the other launches op after op. One thread for both has nobody to wait for. What it
loses is that nothing is launched while an op runs on the CPU; so before such an op the devices that are told ahead of
time are told all that they will begin before it ends, as the simulator has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from roost.core.arrays import Array
from roost.runtime._lines import Key, Line


def merged(
    rows: Mapping[int, Sequence[Line]],  # [devices]
    told_ahead: Collection[int],  # devices that only have to be told
    start: Array,  # [ops] seconds
    finish: Array,  # [ops] seconds
) -> list[Line]:
    """All lines, those of each device in their order, and none before what it needs was given."""
    begin = {device: list(accumulate((_of(start, line) for line in row), max)) for device, row in rows.items()}
    end = {device: list(accumulate((_of(finish, line) for line in row), max)) for device, row in rows.items()}
    left = {device: 0 for device, row in rows.items() if row}  # where each is
    given: Counter[Key] = Counter()
    found: list[Line] = []
    while left:
        ready = [device for device, at in left.items() if _can(rows[device][at], given)]
        assert ready, "an order of all ops is known in which each has what it needs"
        done = min((end[device][left[device]] for device in ready if device not in told_ahead), default=float("inf"))
        device = min(
            ready,
            key=lambda device: (
                device not in told_ahead or begin[device][left[device]] >= done,
                device in told_ahead,
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


def _of(seconds: Array, line: Line) -> float:
    return float(seconds[line.op]) if line.op >= 0 else 0.0


def _can(line: Line, given: Counter[Key]) -> bool:
    return all(given[key] >= count for key, count in line.needs)
