"""The exact solver: CP-SAT proves a bound, and finds the best placement where its model is exact.

It relaxes memory to what no order can escape, and `_links.py` says where links are relaxed.
Whatever it finds is simulated, so it knows whether its bound is met.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.bounds import cumulative
from roost.bounds._model import SolverModel
from roost.bounds._relaxed import Relaxed
from roost.bounds.heads_tails import Ends, through
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.errors import MissingExtra
from roost.simulator.compiled import Simulator

_FEW = 40  # ops: with fewer, links are scheduled at once, and time is finer
# In the longest step; a bound loses up to a tick for each op on the longest path.
_TICKS = 2e6
_MANY_TICKS = 1e9
# Of the time, for the model without links, whose answer is often good enough with them.
_EASY_SHARE = 0.6
_MARGIN = 1 + 1e-9
_CLOSE = 1e-4
# Answers in a row that come out longer than the model says, and longer than what is known.
_FRUITLESS = 40


@dataclass(frozen=True, eq=False)
class Exact:
    """The best placement of the solver, and the bound it proved."""

    placement: Placement | None  # the best that fits, None where none was found
    step_time: float  # seconds, simulated; infinite where none was found
    bound: float  # seconds: no placement that fits is faster
    optimal: bool  # whether the two meet, but for the rounding of times to ticks
    nothing_fits: bool = False  # proved
    candidates: tuple[Placement, ...] = ()  # all the placements it looked at, that fit or not


def installed() -> bool:
    """True where OR-tools is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def solve_exactly(
    problem: Problem,
    seconds: float,
    start: Placement | None = None,
    links: bool = True,
    seed: int = 0,
    workers: int = 1,
    upper: float = np.inf,
    work: float = np.inf,
    in_turn: bool = False,
) -> Exact:
    """Search for the shortest step and prove it. Without `links` transfers do not wait for each
    other.

    Placements that take longer than `upper` or than `start` are not looked at. `work` limits the
    solver by its own count: one is two to four seconds of a core. With workers that take
    turns the same seed gives the same answer, unless `seconds` end the search first.
    """
    if not installed():
        raise MissingExtra("ortools", "exact")
    stop = time.monotonic() + seconds
    search = _Search(problem, upper, seed, workers, in_turn)
    search.know(start)
    if cumulative.applies(problem):
        search.work_left = work
        search.run_cumulative(stop)
        return search.found()
    if not links or problem.graph.num_ops > _FEW:
        share = _EASY_SHARE if links else 1.0
        search.work_left = share * work
        search.run(False, time.monotonic() + share * seconds)
        work -= share * work - search.work_left
    if links and not search.done:
        search.work_left = work
        search.run(True, stop)
    return search.found()


