"""The exact solver against every placement in every order."""

import numpy as np
import pytest

from roost.bounds import exact
from roost.bounds.alike import alike
from roost.bounds.exact import solve_exactly
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.errors import MissingExtra
from roost.search.warm_up import small_problem
from roost.simulator.compiled import Simulator
from roost.testing.problems import training_like
from support.exhaustive import all_devices, exhaustive, tiny

pytest.importorskip("ortools")


def check(problem, seed):
    """Whether the solver says that it has the optimum; that it has it, or at least a bound."""
    best, found = exhaustive(problem), solve_exactly(problem, seconds=20.0)
    if found.nothing_fits:
        assert np.isinf(best.step_time), seed
        return True
    assert found.bound <= best.step_time * (1 + 1e-9), seed
    if found.optimal:
        assert found.step_time == pytest.approx(best.step_time, rel=1e-6), seed
        timeline = Simulator.of(problem).simulate(found.placement)
        assert timeline.feasible
        assert timeline.step_time == found.step_time
    return found.optimal


def test_it_equals_exhaustive_search_over_placements_and_orders():
    said = [check(tiny(seed, most_ops=6, plain=True), seed) for seed in range(150)]
    assert np.mean(said) > 0.97


def test_with_up_to_seven_ops():
    said = [check(tiny(seed, most_ops=7, plain=True), seed) for seed in range(5000, 5025)]
    assert np.mean(said) > 0.9


def test_with_shared_buses_broadcast_and_remote_parameters_it_equals_or_says_that_it_is_only_a_bound():
    said = [
        check(tiny(seed, most_ops=6, crowded=seed % 3 == 0), seed) for seed in range(1000, 1200)
    ]
    assert np.mean(said) > 0.9


def test_without_links_it_is_a_bound_all_the_same():
    for seed in range(60):
        problem = tiny(seed, most_ops=5)
        found = solve_exactly(problem, seconds=20.0, links=False)
        assert found.nothing_fits or found.bound <= exhaustive(problem).step_time * (1 + 1e-9), seed


def test_sends_that_are_slower_than_fetches_are_within_the_longest_step():
    builder = GraphBuilder("two")
    builder.add("a", "op", output_bytes=100, allowed=["cpu"])
    builder.add("b", "op", ["a"], allowed=["cuda"])
    devices = (Device("cpu", "cpu", 1000), Device("cuda:0", "cuda", 1000))
    cluster = Cluster("slow_sends", devices, (Link("*", "*", 100.0, send_bandwidth=5.0),))
    found = solve_exactly(Problem(builder.freeze(), cluster, np.ones((2, 2))), seconds=20.0)
    assert not found.nothing_fits
    assert found.optimal
    assert found.step_time == 22.0


def test_ends_that_are_kept_busy_are_within_the_longest_step_and_are_not_proved():
    builder = GraphBuilder("two")
    builder.add("a", "op", output_bytes=100, allowed=["cpu"])
    builder.add("b", "op", ["a"], allowed=["cuda"])
    builder.add("c", "op", allowed=["cpu"])
    devices = (Device("cpu", "cpu", 1000), Device("cuda:0", "cuda", 1000))
    cluster = Cluster(
        "busy", devices, (Link("*", "*", 100.0, sender_busy=50.0, receiver_busy=70.0),)
    )
    problem = Problem(builder.freeze(), cluster, np.ones((3, 2)))
    found = solve_exactly(problem, seconds=20.0)
    assert not found.nothing_fits
    assert not found.optimal
    # 1 + 1 + 70 + 1; c has time meanwhile.
    assert found.step_time == exhaustive(problem).step_time == 73.0
    assert found.bound == pytest.approx(3.0)


def test_where_ends_are_kept_busy_it_equals_or_says_that_it_is_only_a_bound():
    problems = [tiny(seed, most_ops=6, crowded=seed % 3 == 0) for seed in range(3000, 3600)]
    said = [
        check(problem, problem.graph.name) for problem in problems if problem.cluster.keeps_busy
    ]
    assert len(said) > 80
    assert np.mean(said) > 0.8


