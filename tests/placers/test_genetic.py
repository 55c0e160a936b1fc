"""The genetic placer: devices and orders evolve together, within the rules and the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered import machine, nastier

from roost.core.graph import Graph, GraphBuilder
from roost.core.problem import Problem
from roost.core.trial import Result
from roost.placers.genetic import Genetic, KeyedProblem
from roost.search.solve import search
from roost.simulator.compiled import simulate
from roost.testing.problems import training_like
from support.nasty import nasty


def found(problem: Problem, trials: int, placer: Genetic | None = None, seed: int = 1) -> Result:
    return search(problem, placer or Genetic(), trials=trials, seed=seed, prove=False)


def two_lines() -> Graph:
    """Two chains that change devices half way; the long end of one is listed last, and should begin
    first."""
    builder = GraphBuilder("two_lines")
    for line in range(6):
        for part, kind in enumerate(("cpu", "cuda")):
            before = [f"{line}.0"] if part else []
            builder.add(f"{line}.{part}", inputs=before, output_bytes=1, allowed=[kind])
    return builder.freeze()


def johnson() -> Problem:
    """A flow shop of two machines: devices are given, and only the order can be chosen. The best
    takes 22 s.

    By Johnson's rule: first those that are shorter on the first machine, shortest first; then the
    others, those that are longest on the second first.
    """
    graph = two_lines()
    first, second = (6.0, 2.0, 5.0, 1.0, 4.0, 3.0), (1.0, 4.0, 2.0, 5.0, 3.0, 6.0)
    seconds = [value for pair in zip(first, second, strict=True) for value in pair]
    cluster = machine(100, 100, kinds=("cpu", "cuda"), bandwidth=1e12)
    return Problem(graph, cluster, np.repeat(np.array(seconds)[:, None], 2, axis=1))  # type: ignore[arg-type]


def test_it_finds_an_order_where_only_the_order_can_be_chosen() -> None:
    problem = johnson()
    device = problem.allowed.argmax(axis=1)
    fixed = [
        simulate(problem, problem.placement(device, order)).step_time
        for order in ("program", "rank")
    ]
    assert min(fixed) > 22.5
    # The start has an order already: here it is not good enough, and urgencies may move an op
    # across all of it.
    result = found(problem, 6000, Genetic(starts=("single",), spread=1.0))
    assert result.best.step_time == pytest.approx(22.0, abs=1e-6)
    assert result.best.placement.order == "priority"
    assert result.best.placer == "genetic"


def test_it_is_better_than_where_it_began() -> None:
    result = found(training_like(100, 2, seed=1), 20_000)
    assert result.best.step_time < 0.95 * min(
        trial.step_time for trial in result.baselines.values()
    )


def test_more_generations_are_never_worse() -> None:
    problem = training_like(100, 2, seed=1)
    steps = [found(problem, trials).best.step_time for trials in (200, 1000, 8000)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("trials", [70, 90, 131, 200, 257])
def test_no_budget_is_exceeded(trials: int) -> None:
    result = found(training_like(40, 2, seed=1), trials)
    assert result.num_trials <= trials
    assert result.best.feasible


def test_the_keys_of_a_placement_stand_for_its_devices() -> None:
    for seed in range(40):
        problem = nastier(seed)
        units = KeyedProblem(problem, problem.placement(problem.allowed.argmax(axis=1)), 0.05).units
        rng = np.random.default_rng(seed)
        device = units.devices((units.allowed * rng.random(units.allowed.shape)).argmax(axis=1))
        start = problem.placement(device)
        keyed = KeyedProblem(problem, start, 0.05)
        again = keyed.placement(keyed.keys_of(start))
        assert again.device.tolist() == device.tolist()
        problem.check(again)


def test_an_individual_costs_what_the_simulator_says() -> None:
    seen = 0
    for seed in range(120):
        problem, _ = nasty(seed)
        if problem.cluster.has_shared_buses:
            continue
        seen += 1
        rng = np.random.default_rng(seed)
        keyed = KeyedProblem(
            problem, problem.placement(np.zeros(problem.graph.num_ops, np.int32)), 0.5
        )
        keys = rng.random(2 * keyed.units.num_units)
        step, excess = keyed.judge(keys)
        timeline = simulate(problem, keyed.placement(keys))
        beyond = np.maximum(timeline.peak_memory - timeline.capacity, 0) / (timeline.capacity + 1.0)
        assert (step, excess) == (timeline.step_time, pytest.approx(beyond.sum(), rel=1e-12))
    assert seen > 40


def test_what_fits_is_preferred() -> None:
    problem = training_like(60, 2, seed=1)
    loose = found(problem, 3000)
    memory = int(1.02 * loose.best.peak_memory.min())
    devices = tuple(replace(device, memory=memory) for device in problem.cluster.devices)
    tight = Problem(problem.graph, replace(problem.cluster, devices=devices), problem.costs)
    assert not simulate(tight, loose.best.placement).feasible
    assert found(tight, 3000).best.feasible