class _Search:
    """The best placement and the best bound so far."""

    def __init__(
        self, problem: Problem, upper: float, seed: int, workers: int, in_turn: bool
    ) -> None:
        self.problem = problem
        self.upper = upper
        self.seed = seed
        self.workers = workers
        self.in_turn = in_turn  # slower, but chance has no say
        self.placement: Placement | None = None  # the best that fits
        self.timeline: Timeline | None = None  # of that, or of the start
        self.step_time = np.inf
        self.bound = 0.0
        self.slack = 0.0
        self.work_left = np.inf  # in the solver's own count
        self.tried: list[Placement] = []
        self.solver: Any = None  # with the last answer

    def know(self, start: Placement | None) -> None:
        if start is not None:
            self._note([(start, Simulator.of(self.problem).simulate(start, full=True))])

    def _note(self, found: list[tuple[Placement, Timeline]]) -> None:
        for placement, timeline in found:
            self.tried.append(placement)
            if timeline.feasible and timeline.step_time < self.step_time:
                self.placement = placement
                self.step_time = timeline.step_time
                self.timeline = None
            if self.timeline is None:
                self.timeline = Simulator.of(self.problem).simulate(placement, full=True)

    @property
    def done(self) -> bool:
        """True when only the rounding of times to ticks separates step and bound."""
        return min(self.step_time, self.upper) <= self.bound + self.slack

    def found(self) -> Exact:
        bound = min(self.bound, self.step_time)
        optimal = self.placement is not None and self.step_time <= bound + self.slack
        return Exact(
            self.placement, self.step_time, bound, optimal, np.isinf(bound), tuple(self.tried)
        )

    def run_cumulative(self, stop: float) -> None:
        """Solve the model that does not tell devices apart; prove that nothing is shorter."""
        relaxed = Relaxed.of(self.problem)
        horizon = min(self.step_time, self.upper)
        if not relaxed.possible:
            return
        if np.isinf(horizon):
            horizon = longest_step(self.problem)
        seconds = stop - time.monotonic()
        if seconds <= 0 or self.work_left <= 0 or horizon <= 0:
            return
        answer = cumulative.solve_cumulative(
            relaxed, Ends.of(relaxed), horizon, self.timeline, self.seed, seconds, self.work_left
        )
        self.work_left -= answer.work
        self.bound = max(self.bound, answer.bound)
        if answer.device is not None and answer.begin is not None:
            self._note(_simulated(self.problem, answer.device, answer.begin))
        self.slack = max(self.slack, answer.slack)

    def run(self, links: bool, stop: float) -> None:
        """Solve and simulate. If the simulator disagrees, forbid the answer's devices and solve
        again."""
        horizon = min(self.step_time, self.upper)
        relaxed = Relaxed.of(self.problem)
        if np.isfinite(horizon):
            # Nothing that is longer need be looked at; the margin keeps roundings from closing what
            # is just as long.
            relaxed = relaxed.within(through(relaxed, Ends.of(relaxed)) <= horizon * _MARGIN)
            if not relaxed.possible or horizon <= 0:
                self.bound = max(self.bound, horizon)
                return
        model = self._model(relaxed, horizon, links)
        shortest = self.step_time
        fruitless = 0
        while (
            self._solve(model, horizon, stop) and links and not self.done and fruitless < _FRUITLESS
        ):
            # What the model leaves out, such as windows, can make hundreds of choices of devices
            # look better than any.
            fruitless = 0 if self.step_time < shortest else fruitless + 1
            shortest = self.step_time
            self._sharpen(model)

    def _sharpen(self, model: SolverModel) -> None:
        """Rule out an answer whose simulated step is longer than the model says."""
        assert model.links is not None
        assert self.solver is not None
        if not model.links.tighten(self.solver):
            model.forbid(self.tried[-1].device)

    def _model(self, relaxed: Relaxed, horizon: float, links: bool) -> SolverModel:
        num_ops = self.problem.graph.num_ops
        if np.isinf(horizon):  # where nothing takes any time, something still has to fit
            horizon = longest_step(self.problem) or 1.0
        tick = horizon / (_MANY_TICKS if num_ops <= _FEW else _TICKS)
        self.slack = tick * (2 * num_ops + 4)
        model = SolverModel(relaxed, Ends.of(relaxed), horizon * _MARGIN + tick, tick)
        model.add_bound(self.bound)
        if links:
            from roost.bounds._links import Links

            model.links = Links(model)
        else:
            model.add_delays()
        if self.timeline is not None:
            model.hint(self.timeline)
        return model

    def _solve(self, model: SolverModel, horizon: float, stop: float) -> bool:
        """Solve once; return whether another run is worth it."""
        from ortools.sat.python import cp_model

        left = stop - time.monotonic()
        if left <= 0 or self.work_left <= 0:
            return False
        solver: Any = cp_model.CpSolver()
        self.solver = solver
        solver.parameters.max_time_in_seconds = left
        solver.parameters.random_seed = self.seed
        solver.parameters.num_workers = self.workers
        solver.parameters.interleave_search = self.in_turn
        if np.isfinite(self.work_left):
            solver.parameters.max_deterministic_time = self.work_left
        # Many times faster here, for the spans of `_model.py`.
        solver.parameters.linearization_level = 2
        status = solver.solve(model.cp)
        self.work_left -= solver.response_proto.deterministic_time
        least = float(solver.best_objective_bound) * model.tick
        if not model.forbidden:  # else it proves nothing of what is forbidden
            self.bound = max(self.bound, horizon if status == cp_model.INFEASIBLE else least)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        self._note(_simulated(self.problem, *_answer(model, solver)))
        return bool(status == cp_model.OPTIMAL) and least + self.slack < min(
            self.step_time, self.upper
        )