@pytest.mark.parametrize("weight_first", [False, True])
def test_sends_of_the_first_op_are_no_fetches(weight_first):
    """Op 0 makes 100 bytes, op 1 makes 50; the GPU reads both, and a weight of the CPU."""
    builder = GraphBuilder("first")
    weight = ["w"]
    if weight_first:
        builder.add("w", "op", output_bytes=200, phase="parameter", allowed=["cpu"])
    builder.add("a", "op", output_bytes=100, allowed=["cpu"])
    builder.add("b", "op", output_bytes=50, allowed=["cpu"])
    if not weight_first:
        builder.add("w", "op", output_bytes=200, phase="parameter", allowed=["cpu"])
    builder.add("c", "op", ["a", "b", *weight], allowed=["cuda"])
    devices = (Device("cpu", "cpu", 1000), Device("cuda:0", "cuda", 1000))
    cluster = Cluster("bus", devices, (Link("*", "*", 100.0, bus="all"),))
    graph = builder.freeze()
    time = np.where(graph.is_parameter, 0.0, 1.0)[:, None].repeat(2, axis=1)
    problem = Problem(graph, cluster, time)
    found = solve_exactly(problem, seconds=20.0)
    assert found.optimal
    assert found.step_time == exhaustive(problem).step_time


def test_a_step_that_is_known_is_not_made_worse_and_limits_the_search():
    problem = tiny(5003, most_ops=7, plain=True)
    first = solve_exactly(problem, seconds=20.0)
    assert solve_exactly(problem, seconds=20.0, start=first.placement).step_time == first.step_time
    below = solve_exactly(problem, seconds=20.0, upper=first.step_time / 2)
    assert below.bound >= first.step_time / 2 * (1 - 1e-9)
    assert not below.nothing_fits


def test_forty_ops_on_two_devices_are_proved():
    problem = training_like(40, 2, seed=1)
    found = solve_exactly(problem, seconds=60.0)
    assert found.optimal
    assert found.bound >= found.step_time * 0.999


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(exact, "installed", lambda: False)
    with pytest.raises(MissingExtra, match="exact"):
        solve_exactly(training_like(10, 2), seconds=1.0)


def test_devices_that_can_change_places():
    problem = training_like(10, 3)
    assert alike(problem) == [[0, 1, 2]]
    devices = tuple(Device(f"d{d}", "cuda", 100 if d < 3 else 50) for d in range(4))
    links = (Link("*", "*", 1e9), Link("d0", "d1", 2e9))
    cluster = Cluster("pairs", devices, links)
    unlike = Problem(
        problem.graph,
        cluster,
        np.ones((problem.graph.num_ops, 4)) * ~problem.graph.is_parameter[:, None],
    )
    assert alike(unlike) == [[0, 1]]
    one_way = Link("d0", "d1", 1e9, both_ways=False, receiver_busy=1.0)
    busy = Cluster("busy", devices, (Link("*", "*", 1e9), one_way))
    assert alike(Problem(unlike.graph, busy, unlike.costs)) == []


def test_exhaustive_search_sees_every_choice_of_devices():
    problem = tiny(7)
    found = all_devices(problem)
    assert len(np.unique(found, axis=0)) == len(found)
    for row in found:
        Simulator.of(problem).problem._check_rules(row)


def test_it_ends_where_windows_make_many_devices_look_better_than_they_are(monkeypatch):
    """Three ops with weights to fetch: the model knows no windows, and hundreds of its answers come
    out longer."""
    problem, count = small_problem(), []
    solve = exact._Search._solve
    monkeypatch.setattr(
        exact._Search, "_solve", lambda self, *given: count.append(1) or solve(self, *given)
    )
    found = solve_exactly(problem, seconds=600.0, start=exact._start(problem))
    assert len(count) < 50
    assert found.bound < found.step_time == pytest.approx(exhaustive(problem).step_time)


def test_it_gives_up_after_many_fruitless_answers(monkeypatch):
    problem, count = small_problem(), []
    monkeypatch.setattr(exact, "_FRUITLESS", 2)
    monkeypatch.setattr(
        exact, "_simulated", lambda problem, devices, begin: [(exact._start(problem), None)]
    )
    monkeypatch.setattr(
        exact._Search, "_note", lambda self, found: self.tried.extend(p for p, _ in found)
    )
    solve = exact._Search._solve
    monkeypatch.setattr(
        exact._Search, "_solve", lambda self, *given: count.append(1) or solve(self, *given)
    )
    solve_exactly(problem, seconds=600.0)
    assert len(count) == 3
