"""The memory that a step holds, device by device.

Always there: the parameters that live on the device, and the window for those it fetches. Then each
output, from the start of its op until its last consumer there has finished and it has been sent;
each received copy, from its sending until its last consumer has finished; and the workspace of the
running op. An output that nobody consumes is given back when its op has finished.

With a fixed order (`program`, `rank`, `priority`) this is accounted in dispatch order, as one
process with a stream-ordered allocator sees it: memory is taken and given back when ops are
dispatched, whatever the clocks say. With `fifo` there is no such order, and it is accounted in
time; a span holds from its start up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import SEND, MemoryTrack, Transfers


def always_held(problem: Problem, placement: Placement, window: Sequence[int]) -> list[int]:
    """Bytes held on each device for the whole step: parameters and windows."""
    held = list(window)
    for op in np.flatnonzero(problem.graph.is_parameter).tolist():
        held[int(placement.device[op])] += int(problem.graph.output_bytes[op])
    return held


def in_dispatch_order(
    problem: Problem,
    placement: Placement,
    order: Sequence[int],
    window: Sequence[int],
    start: Array,
    finish: Array,
    transfers: Transfers,
) -> tuple[MemoryTrack, Array]:
    """The memory of a step with a fixed order, and its peak on each device."""
    graph = problem.graph
    device = placement.device.tolist()
    output = graph.output_bytes.tolist()
    workspace = graph.workspace_bytes.tolist()
    consumers = graph.consumer_lists()
    starts = start.tolist()
    finishes = finish.tolist()
    copies_count = problem.cluster.copies_in_memory
    position = {op: number for number, op in enumerate(order)}
    held = always_held(problem, placement, window)
    track = [(d, 0.0, held[d]) for d in range(len(held))]
    clock = [0.0] * len(held)
    dying = [0] * graph.num_ops  # bytes given back once this op has been dispatched

    def change(d: int, size: int, time: float) -> None:
        held[d] += size
        clock[d] = max(clock[d], time)  # the allocator's order, not the clocks', decides
        track.append((d, clock[d], held[d]))

    for op in order:
        here = device[op]
        last = {here: op}  # the last op that needs the output, on each device that does
        for consumer in sorted(consumers[op], key=position.__getitem__):
            last[device[consumer]] = consumer
        change(here, output[op] + workspace[op], starts[op])
        for d in sorted(last):
            if d == here or copies_count:
                dying[last[d]] += output[op]
            if d != here and copies_count:
                change(d, output[op], finishes[op])
        change(here, -workspace[op] - dying[op], finishes[op])
    return _packed(track, len(held))


def in_time_order(
    problem: Problem,
    placement: Placement,
    order: Sequence[int],
    window: Sequence[int],
    start: Array,
    finish: Array,
    transfers: Transfers,
) -> tuple[MemoryTrack, Array]:
    """The memory of a step whose order is found as it runs, and its peak on each device."""
    graph = problem.graph
    device = placement.device.tolist()
    output = graph.output_bytes.tolist()
    workspace = graph.workspace_bytes.tolist()
    consumers = graph.consumer_lists()
    starts = start.tolist()
    finishes = finish.tolist()
    held = always_held(problem, placement, window)
    until = {(op, device[op]): finishes[op] for op in order}
    for op in order:
        for consumer in consumers[op]:
            key = (op, device[consumer])
            until[key] = max(until.get(key, 0.0), finishes[consumer])
    spans = [(device[op], starts[op], finishes[op], workspace[op]) for op in order]
    moves = (transfers.kind, transfers.tensor, transfers.target, transfers.start, transfers.finish)
    for kind, op, target, begins, ends in zip(*(column.tolist() for column in moves), strict=True):
        if kind == SEND:
            until[op, device[op]] = max(until[op, device[op]], ends)
            if problem.cluster.copies_in_memory:
                spans.append((target, begins, until[op, target], output[op]))
    spans.extend((device[op], starts[op], until[op, device[op]], output[op]) for op in order)
    # What starts and ends at once is never held.
    spans = [span for span in spans if span[1] < span[2]]
    events = [
        (time, sign * size, d)
        for d, begins, ends, size in spans
        for time, sign in ((begins, 1), (ends, -1))
    ]
    track = [(d, 0.0, held[d]) for d in range(len(held))]
    # Given back before taken.
    for time, size, d in sorted(events, key=lambda event: (event[0], event[1] > 0)):
        held[d] += size
        track.append((d, time, held[d]))
    return _packed(track, len(held))


def _packed(track: list[tuple[int, float, int]], num_devices: int) -> tuple[MemoryTrack, Array]:
    device, time, held = (np.array(column) for column in zip(*track, strict=True))
    peak = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(peak, device, held)
    return MemoryTrack(device.astype(np.int32), time.astype(float), held.astype(np.int64)), peak
