"""Throughput of a placement of requests under way: period, latency, and a bound on the period.

The placement is of `count` requests of one graph, unrolled by `transforms/microbatch.py`. The
period is what the same requests take when they come again and again:

1. Simulate the placement. Each device has its order of ops; T is the step time.
2. Simulate it with as many requests again, each placed as the one before it. Each device does all
   of the first requests, then all of the second, in that order. A request of the second half begins
   when its forerunner has ended, so no more than `count` are under way. T2 is this step time.
3. The period is (T2 - T) / `count`: filling and draining the devices count for nothing.

The slope of the ends in one timeline would not do: four requests on a device each end at one
moment, and the slope is 0. Two limits hold in any case, and the period is kept between them:
the load of the busiest device over `count`, as no device is faster, and T / `count`, the period
of doing all requests, then all again. T / `count` is the answer where step 2 does not fit into
memory. Devices that rest after an op rest after the last one too.

The latency of a request is from the start of its first op that takes time to its last end. It is
that of the second half in step 2, with all devices busy; of the only half where that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.bounds.period import period_bound
from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE, Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import Bound
from roost.errors import InputError
from roost.simulator.compiled import simulate
from roost.transforms.microbatch import SHARED, Microbatched


@dataclass(frozen=True)
class Throughput:
    """Seconds between the ends of requests and seconds of a request, with `count` under way."""

    count: int
    period: float  # seconds between the ends of two requests
    latency: float  # seconds of a request, the median
    longest_latency: float  # seconds
    bound: Bound  # on the period

    @property
    def per_second(self) -> float:
        """Requests that end in a second."""
        return 1.0 / self.period if self.period > 0 else float("inf")

    @property
    def gap(self) -> float:
        """The share of the period above the bound."""
        return 1.0 - self.bound.step_time / self.period if self.period > 0 else 0.0


def throughput(made: Microbatched, problem: Problem, placement: Placement) -> Throughput:
    """The throughput of a placement of the unrolled graph `made.graph`, of which `problem` is.

    Raises InputError for a training step, and for a problem of another graph.
    """
    _check(made, problem)
    placement = problem.check(placement)
    step = simulate(problem, placement, full=True)
    count = made.count
    of_one = _problem_of_one(made, problem)
    repeated, copies = _repeated(made, of_one, step, placement)
    latencies = _latencies(step, made.copy, range(count))
    period = (step.step_time + _rest(problem)) / count
    if repeated.feasible or not step.feasible:
        latencies = _latencies(repeated, copies, range(count, 2 * count))
        least = _greatest_load(problem, step)
        period = min(period, max(least, repeated.step_time - step.step_time) / count)
    median = float(np.median(latencies))
    return Throughput(count, period, median, max(latencies), period_bound(of_one, count))


def _check(made: Microbatched, problem: Problem) -> None:
    if problem.graph.digest != made.graph.digest:
        raise InputError(
            f"the problem is of graph {problem.graph.digest}, not of the unrolled graph "
            f"{made.graph.digest}"
        )
    trained = np.flatnonzero(np.isin(made.original.phase, (BACKWARD, UPDATE)))
    if len(trained):
        raise InputError(
            f"op {made.original.op_names[int(trained[0])]!r} belongs to a training step; requests "
            "are for inference"
        )


def _rest(problem: Problem) -> float:
    """Seconds after a step until every device and bus can begin the next."""
    cluster = problem.cluster
    return float(max(cluster.device_gap.max(), cluster.bus_gap.max()) + cluster.sender_busy.max())


def _greatest_load(problem: Problem, step: Timeline) -> float:
    """Seconds that the busiest device computes, or rests after an op."""
    assert step.device is not None
    assert step.start is not None
    assert step.finish is not None
    timed = np.bincount(step.device, step.finish > step.start, problem.cluster.num_devices)
    return float((step.busy + timed * problem.cluster.device_gap).max())


def _problem_of_one(made: Microbatched, problem: Problem) -> Problem:
    """The problem of one request, with the times that its copies have."""
    _, first = np.unique(made.origin, return_index=True)
    times: Any = problem.op_time[first]
    return Problem(made.original, problem.cluster, times)


def _latencies(step: Timeline, copy: Array, wanted: range) -> list[float]:
    """Seconds from the first op of each copy that takes time to its last end."""
    assert step.start is not None
    assert step.finish is not None
    timed = step.finish > step.start
    found = []
    for number in wanted:
        ops = np.flatnonzero((copy == number) & timed)
        found.append(float(step.finish[ops].max() - step.start[ops].min()) if len(ops) else 0.0)
    return found


def _repeated(
    made: Microbatched, of_one: Problem, step: Timeline, placement: Placement
) -> tuple[Timeline, Array]:
    """The full timeline of twice the requests, and the copy of each of its ops."""
    count = made.count
    twice = replace(made.settings, count=2 * count, batch_statistics=True).apply(made.original)
    key = made.origin * (count + 1) + made.copy + 1
    before = np.where(twice.copy == SHARED, SHARED, twice.copy % count)
    order = np.argsort(key)
    same = order[np.searchsorted(key[order], twice.origin * (count + 1) + before + 1)]
    graph, old = _admitting(twice, _last_of_each(step, made), same)
    from_twice = old >= 0
    doer = np.where(from_twice, old, 0)
    op_time = np.where(from_twice[:, None], of_one.op_time[twice.origin[doer]], 0.0)
    copy = np.where(from_twice, twice.copy[doer], SHARED)
    device = placement.device[same][doer]
    priority = -_positions(step)[same][doer]
    priority[copy >= count] -= made.graph.num_ops
    for op in np.flatnonzero(~from_twice).tolist():
        ended = int(graph.inputs_of(op)[0])
        device[op] = device[ended]
        priority[op] = priority[ended] - 0.5  # at once, before the next op of its device
    times: Any = op_time
    problem = Problem(graph, of_one.cluster, times)
    again = problem.placement(device, "priority", priority, placement.prefetch_bytes)
    return simulate(problem, again, full=True), copy


def _positions(step: Timeline) -> Array:  # [ops]
    """The place of each op in the order in which ops started."""
    assert step.start is not None
    assert step.finish is not None
    order = np.lexsort((np.arange(len(step.start)), step.finish, step.start))
    position = np.zeros(len(order))
    position[order] = np.arange(len(order))
    return position


def _last_of_each(step: Timeline, made: Microbatched) -> list[int]:
    """The op of each copy that ends last, the later one of equals."""
    assert step.finish is not None
    last = []
    for number in range(made.count):
        ops = np.flatnonzero(made.copy == number)
        last.append(int(ops[np.lexsort((ops, step.finish[ops]))[-1]]))
    return last


def _admitting(twice: Microbatched, last: list[int], same: Array) -> tuple[Graph, Array]:
    """The graph of twice the requests, where each of the second half waits for its forerunner.

    An op without time or bytes tells that a request has ended. The array has the op of `twice` for
    each op, or -1 for those.
    """
    graph = twice.graph
    count = len(last)
    cut = int(np.flatnonzero(twice.copy == count)[0])
    at = {int(old): new for new, old in enumerate(same.tolist()) if new < cut}
    old = np.concatenate([np.arange(cut), np.full(count, -1), np.arange(cut, graph.num_ops)])
    inputs: list[list[int]] = []
    sources = graph.input_lists()
    for new, op in enumerate(old.tolist()):
        if op < 0:
            inputs.append([at[last[new - cut]]])
            continue
        own = int(twice.copy[op])
        row = [source + (count if source >= cut else 0) for source in sources[op]]
        if own >= count and not any(twice.copy[source] == own for source in sources[op]):
            row.append(cut + own - count)
        inputs.append(row)
    return _with_rows(graph, old, inputs), old


def _with_rows(graph: Graph, old: Array, inputs: list[list[int]]) -> Graph:
    """A graph whose ops have the columns of these ops; those of -1 take and hold nothing."""
    added = old < 0
    rows = np.where(added, 0, old)
    columns: dict[str, Any] = {}
    for column in ("kinds", "dtypes", "modules"):
        values = getattr(graph, column)
        columns[column] = ["end" if op < 0 else values[op] for op in old.tolist()]
    for column in ("flop", "bytes_read", "bytes_written", "output_bytes", "workspace_bytes"):
        columns[column] = np.where(added, 0, getattr(graph, column)[rows])
    return Graph(
        name=graph.name,
        op_names=tuple(
            f"#end{new}" if op < 0 else graph.op_names[op] for new, op in enumerate(old.tolist())
        ),
        allowed=tuple(() if op < 0 else graph.allowed[op] for op in old.tolist()),
        phase=np.where(added, FORWARD, graph.phase[rows]),
        group=np.where(added, -1, graph.group[rows]),
        group_names=graph.group_names,
        input_start=np.cumsum([0, *map(len, inputs)]),
        input_op=np.array([op for row in inputs for op in row], dtype=np.int32),
        **columns,
    )
