"""Sketches: layouts and schedules of a step for a number of microbatches, the best first.

Their seconds are estimates, made without unrolling anything: the schedule of the tasks, and what
devices wait for the busiest bus. So the sketches of many numbers of microbatches can be
compared before the first graph is unrolled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.placers import Evaluate
from roost.placers._microbatches.bus_load import with_buses
from roost.placers._microbatches.copied_step import CopiedStep
from roost.placers._microbatches.layouts import CopyLayout, Replica, balanced, replicated, whole
from roost.placers._microbatches.realised import (
    devices_of,
    realised,
    realised_again,
    with_smaller_windows,
)
from roost.placers._microbatches.task_schedule import SCHEDULES, TaskSchedule, scheduled
from roost.placers._splits.unit_graph import accelerators

PIPELINE, DATA_PARALLEL, HYBRID, OFFLOAD = "pipeline", "data_parallel", "hybrid", "offload"
FAMILIES = (DATA_PARALLEL, HYBRID, PIPELINE, OFFLOAD)
_MOST_CHUNKS = 4  # of one device
_ATTEMPTS = 3  # with smaller windows, where memory is missing


@dataclass(frozen=True, eq=False)
class Sketch:
    """A layout with a schedule, and an estimate of its step."""

    family: str  # one of FAMILIES
    count: int  # microbatches
    schedule: TaskSchedule
    seconds: float  # estimated

    @property
    def layout(self) -> CopyLayout:
        return self.schedule.layout

    def devices(self, problem: Problem) -> Array:  # [ops]
        """The device of each op of an unrolled problem."""
        return devices_of(CopiedStep.of(problem), self.layout)


def sketches(
    step: CopiedStep,
    count: int,
    families: Sequence[str] = FAMILIES,
    schedules: Sequence[str] = SCHEDULES,
) -> list[Sketch]:
    """The sketches of some families, the shortest first; each layout once."""
    found: dict[tuple[CopyLayout, str], Sketch] = {}
    for family in families:
        for layout in _with_homes(step, _layouts(step, count, family)):
            pipelined = layout.num_chunks > 1
            for name in schedules if pipelined else schedules[:1]:
                # Of the two places for readers of a tied weight only the better one is kept.
                key = replace(layout, readers_together=False), name
                if key in found and not pipelined:
                    continue
                schedule = scheduled(step, layout, name)
                seconds = with_buses(step, layout, schedule.seconds)
                if key not in found or seconds < found[key].seconds:
                    found[key] = Sketch(family, count, schedule, seconds)
    return sorted(found.values(), key=lambda each: each.seconds)


def _layouts(step: CopiedStep, count: int, family: str) -> Iterator[CopyLayout]:
    fast = accelerators(step.problem)
    if family == DATA_PARALLEL:
        every = list(range(step.problem.cluster.num_devices))
        for devices in [fast] if len(fast) == len(every) else [fast, every]:
            yield replicated(step, [whole(step, device) for device in devices], count)
    elif family == PIPELINE:
        for devices in _orders(step.problem, fast):
            for chunks in _numbers_of_chunks(count):
                yield CopyLayout((_chain(step, devices, chunks, count),), (0,) * count)
    elif family == OFFLOAD:
        host = _host(step.problem, fast)
        for devices in [fast[:1], fast] if len(fast) > 1 else [fast]:
            if host is not None:
                rows = [whole(step, device) for device in devices]
                layout = replace(replicated(step, rows, count), host=host)
                yield layout
                yield replace(layout, sums_at_host=True)
    else:
        for size in range(2, len(fast)):
            if len(fast) % size == 0:
                for chains in _groups(step.problem, fast, size):
                    for chunks in _numbers_of_chunks(count)[:2]:
                        rows = [_chain(step, each, chunks, count, len(chains)) for each in chains]
                        yield replicated(step, rows, count)


def _host(problem: Problem, fast: Sequence[int]) -> int | None:
    """The CPU with most memory that is no accelerator itself."""
    devices = problem.cluster.devices
    cpus = [d for d in range(len(devices)) if devices[d].kind == "cpu" and d not in fast]
    return max(cpus, key=lambda d: devices[d].memory, default=None)


def _with_homes(step: CopiedStep, layouts: Iterable[CopyLayout]) -> Iterator[CopyLayout]:
    """The layouts, and variants with weights in other places; first what saves copies."""
    for layout in layouts:
        if layout.num_chunks > 1 and step.tied_weights:
            yield replace(layout, readers_together=True)
        yield layout
        if layout.host is None and len({len(copies) for copies in layout.copies}) > 1:
            yield replace(layout, gathered=True)


def _numbers_of_chunks(count: int) -> list[int]:
    """Chunks for each device: several only pay with several microbatches."""
    return [number for number in (1, 2, _MOST_CHUNKS) if number <= max(1, count // 2)]


def _chain(
    step: CopiedStep, devices: Sequence[int], chunks: int, count: int, replicas: int = 1
) -> Replica:
    """The chain cut for devices in turn; activations as an early backward pass leaves them."""
    depth = len(devices)
    held = [min(count, depth - place) for place in range(depth)]
    # Each replica has its share of the copies, and of a bus that all of them may need.
    copies = count / replicas**2
    return balanced(step, list(devices) * chunks, held * chunks, copies)


def _orders(problem: Problem, devices: Sequence[int]) -> list[list[int]]:
    """Devices in their own order, the fastest first, and the fastest last."""
    seconds = np.where(problem.allowed, problem.op_time, 0.0).sum(axis=0)
    by_speed = sorted(devices, key=lambda device: (seconds[device], device))
    orders = [list(devices), by_speed, by_speed[::-1]]
    alike = len({float(seconds[device]) for device in devices}) == 1
    return orders[:1] if alike else [list(row) for row in dict.fromkeys(map(tuple, orders))]


def _groups(problem: Problem, devices: Sequence[int], size: int) -> Iterator[list[list[int]]]:
    """Chains of `size` devices: a chunk of all replicas on neighbours, or a replica on them.

    Where all are alike and links between them too, the two are one.
    """
    number = len(devices) // size
    yield [[devices[place * number + row] for place in range(size)] for row in range(number)]
    rate = problem.cluster.sent_seconds_per_byte[np.ix_(devices, devices)]
    seconds = np.where(problem.allowed, problem.op_time, 0.0)[:, devices].sum(axis=0)
    one_rate = len(set(rate[~np.eye(len(devices), dtype=bool)].tolist())) == 1
    if not (one_rate and len(set(seconds.tolist())) == 1):
        yield [list(devices[row * size : (row + 1) * size]) for row in range(number)]


def sketch_trial(problem: Problem, sketch: Sketch, evaluate: Evaluate) -> Trial:
    """The best trial of a sketch: in the order of its schedule, or as devices become free."""
    step = CopiedStep.of(problem)
    placement = realised(step, sketch.schedule)
    trials = evaluate([placement, realised_again(problem, placement)])
    for _ in range(_ATTEMPTS):
        best = best_of(trials)
        if best.feasible or not np.any(best.placement.prefetch_bytes):
            break
        missing = np.maximum(best.peak_memory - problem.cluster.memory, 0)
        trials += evaluate([with_smaller_windows(best.placement, missing)])
    return best_of(trials)