def longest_step(problem: Problem) -> float:
    """Seconds that no step exceeds: all ops and all transfers one after the other."""
    graph = problem.graph
    cluster = problem.cluster
    ops = (np.where(problem.allowed, problem.op_time, 0.0) + cluster.device_gap).max(axis=1).sum()
    slowest = float(cluster.sent_seconds_per_byte.max(initial=0.0))  # none is fetched more slowly
    each = (cluster.sent_latency, cluster.bus_gap, cluster.sender_busy, cluster.receiver_busy)
    rest = sum(float(figure.max(initial=0.0)) for figure in each)
    transfers = 2 * (graph.num_edges * rest + graph.output_bytes[graph.input_op].sum() * slowest)
    return float(ops + transfers)


def _answer(model: SolverModel, solver: Any) -> tuple[Array, Array]:
    graph = model.graph
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    begin = np.zeros(graph.num_ops)
    for op in range(graph.num_ops):
        devices[op] = next(d for d in model.where(op) if solver.boolean_value(model.on(op, d)))
        if op in model.begin:
            # Of ops that begin at once on a device, those that take no time run first.
            begin[op] = solver.value(model.begin[op]) + (
                0.5 if model.relaxed.time[op, devices[op]] > 0 else 0.0
            )
    return devices, begin


def _simulated(problem: Problem, devices: Array, begin: Array) -> list[tuple[Placement, Timeline]]:
    """The solver's answer as placements: in its own order and every other, with several windows."""
    graph = problem.graph
    ranked = np.lexsort((np.arange(graph.num_ops), begin))
    priority = np.zeros(graph.num_ops)
    priority[ranked] = -np.arange(graph.num_ops)
    away = graph.is_parameter[graph.input_op] & (
        devices[graph.input_op] != devices[graph.edge_target]
    )
    sizes = graph.output_bytes[np.unique(graph.input_op[away])]
    windows = sorted({0, int(sizes.max(initial=0)), int(sizes.sum()) // 2, int(sizes.sum())})
    names = problem.cluster.device_names
    digest = graph.digest
    found = []
    for window in windows:
        for order in ("priority", "fifo", "rank", "program"):
            ranks = priority if order == "priority" else None
            placement = Placement(devices, order, ranks, window, names, digest)
            found.append((placement, Simulator.of(problem).simulate(placement)))
    return found


def exact_bound(
    problem: Problem, seconds: float, upper: float | None, workers: int = 4
) -> tuple[float, bool]:
    """The bound that CP-SAT proves in time, and whether some placement is known to reach it."""
    limit = np.inf if upper is None else upper
    found = solve_exactly(problem, seconds, _start(problem), workers=workers, upper=limit)
    if found.nothing_fits:
        return 0.0, False
    return found.bound, found.optimal or found.bound >= limit * (1 - _CLOSE)


def _start(problem: Problem) -> Placement | None:
    """The best device for everything, if any holds it."""
    tried = []
    for d in range(problem.cluster.num_devices):
        if problem.allowed[:, d].all():
            placement = Placement(np.full(problem.graph.num_ops, d, dtype=np.int32))
            result = Simulator.of(problem).simulate(placement)
            tried.append((not result.feasible, result.step_time, d, placement))
    fitting = [row for row in sorted(tried, key=lambda row: row[:3]) if not row[0]]
    return fitting[0][3] if fitting else None
