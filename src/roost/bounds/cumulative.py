"""Steps on devices that are all alike, where no transfer takes time: one resource, not many.

Which of the devices runs an op then makes no difference. So the model only says that no more ops
run at once than there are devices, and the solver need not tell the devices apart. It proves steps
of a hundred ops in a second or two, where the model of `_model.py` proves little.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.bounds.alike import alike
from roost.bounds.heads_tails import Ends
from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.core.timeline import Timeline

_MOST_TICKS = 20_000  # of the longest op; with more the solver proves little
_MOST_PARTS = 64  # ticks in the shortest op
_ROUNDING = 1e-6  # of a tick


@dataclass(frozen=True)
class CumulativeAnswer:
    """What one run of the solver gave."""

    bound: float  # seconds: no step is shorter
    work: float  # that the solver spent, in its own count
    slack: float  # seconds that rounding to ticks may hide
    device: Array | None  # [ops] of the best schedule; None where it has none
    begin: Array | None  # [ops] by which its ops are in order


def applies(problem: Problem) -> bool:
    """Tell whether all devices are alike, transfers are free, and times are multiples of a tick.

    Every op goes anywhere by itself.
    """
    cluster = problem.cluster
    count = cluster.num_devices
    if count < 2 or not problem.allowed.all():
        return False
    graph = problem.graph
    if graph.num_groups or graph.is_parameter.any():
        return False
    figures = (cluster.latency, cluster.sent_latency, cluster.sender_busy, cluster.receiver_busy)
    apart = ~np.eye(count, dtype=bool)
    if any(np.any(figure[apart] > 0) for figure in figures) or np.any(cluster.device_gap > 0):
        return False
    if graph.output_bytes[graph.input_op].any() or np.any(np.asarray(cluster.bus_gap) > 0):
        return False
    if _tick(problem.op_time[:, 0]) == 0.0:
        return False
    return any(len(members) == count for members in alike(problem))


def solve_cumulative(
    relaxed: Relaxed,
    ends: Ends,
    longest: float,
    start: Timeline | None,
    seed: int,
    seconds: float,
    work: float,
) -> CumulativeAnswer:
    """The shortest step, from a known one of `longest` seconds; one worker, so runs are alike."""
    from ortools.sat.python import cp_model

    model = _Model(relaxed, ends, longest)
    if start is not None and start.start is not None:
        model.hint(start.start)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 1
    if math.isfinite(work):
        solver.parameters.max_deterministic_time = work
    status = solver.solve(model.cp)
    spent = float(solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:  # nothing is shorter than what is known
        return CumulativeAnswer(longest, spent, model.slack, None, None)
    bound = min(float(solver.best_objective_bound) * model.tick, longest)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CumulativeAnswer(bound, spent, model.slack, None, None)
    begin = [int(solver.value(each)) for each in model.begin]
    count = relaxed.problem.cluster.num_devices
    device, start_of = _placed(relaxed.problem.graph, begin, model.ticks, count)
    return CumulativeAnswer(bound, spent, model.slack, device, start_of)


class _Model:
    """Starts of all ops, and one resource with room for as many as there are devices."""

    def __init__(self, relaxed: Relaxed, ends: Ends, longest: float) -> None:
        from ortools.sat.python import cp_model

        time = relaxed.time.min(axis=1)
        self.tick = _tick(time)
        self.slack = self.tick * _ROUNDING * (len(time) + 2)
        self.ticks = [self._whole(seconds) for seconds in time.tolist()]
        most = self._whole(longest)
        graph = relaxed.problem.graph
        count = relaxed.problem.cluster.num_devices
        self.cp: Any = cp_model.CpModel()
        self.step = self.cp.new_int_var(0, most, "step")
        self.begin = []
        head = ends.head.min(axis=1)
        tail = ends.tail.min(axis=1)
        for op, length in enumerate(self.ticks):
            earliest = self._whole(head[op])
            after = length + self._whole(tail[op])
            latest = max(earliest, most - after)
            self.begin.append(self.cp.new_int_var(earliest, latest, f"begin{op}"))
            self.cp.add(self.step >= self.begin[op] + after)
        for op, sources in enumerate(graph.input_lists()):
            for source in sources:
                self.cp.add(self.begin[op] >= self.begin[source] + self.ticks[source])
        runs = [
            self.cp.new_fixed_size_interval_var(self.begin[op], length, f"run{op}")
            for op, length in enumerate(self.ticks)
            if length > 0
        ]
        self.cp.add_cumulative(runs, [1] * len(runs), count)
        self.cp.add(self.step * count >= sum(self.ticks))
        self.cp.minimize(self.step)

    def hint(self, start: Array) -> None:
        """Begin from a known schedule."""
        for variable, seconds in zip(self.begin, start.tolist(), strict=True):
            self.cp.add_hint(variable, self._whole(seconds))

    def _whole(self, seconds: float) -> int:
        """Whole ticks, rounded down: so the least step of the model is a bound."""
        return math.floor(float(seconds) / self.tick + _ROUNDING)


def _tick(time: Array) -> float:
    """The largest tick of which all times are whole multiples; 0 if there is none."""
    longer = time[time > 0]
    least = float(longer.min(initial=np.inf))
    for parts in range(1, _MOST_PARTS + 1):
        multiples = longer * parts / least
        if multiples.max(initial=0) > _MOST_TICKS:
            break
        if len(longer) and np.allclose(multiples, np.rint(multiples), rtol=0, atol=_ROUNDING):
            return least / parts
    return 0.0


def _placed(graph: Graph, begin: list[int], ticks: list[int], count: int) -> tuple[Array, Array]:
    """The device [ops] and start [ops] in ticks of each op, from the solver's starts."""
    device = np.zeros(len(ticks), dtype=np.int32)
    free = [(0, number) for number in range(count)]  # since when, device
    runs = [op for op, length in enumerate(ticks) if length > 0]
    for op in sorted(runs, key=lambda op: (begin[op], op)):
        since, number = heapq.heappop(free)
        assert since <= begin[op], "no more ops run at once than there are devices"
        device[op] = number
        heapq.heappush(free, (begin[op] + ticks[op], number))
    start = np.array(begin, dtype=np.float64)
    # An op without length runs where and when its last input is done, before whatever follows.
    for op, sources in enumerate(graph.input_lists()):
        if ticks[op] == 0:
            last = max(sources, key=lambda source: start[source] + ticks[source], default=None)
            start[op] = 0.0 if last is None else start[last] + ticks[last]
            device[op] = 0 if last is None else device[last]
        else:
            start[op] += 0.5
    return device, start
