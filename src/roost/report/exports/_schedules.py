"""Schedules of pipelines: the order of forward and backward work on each stage, and its name.

- GPipe (Huang et al. 2019): all forward work, then all backward work.
- 1F1B (PipeDream-flush, Narayanan et al. 2021): a stage with D - 1 stages after it begins D
  microbatches, then takes one backward and one forward in turn.
- Interleaved 1F1B (Narayanan et al. 2021): each device has several stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD
from roost.core.timeline import Timeline

GPIPE, ONE_F_ONE_B = "GPipe", "1F1B"
INTERLEAVED, BREADTH_FIRST = "Interleaved1F1B", "LoopedBFS"  # several stages on each device

Work = tuple[int, int]  # phase and microbatch
_SECONDS = {FORWARD: 1.0, BACKWARD: 2.0}  # of a stage, relative


def in_flight(step: Timeline, devices: Sequence[int], copy: Array, phase: Array) -> list[int]:
    """The most microbatches of which each device has begun forward and not ended backward."""
    assert step.start is not None
    assert step.finish is not None
    assert step.device is not None
    most = []
    timed = (step.finish > step.start) & (copy >= 0)
    for device in devices:
        here = timed & (step.device == device)
        begins = _least(step.start, here & (phase == FORWARD), copy)
        ends = -_least(-step.finish, here & (phase == BACKWARD), copy)
        order = np.sort(begins[np.isfinite(begins)])
        done = np.sort(ends[np.isfinite(ends)])
        held = np.arange(1, len(order) + 1) - np.searchsorted(done, order, side="right")
        most.append(int(held.max(initial=0)))
    return most


def _least(values: Array, chosen: Array, copy: Array) -> Array:  # [microbatches]
    least = np.full(int(copy.max()) + 1, np.inf)
    np.minimum.at(least, copy[chosen], values[chosen])
    return least


def schedule_of(held: Sequence[int], count: int, trains: bool, chunks: int) -> str:
    """The name of the schedule that is nearest to so many microbatches under way."""
    all_at_once = not trains or (held[-1] == count and count > 1)
    if chunks > 1:
        return BREADTH_FIRST if all_at_once else INTERLEAVED
    return GPIPE if all_at_once or count == 1 else ONE_F_ONE_B


def sequence(schedule: str, stage: int, stages: int, count: int, trains: bool) -> list[Work]:
    """The work of one stage, in order."""
    forward = [(FORWARD, number) for number in range(count)]
    backward = [(BACKWARD, number) for number in range(count)] if trains else []
    if schedule != ONE_F_ONE_B or not trains:
        return [*forward, *backward]
    first = min(count, stages - stage)
    work: list[Work] = forward[:first]
    for number in range(count):
        work.append(backward[number])
        work += forward[first + number : first + number + 1]
    return work


def slots(schedule: str, stages: int, count: int, trains: bool) -> dict[tuple[int, Work], float]:
    """When each stage begins each work, if stages are alike and backward takes twice as long."""
    left = [sequence(schedule, stage, stages, count, trains) for stage in range(stages)]
    free = [0.0] * stages
    begins: dict[tuple[int, Work], float] = {}
    while any(left):
        for stage, work in enumerate(left):
            while work and (ready := _ready(begins, stage, work[0], stages)) is not None:
                each = work.pop(0)
                begins[stage, each] = max(free[stage], ready)
                free[stage] = begins[stage, each] + _SECONDS[each[0]]
    return begins


def _ready(
    begins: dict[tuple[int, Work], float], stage: int, work: Work, stages: int
) -> float | None:
    """When what a work waits for is done; None while that is not known."""
    phase, _ = work
    before = stage - 1 if phase == FORWARD else stage + 1
    if not 0 <= before < stages:
        return 0.0
    begun = begins.get((before, work))
    return None if begun is None else begun + _SECONDS[phase]
