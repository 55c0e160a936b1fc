"""The portfolio of random rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.errors import BudgetSpent, InputError
from roost.placers._listing.linear_rules import FEATURES
from roost.placers._listing.list_scheduler import SCALES, ListScheduler, named_rules
from roost.placers._shared.units import Units
from roost.placers.rules import Rules, portfolio, random_rules
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating
from roost.simulator.compiled import simulate
from roost.testing.problems import training_like


def searching(
    problem: Problem, seed: int = 0, trials: float = float("inf")
) -> tuple[Search, Evaluation]:
    search = Search(problem, Simulating(problem, 1), Budget(trials), seed)
    return search, Evaluation(search, "rules")


def test_equal_seeds_give_equal_rules_and_others_do_not() -> None:
    problem = training_like(200, 3)
    first, again, other = (
        Rules(num_rules=16).several(problem, searching(problem, seed)[1]) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_the_best_come_first_and_each_once() -> None:
    problem = training_like(200, 3)
    kept = portfolio(problem, np.random.default_rng(0), 40).best(12)
    times = [simulate(problem, placement).step_time for placement in kept]
    assert times == sorted(times)
    assert len({placement.digest for placement in kept}) == len(kept) == 12


def test_the_portfolio_is_no_worse_than_its_named_rules() -> None:
    problem = training_like(400, 4)
    placement = Rules(num_rules=16).place(problem, searching(problem)[1])
    scheduler = ListScheduler.of(Units.of(problem), "rank")
    for weights in ({"finish": 1.0}, {"in_line": 1.0}):
        schedules = scheduler.schedule(named_rules(scheduler.units, weights))
        assert simulate(problem, placement).step_time <= schedules.step_time.min()


def test_simulations_of_the_loop_are_counted() -> None:
    problem = training_like(100, 2)
    search, evaluate = searching(problem)
    Rules(num_rules=20, num_kept=3).place(problem, evaluate)
    assert search.budget.num_trials == 20


def test_a_small_budget_is_kept() -> None:
    problem = training_like(100, 2)
    search, evaluate = searching(problem, trials=3)
    Rules().place(problem, evaluate)
    assert search.budget.num_trials == 3
    with pytest.raises(BudgetSpent):
        Rules().place(problem, evaluate)


def test_attempts_at_fitting_are_counted_and_keep_to_the_budget() -> None:
    problem = training_like(100, 2)
    # Nothing fits.
    small = tuple(replace(device, memory=10**5) for device in problem.cluster.devices)
    problem = Problem(problem.graph, replace(problem.cluster, devices=small), problem.costs)
    for trials, spent in ((float("inf"), 8 * len(SCALES)), (17, 15), (3, 3)):
        search, evaluate = searching(problem, trials=trials)
        Rules(num_rules=8).place(problem, evaluate)
        assert search.budget.num_trials == spent


def test_every_feature_is_drawn_for_some_rule() -> None:
    problem = training_like(100, 3)
    small = tuple(replace(device, memory=10**7) for device in problem.cluster.devices)
    problem = Problem(problem.graph, replace(problem.cluster, devices=small), problem.costs)
    rules = random_rules(
        ListScheduler.of(Units.of(problem), "program"), np.random.default_rng(0), 200
    )
    assert (rules.weights >= 0).all()
    assert [FEATURES[n] for n in np.flatnonzero((rules.weights > 0).sum(axis=0) < 5)] == []
    assert (rules.usable > 0).all()


def test_a_step_that_only_fits_with_early_updates_is_found() -> None:
    builder = GraphBuilder("tight")
    for layer in range(8):
        builder.parameter(f"w{layer}", 100)
    previous = builder.add("x", output_bytes=1)
    for layer in range(8):
        previous = builder.add(f"f{layer}", inputs=[previous, f"w{layer}"], output_bytes=1)
    for layer in range(7, -1, -1):
        builder.add(f"dw{layer}", inputs=[previous], output_bytes=100, phase="backward")
        previous = builder.add(
            f"dx{layer}", inputs=[previous, f"w{layer}"], output_bytes=1, phase="backward"
        )
    for layer in range(8):
        builder.add(f"u{layer}", inputs=[f"w{layer}", f"dw{layer}"], phase="update")
    graph = builder.freeze()
    cluster = Cluster(
        "two", tuple(Device(f"d{d}", "cpu", 530) for d in range(2)), (Link("*", "*", 1e3, 0.1),)
    )
    times = np.where(graph.is_parameter, 0.0, 1.0)[:, None].repeat(2, axis=1)
    problem = Problem(graph, cluster, times)  # type: ignore[arg-type]
    placement = Rules().place(problem, searching(problem)[1])
    assert placement.order == "priority"
    assert simulate(problem, placement).feasible


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in ({"num_rules": 0}, {"num_kept": 0}, {"orders": ("fifo",)}, {"orders": ()}):
        with pytest.raises(InputError):
            Rules(**settings)  # type: ignore[arg-type]
