"""The list schedulers: heft, topo, etf, sct, and the loops under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roost import catalog
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import UPDATE, Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._listing.list_scheduler import ListScheduler, device_choices, named_rules
from roost.placers._shared.units import Units
from roost.placers.sct import Sct, _favourites
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating
from roost.simulator.compiled import simulate
from roost.simulator.order import dispatch_order
from roost.testing.problems import training_like
from support.nasty import nasty

NAMES = ["heft", "topo", "etf", "sct", "rules"]


def evaluation(problem: Problem, seed: int = 0, trials: float = float("inf")) -> Evaluation:
    return Evaluation(Search(problem, Simulating(problem, 1), Budget(trials), seed), "test")


def placed(name: str, problem: Problem, seed: int = 0) -> Placement:
    placement: Placement = catalog.find("placers", name)().place(problem, evaluation(problem, seed))
    return placement


def devices(
    count: int, memory: int = 10**9, latency: float = 0.0, bandwidth: float = 1e18
) -> Cluster:
    names = tuple(Device(f"d{d}", "cpu", memory) for d in range(count))
    return Cluster("devices", names, (Link("*", "*", bandwidth, latency),))


def problem_of(
    build: Callable[[GraphBuilder], object], cluster: Cluster, seconds: Any = 1.0
) -> Problem:
    builder = GraphBuilder()
    build(builder)
    graph = builder.freeze()
    times = np.broadcast_to(
        np.asarray(seconds, dtype=float), (graph.num_ops, cluster.num_devices)
    ).copy()
    times[graph.is_parameter] = 0.0
    return Problem(graph, cluster, times)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_any_problem_gets_a_valid_placement_and_the_same_one_again(name: str) -> None:
    for seed in range(25):
        problem, _ = nasty(seed)
        first = placed(name, problem)
        problem.check(first)
        assert placed(name, problem) == first


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_one_op_and_of_parameters_only(name: str) -> None:
    one = problem_of(lambda b: b.add("a", output_bytes=4), devices(3))
    assert simulate(one, placed(name, one)).step_time == 1.0
    bare = problem_of(lambda b: (b.parameter("p", 6), b.parameter("q", 6)), devices(2, memory=8))
    assert simulate(bare, placed(name, bare)).feasible


@pytest.mark.parametrize("name", NAMES)
def test_groups_and_allowed_kinds_are_respected(name: str) -> None:
    def build(b: GraphBuilder) -> None:
        b.add("a", group="g", output_bytes=1)
        b.add("b", inputs=["a"], allowed=["cuda"], output_bytes=1)
        b.add("c", inputs=["b"], group="g", allowed=["cpu"])

    cluster = Cluster(
        "two", (Device("x", "cpu", 99), Device("y", "cuda", 99)), (Link("*", "*", 1.0, 1.0),)
    )
    problem = problem_of(build, cluster)
    assert placed(name, problem).device.tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_on_one_device_is_spread(name: str) -> None:
    def build(b: GraphBuilder) -> None:
        previous: list[str] = []
        for layer in range(6):
            b.parameter(f"w{layer}", 50)
            previous = [b.add(f"a{layer}", inputs=[*previous, f"w{layer}"], output_bytes=2)]

    problem = problem_of(build, devices(3, memory=110))
    assert simulate(problem, placed(name, problem)).feasible


@pytest.mark.parametrize("name", ["heft", "etf", "sct", "rules"])
def test_independent_chains_run_beside_each_other(name: str) -> None:
    def build(b: GraphBuilder) -> None:
        for chain in range(3):
            previous: list[str] = []
            for step in range(4):
                previous = [b.add(f"c{chain}.{step}", inputs=previous, output_bytes=10)]

    problem = problem_of(build, devices(3, latency=2.0))
    assert simulate(problem, placed(name, problem)).step_time == 4.0


def test_step_times_and_excess_of_rolled_rules_are_those_of_the_simulator() -> None:
    problem = training_like(300, 3)
    small = replace(
        problem.cluster,
        devices=tuple(replace(d, memory=6 * 10**7) for d in problem.cluster.devices),
    )
    problem = Problem(problem.graph, small, problem.costs)
    for scheduler in ListScheduler.all_of(Units.of(problem)):
        assert scheduler.is_tight
        schedules = scheduler.schedule(named_rules(scheduler.units, {"finish": 1.0}))
        timeline = simulate(problem, schedules.best()[0])
        assert timeline.step_time == schedules.step_time[0]
        assert np.maximum(timeline.peak_memory - small.memory, 0).sum() == schedules.excess[0] == 0


def test_no_device_holds_more_than_one_that_runs_everything() -> None:
    for seed in range(60):
        problem, _ = nasty(seed)
        units = Units.of(problem)
        scheduler = ListScheduler.of(units, "program")
        if scheduler.is_tight:
            continue
        rng = np.random.default_rng(seed)
        choice = np.array([rng.choice(np.flatnonzero(row)) for row in units.allowed])
        timeline = simulate(problem, scheduler.placement(choice))
        assert timeline.feasible


def listed(problem: Problem, order: list[int]) -> list[int]:
    """Earliest finish with free transfers, in plain Python; the first device of equals."""
    free, finish, device = (
        [0.0] * problem.cluster.num_devices,
        [0.0] * problem.graph.num_ops,
        [0] * len(order),
    )
    for op in order:
        ready = max((finish[s] for s in problem.graph.inputs_of(op).tolist()), default=0.0)
        ends = [max(ready, free[d]) + problem.op_time[op, d] for d in range(len(free))]
        device[op] = ends.index(min(ends))
        finish[op] = free[device[op]] = min(ends)
    return device


def test_heft_rule_equals_plain_list_scheduling_where_transfers_are_free() -> None:
    for seed in range(20):
        problem = scattered_times(seed)
        scheduler = ListScheduler.of(Units.of(problem), "rank")
        schedules = scheduler.schedule(named_rules(scheduler.units, {"finish": 1.0}))
        assert schedules.best()[0].device.tolist() == listed(problem, scheduler.layout.op.tolist())


def scattered_times(seed: int) -> Problem:
    """A random graph without parameters on unlike devices, with transfers that take no time."""
    rng = np.random.default_rng(seed)

    def build(b: GraphBuilder) -> None:
        for op in range(30):
            inputs = (
                [f"o{i}" for i in sorted(set(rng.integers(0, op, rng.integers(0, 3)).tolist()))]
                if op
                else []
            )
            b.add(f"o{op}", inputs=inputs)

    return problem_of(build, devices(3), 1.0 + rng.random((30, 3)))


def first_start(problem: Problem, rank: list[int]) -> tuple[list[int], list[int]]:
    """Earliest task first with free transfers, in plain Python."""
    free, finish = [0.0] * problem.cluster.num_devices, {}
    device, sequence = [0] * problem.graph.num_ops, []
    while len(finish) < problem.graph.num_ops:
        pairs = []
        for place, op in enumerate(rank):
            inputs = problem.graph.inputs_of(op).tolist()
            if op not in finish and all(s in finish for s in inputs):
                ready = max((finish[s] for s in inputs), default=0.0)
                pairs += [(max(ready, free[d]), place, d, op) for d in range(len(free))]
        start, _, d, op = min(pairs)
        device[op] = d
        finish[op] = free[d] = start + problem.op_time[op, d]
        sequence.append(op)
    return device, sequence


def test_etf_equals_its_definition_where_transfers_are_free() -> None:
    for seed in range(20):
        problem = scattered_times(seed)
        scheduler = ListScheduler.of(Units.of(problem), "rank")
        own = scheduler.earliest_first(np.ones(3, bool))[0]
        device, sequence = first_start(problem, scheduler.layout.op.tolist())
        assert own.device.tolist() == device
        assert dispatch_order(problem, own).tolist() == sequence


def test_early_updates_come_after_every_reader_of_what_they_rewrite() -> None:
    graph = training_graph()
    times = np.where(graph.is_parameter, 0.0, 1.0)[:, None].repeat(2, axis=1)
    problem = Problem(graph, devices(2), times)  # type: ignore[arg-type]
    early = ListScheduler.of(Units.of(problem), "program", eager=True).example
    position = np.zeros(graph.num_ops)
    position[dispatch_order(problem, early)] = np.arange((~graph.is_parameter).sum())
    for op in np.flatnonzero(graph.phase == UPDATE).tolist():
        for source in graph.inputs_of(op).tolist():
            others = graph.consumers_of(source).tolist() if graph.is_parameter[source] else [source]
            assert all(position[other] < position[op] for other in others if other != op)
    late = simulate(problem, Placement(np.zeros(20, np.int32)))
    assert simulate(problem, early).peak_memory[0] < late.peak_memory[0]


def training_graph() -> Graph:
    """Five layers: weights, forward, gradient of the weight before that of the input, updates at
    the end."""
    b = GraphBuilder("layers")
    for layer in range(4):
        b.parameter(f"w{layer}", 100)
    previous = "none"
    for layer in range(4):
        previous = b.add(
            f"f{layer}", inputs=[f"w{layer}", *([previous] if layer else [])], output_bytes=10
        )
    for layer in (3, 2, 1, 0):
        given = [previous, f"f{layer - 1}"] if layer else [previous]
        b.add(f"dw{layer}", inputs=given, output_bytes=100, phase="backward")
        previous = b.add(
            f"dx{layer}", inputs=[previous, f"w{layer}"], output_bytes=10, phase="backward"
        )
    for layer in range(4):
        b.add(f"u{layer}", inputs=[f"w{layer}", f"dw{layer}"], phase="update")
    return b.freeze()


def test_choices_of_devices_leave_out_slower_kinds_one_by_one() -> None:
    problem = problem_of(lambda b: b.add("a"), devices(4), [[9.0, 1.0, 1.2, 2.0]])
    expected = [[True] * 4, [False, True, True, True], [False, True, True, False]]
    assert device_choices(Units.of(problem)).tolist() == expected


def test_in_a_chain_each_op_is_the_favourite_of_the_one_before() -> None:
    def build(b: GraphBuilder) -> None:
        b.add("a", output_bytes=8)
        for before, op in ("ab", "bc", "cd"):
            b.add(op, inputs=[before], output_bytes=8)

    units = Units.of(problem_of(build, devices(2, latency=3.0)))
    favourite, parent = _favourites(units, ListScheduler.of(units, "program").layout)
    assert favourite.tolist() == [1, 2, 3, -1]
    assert parent.tolist() == [-1, 0, 1, 2]


def test_no_op_has_two_favourites_or_is_the_favourite_of_two() -> None:
    units = Units.of(training_like(200, 3))
    favourite, parent = _favourites(units, ListScheduler.of(units, "program").layout)
    ops = np.flatnonzero(favourite >= 0)
    assert len(ops) > 50
    assert (parent[favourite[ops]] == ops).all()
    assert (parent >= 0).sum() == len(ops)


def test_sct_coarsens_large_graphs() -> None:
    problem = training_like(200, 3)
    placement = Sct(most_ops=50, num_groups=40).place(problem, evaluation(problem))
    problem.check(placement)
    assert simulate(problem, placement).feasible
