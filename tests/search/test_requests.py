"""Throughput of requests under way, worked out by hand, and its bound against all placements."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from roost.bounds.period import period_bound
from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import UPDATE, Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.search.requests import Throughput, throughput
from roost.simulator.compiled import simulate
from roost.transforms.microbatch import Microbatch, Microbatched
from support.exhaustive import tiny


def chain(num_ops: int, nbytes: int = 0, allowed: str = "") -> Graph:
    """Ops a, b, ... one after the other, after an input; the first may be limited to a kind."""
    builder = GraphBuilder("chain")
    builder.parameter("w", 8)
    builder.add("x", "input", phase="input")
    before = ["x", "w"]
    for name in "abcdef"[:num_ops]:
        kinds = [allowed] if allowed and name == "a" else []
        builder.add(name, "op", before, output_bytes=nbytes, allowed=kinds)
        before = [name]
    return builder.freeze()


def cluster(memory: int = 1000, latency: float = 0.0) -> Cluster:
    devices = (Device("d0", "cpu", memory), Device("d1", "cuda", memory))
    return Cluster("two", devices, (Link("*", "*", 1e9, latency),))


def of_one(graph: Graph, seconds: list[Any], on: Cluster | None = None) -> Problem:
    """The problem of one request; `seconds` are of a, b, ..., alike or for each device."""
    times = np.zeros((graph.num_ops, 2))
    for name, each in zip("abcdef", seconds, strict=False):
        times[graph.index_of(name)] = each
    return Problem(graph, on or cluster(), times)  # type: ignore[arg-type]


def unrolled(problem: Problem, count: int) -> tuple[Microbatched, Problem]:
    made = Microbatch(count).apply(problem.graph)
    times: Any = problem.op_time[made.origin]
    return made, Problem(made.graph, problem.cluster, times)


def placed(made: Microbatched, devices: dict[str, int]) -> Placement:
    """Ops of all copies by name, or of one copy (`a#1`); parameters and inputs on device 0."""
    names = made.graph.op_names
    device = [devices.get(name, devices.get(name.partition("#")[0], 0)) for name in names]
    return Placement(np.array(device), "rank")


def found(problem: Problem, count: int, devices: dict[str, int]) -> Throughput:
    made, whole = unrolled(problem, count)
    return throughput(made, whole, placed(made, devices))


def test_a_full_pipeline_ends_a_request_as_often_as_its_stages_take() -> None:
    answer = found(of_one(chain(2), [1.0, 1.0]), 4, {"b": 1})
    assert answer.period == 1.0
    assert answer.per_second == 1.0
    assert answer.latency == 2.0
    assert answer.bound.step_time == pytest.approx(1.0)
    assert answer.gap == pytest.approx(0.0, abs=1e-6)


def test_the_slowest_stage_decides_the_period_of_a_pipeline() -> None:
    answer = found(of_one(chain(2), [1.0, 3.0]), 3, {"b": 1})
    assert answer.period == 3.0
    assert answer.bound.step_time == pytest.approx(2.0)  # 4 s of work on two devices
    # With all three under way a request waits for b of two others.
    assert answer.latency == answer.longest_latency == 9.0


def test_requests_side_by_side_on_whole_devices_end_together_and_count_one_by_one() -> None:
    apart = {"a#1": 1, "b#1": 1}
    answer = found(of_one(chain(2), [1.0, 1.0]), 2, apart)
    assert answer.period == 1.0
    assert answer.latency == answer.longest_latency == 2.0
    four = found(of_one(chain(2), [1.0, 1.0]), 4, apart | {"a#3": 1, "b#3": 1})
    assert four.period == 1.0


def test_one_request_under_way_takes_its_latency_wherever_its_ops_are() -> None:
    answer = found(of_one(chain(2), [1.0, 1.0]), 1, {"b": 1})
    assert answer.period == answer.latency == 2.0
    assert answer.bound.proof == "critical path"
    assert answer.gap == pytest.approx(0.0, abs=1e-6)


def test_a_pipeline_with_fewer_requests_than_stages_has_idle_stages() -> None:
    split = {"b": 1, "d": 1}  # a and c on one device, b and d on the other
    assert found(of_one(chain(4), [1.0] * 4), 1, split).period == 4.0
    assert found(of_one(chain(4), [1.0] * 4), 4, split).period == 2.0


def test_sending_what_a_full_link_carries_is_part_of_the_period() -> None:
    slow = cluster(latency=5.0)
    answer = found(of_one(chain(2), [1.0, 1.0], slow), 4, {"b": 1})
    assert answer.period == pytest.approx(5.0, rel=0.3)
    assert answer.period > answer.bound.step_time * 3


def test_the_bound_on_the_period_leaves_each_op_where_it_may_run() -> None:
    graph = chain(2, allowed="cpu")
    only = period_bound(of_one(graph, [3.0, 1.0]), 100)
    assert only.step_time == pytest.approx(3.0)  # a on d0, b on d1
    assert only.proof == "load"
    shared = period_bound(of_one(chain(2), [3.0, 1.0]), 100)
    assert shared.step_time == pytest.approx(2.0)
    unlike = period_bound(of_one(chain(2), [[3.0, 1.0], [1.0, 3.0]]), 100)
    assert unlike.step_time == pytest.approx(1.0)


def test_a_device_that_is_too_small_for_an_op_has_no_share_in_the_bound() -> None:
    small = Cluster(
        "unlike", (Device("d0", "cpu", 1000), Device("d1", "cuda", 4)), (Link("*", "*", 1e9),)
    )
    bound = period_bound(of_one(chain(2, nbytes=8), [1.0, 1.0], small), 8)
    assert bound.step_time == pytest.approx(2.0)


def test_no_placement_of_any_two_requests_in_turn_beats_the_bound() -> None:
    graph = chain(3, nbytes=4)
    problem = of_one(graph, [[2.0, 1.0], [1.0, 3.0], [1.5, 1.0]], cluster(latency=0.1))
    bound = period_bound(problem, 20).step_time
    made, whole = unrolled(problem, 20)
    least = np.inf
    ops = [made.graph.index_of(f"{name}#{copy}") for copy in (0, 1) for name in "abc"]
    for choice in product((0, 1), repeat=len(ops)):
        name_of = {made.graph.op_names[op]: d for op, d in zip(ops, choice, strict=True)}
        again = {
            f"{name}#{copy}": name_of[f"{name}#{copy % 2}"] for name in "abc" for copy in range(20)
        }
        least = min(least, simulate(whole, placed(made, again)).step_time / 20)
    assert bound <= least < 1.15 * bound
    two, pair = unrolled(problem, 2)
    two_bound = period_bound(problem, 2).step_time
    for choice in product((0, 1), repeat=len(ops)):
        where = {f"{'abc'[i % 3]}#{i // 3}": d for i, d in enumerate(choice)}
        assert throughput(two, pair, placed(two, where)).period >= two_bound


def test_a_device_that_rests_after_each_op_rests_between_requests_too() -> None:
    devices = tuple(replace(device, gap=0.5) for device in cluster().devices)
    resting = replace(cluster(), devices=devices)
    assert found(of_one(chain(2), [1.0, 1.0], resting), 1, {}).period == 3.0
    assert found(of_one(chain(2), [1.0, 1.0], resting), 2, {"a#1": 1, "b#1": 1}).period == 1.5


@pytest.mark.parametrize("order", ["rank", "program", "fifo"])
def test_no_random_placement_of_a_random_problem_beats_the_bound(order: str) -> None:
    rng = np.random.default_rng(5)
    tried = 0
    for seed in range(150):
        problem = tiny(seed)
        if (problem.graph.phase == UPDATE).any() or problem.graph.is_parameter.all():
            continue
        made, whole = unrolled(problem, int(rng.integers(1, 5)))
        devices = scattered(whole, rng)
        placement = whole.placement(devices, order)
        flow = throughput(made, whole, placement)
        step = simulate(whole, placement, full=True)
        assert step.device is not None
        timed = np.bincount(step.device, step.finish > step.start, whole.cluster.num_devices)
        load = (step.busy + timed * whole.cluster.device_gap).max()
        if step.feasible:
            tried += 1
            assert flow.period >= load / made.count * (1 - 1e-9)
            assert flow.bound.step_time <= flow.period
            assert flow.latency <= flow.longest_latency
    assert tried > 40


def scattered(problem: Problem, rng: np.random.Generator) -> Array:  # [ops]
    """A random device for each op that its group and kind allow."""
    graph = problem.graph
    device = np.array([rng.choice(np.flatnonzero(row)) for row in problem.allowed])
    for group in range(graph.num_groups):
        members = np.flatnonzero(graph.group == group)
        device[members] = rng.choice(np.flatnonzero(problem.allowed[members].all(axis=0)))
    return device


def test_a_training_step_and_a_foreign_problem_are_refused() -> None:
    builder = GraphBuilder("step")
    builder.add("a")
    builder.add("grad", inputs=["a"], phase="backward")
    graph = builder.freeze()
    problem = Problem(graph, cluster(), np.ones((2, 2)))  # type: ignore[arg-type]
    made, whole = unrolled(problem, 2)
    with pytest.raises(InputError, match="'grad' belongs to a training step"):
        throughput(made, whole, placed(made, {}))
    with pytest.raises(InputError, match="not of the unrolled graph"):
        throughput(made, problem, Placement(np.zeros(2)))


def test_the_number_of_requests_under_way_is_a_whole_number() -> None:
    with pytest.raises(InputError, match="count is 0"):
        period_bound(of_one(chain(1), [1.0]), 0)
