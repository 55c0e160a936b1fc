"""Single and random placements, and what all placers of this kind hold to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered import machine, model, nastier, searching, timed

from roost import catalog
from roost.core.cluster import Cluster, Device
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.errors import BudgetSpent, InputError
from roost.placers.random import Random
from roost.placers.single import Single
from roost.simulator.compiled import simulate

PLACERS = ("single", "random", "expert", "scotch", "mincut", "metis", "contiguous")


@pytest.mark.parametrize("name", PLACERS)
def test_every_placement_is_valid_the_best_that_was_tried_and_the_same_again(name: str) -> None:
    placer = catalog.find("placers", name)()
    for seed in range(40):
        problem = nastier(seed)
        search, evaluate = searching(problem)
        placement = placer.place(problem, evaluate)
        timeline = simulate(problem, placement)  # checks groups and kinds
        assert (placement.devices, placement.graph) == (
            problem.cluster.device_names,
            problem.graph.digest,
        )
        assert search.best is not None
        assert timeline.feasible == search.best.feasible
        assert not timeline.feasible or timeline.step_time == search.best.step_time
        assert placer.place(problem, searching(problem)[1]) == placement


@pytest.mark.parametrize("name", PLACERS)
def test_graphs_of_one_op_of_parameters_only_and_without_costs_are_placed(name: str) -> None:
    placer = catalog.find("placers", name)()
    lonely = GraphBuilder("lonely")
    lonely.add("op")
    stored = GraphBuilder("stored")
    for number in range(20):
        stored.parameter(f"p{number}", number)
    idle = model([f"layers.{number}" for number in range(12)], size=0, weight=0)
    for graph in (lonely.freeze(), stored.freeze(), idle):
        for cluster in (machine(1000), machine(1000, 1000, 1000, kinds=("cpu", "cuda", "cuda"))):
            problem = timed(graph, cluster, seconds=0.0)
            assert simulate(problem, placer.place(problem, searching(problem)[1])).feasible


@pytest.mark.parametrize("name", PLACERS)
def test_a_spent_budget_ends_it(name: str) -> None:
    problem = timed(model([f"layers.{number}" for number in range(8)]), machine(*[10_000] * 3))
    search, evaluate = searching(problem, trials=1)
    with pytest.raises(BudgetSpent):
        catalog.find("placers", name)().place(problem, evaluate)
    assert search.budget.num_trials == 1


def test_single_takes_the_fastest_device_on_which_all_fits() -> None:
    graph = model(["a", "b", "c"])
    for memory, best in (
        ((10_000, 10_000, 10_000), 1),
        ((10_000, 100, 10_000), 2),
        ((10_000, 100, 100), 0),
    ):
        problem = timed(graph, machine(*memory), speed=(1.0, 4.0, 2.0))
        assert set(Single().place(problem, searching(problem)[1]).device.tolist()) == {best}


def test_single_is_nearest_to_fitting_where_nothing_fits() -> None:
    problem = timed(model(["a", "b", "c"]), machine(10, 200, 100), speed=(4.0, 1.0, 2.0))
    placement = Single().place(problem, searching(problem)[1])
    assert set(placement.device.tolist()) == {1}
    assert not simulate(problem, placement).feasible


def test_single_leaves_to_the_cpu_what_only_that_can_run() -> None:
    graph = model(["a", "b", "c"])
    allowed = tuple(("cpu",) if name == "1:b/forward" else () for name in graph.op_names)
    cluster = machine(*[10_000] * 3, kinds=("cpu", "cuda", "cuda"))
    problem = timed(replace(graph, allowed=allowed), cluster, speed=(1.0, 4.0, 4.0))
    device = Single().place(problem, searching(problem)[1]).device
    # Its weight is read by it and by its backward op, and is with them; so is the update.
    on_cpu = {graph.op_names[op] for op in np.flatnonzero(device == 0)}
    assert on_cpu == {
        f"1:b/{role}" for role in ("weight", "forward", "backward", "gradient", "update")
    }
    assert len(set(device[device > 0].tolist())) == 1


def test_single_tries_devices_that_are_alike_once() -> None:
    problem = timed(
        model(["a", "b"], updates=False), machine(*[10_000] * 4), speed=(2.0, 2.0, 1.0, 2.0)
    )
    search, evaluate = searching(problem)
    Single().place(problem, evaluate)
    assert search.budget.num_trials == 4  # two kinds of devices, two orders


def test_random_takes_as_many_samples_as_it_is_told() -> None:
    problem = timed(model([f"layers.{number}" for number in range(8)]), machine(*[10_000] * 3))
    search, evaluate = searching(problem)
    Random(num_samples=21).place(problem, evaluate)
    assert search.budget.num_trials == 21


def test_random_without_a_number_goes_on_until_the_budget_is_spent() -> None:
    problem = timed(model([f"layers.{number}" for number in range(8)]), machine(*[10_000] * 3))
    search, evaluate = searching(problem, trials=100)
    with pytest.raises(BudgetSpent):
        Random(num_samples=None).place(problem, evaluate)
    assert search.budget.num_trials == 100


def test_random_uses_every_allowed_device_and_other_seeds_differ() -> None:
    problem = timed(model([f"layers.{number}" for number in range(30)]), machine(*[100_000] * 3))
    first, again, other = (
        Random(1).place(problem, searching(problem, seed)[1]) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert set(first.device.tolist()) == {0, 1, 2}


def test_random_needs_a_sample() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Random(num_samples=0)


def test_one_device_is_enough() -> None:
    problem = Problem(
        model(["a"]), Cluster("one", (Device("cpu:0", "cpu", 10_000),)), np.zeros((6, 1))
    )  # type: ignore[arg-type]
    for name in PLACERS:
        placement = catalog.find("placers", name)().place(problem, searching(problem)[1])
        assert not placement.device.any()
