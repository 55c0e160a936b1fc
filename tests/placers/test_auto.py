"""The default placer: never worse than what it asked, with whatever is installed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layered import machine, model, timed

from roost import catalog
from roost.core.problem import Problem
from roost.errors import BudgetSpent, InputError, MissingExtra
from roost.placers._annealing.population import Heat
from roost.placers.auto import Auto
from roost.search.solve import search
from roost.testing.problems import training_like
from support.nasty import nasty


def test_it_is_never_worse_than_any_placer_it_asks() -> None:
    for seed in range(8):
        problem, _ = nasty(seed)
        result = search(problem, "auto", trials=3000, seed=seed, prove=False)
        assert set(result.baselines) >= {"single", "rules"}
        for name in Auto().baselines:
            alone = search(problem, name, trials=3000, seed=seed, prove=False).best
            if name in result.baselines:
                assert not alone.better_than(result.baselines[name]), name  # it got its full say
                assert not alone.better_than(result.best), name


def test_it_is_better_than_all_of_them_where_there_is_something_to_gain() -> None:
    result = search(training_like(100, 2, seed=1), "auto", trials=40_000, prove=False)
    assert set(result.baselines) == set(Auto().baselines)
    assert result.best.step_time < 0.97 * min(
        trial.step_time for trial in result.baselines.values()
    )


def test_with_a_small_budget_it_asks_fewer_and_still_answers() -> None:
    problem = training_like(40, 2, seed=1)
    for trials in (1, 3, 10, 100, 400):
        result = search(problem, "auto", trials=trials, prove=False)
        assert result.num_trials <= trials
        assert result.best.feasible
        assert "single" in result.baselines
    assert len(search(problem, "auto", trials=100, prove=False).baselines) < len(Auto().baselines)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if these packages were not installed."""
    for package in packages:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    found = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return None if name.split(".")[0] in packages else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_without_the_extras_it_works_and_says_what_it_went_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "ortools", "pyscotch", "pymetis")
    problem = training_like(40, 2, seed=1)
    for name in ("scotch", "mincut", "metis", "cpsat"):
        with pytest.raises(MissingExtra, match=r"pip install 'roost\["):
            search(problem, name, trials=50, prove=False)
    with caplog.at_level(logging.INFO, "roost.placers.auto"):
        result = search(problem, "auto", trials=4000, prove=False)
    assert set(result.baselines) == set(Auto().baselines) - {"scotch", "mincut", "metis"}
    assert result.best.feasible
    assert {message.split(":")[0] for message in caplog.messages} == {
        "without metis",
        "without scotch",
        "without mincut",
    }


def test_the_exact_placer_is_asked_where_there_is_time_and_the_graph_is_small() -> None:
    small = timed(model(["a", "b", "c"], updates=False), machine(10_000, 10_000))
    result = search(
        small,
        Auto(threads=1),
        seconds=2.6,
        on_trial=lambda p: p.trial.placer == "cpsat",
        prove=False,
    )
    assert "cpsat" in result.baselines
    assert result.ended == "stopped"


def test_without_ortools_there_is_no_exact_placer(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    without(monkeypatch, "ortools")
    small = timed(model(["a", "b", "c"], updates=False), machine(10_000, 10_000))
    with caplog.at_level(logging.INFO, "roost.placers.auto"):
        result = search(
            small,
            Auto(threads=1),
            seconds=2.6,
            on_trial=lambda p: p.trial.placer == "auto",
            prove=False,
        )
    assert (result.ended, "cpsat" in result.baselines) == ("stopped", False)
    assert any(message.startswith("without cpsat") for message in caplog.messages)


def test_a_baseline_that_refuses_the_model_is_left_out() -> None:
    problem = training_like(40, 2, seed=1)
    with pytest.raises(InputError):
        search(problem, "published", trials=50, prove=False)
    result = search(problem, Auto(baselines=("published", "single")), trials=500, prove=False)
    assert set(result.baselines) == {"single"}


def test_a_baseline_that_spends_all_ends_the_search_with_its_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Greedy:
        def place(self, problem: Problem, evaluate: Any) -> Any:
            while True:
                evaluate([problem.placement(evaluate.rng.integers(0, 2, problem.graph.num_ops))])

    find = catalog.find
    monkeypatch.setattr(
        catalog, "find", lambda folder, name: Greedy if name == "heft" else find(folder, name)
    )
    problem = training_like(40, 2, seed=1)
    result = search(problem, Auto(baselines=("single", "heft")), trials=200, prove=False)
    assert (result.ended, result.num_trials) == ("budget", 200)
    assert result.best.step_time <= result.baselines["single"].step_time


def test_a_part_of_the_budget_that_is_spent_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        def place(self, problem: Problem, evaluate: Any) -> Any:
            raise BudgetSpent("its part is spent")

    find = catalog.find
    monkeypatch.setattr(
        catalog, "find", lambda folder, name: Slow if name == "cpsat" else find(folder, name)
    )
    small = timed(model(["a", "b", "c"], updates=False), machine(10_000, 10_000))
    result = search(
        small,
        Auto(threads=1),
        seconds=2.6,
        on_trial=lambda p: p.trial.placer == "auto",
        prove=False,
    )
    assert result.ended == "stopped"


def test_where_nothing_fits_it_is_nearest_to_fitting() -> None:
    problem = training_like(40, 2, seed=1)
    devices = tuple(replace(device, memory=100_000) for device in problem.cluster.devices)
    tight = Problem(problem.graph, replace(problem.cluster, devices=devices), problem.costs)
    result = search(tight, "auto", trials=6000, prove=False)
    assert not result.best.feasible
    assert result.best.missing_bytes <= min(
        trial.missing_bytes for trial in result.baselines.values()
    )
    assert result.best.missing_bytes == int(np.maximum(result.best.peak_memory - 100_000, 0).sum())


def test_its_settings_are_its_heat() -> None:
    problem = training_like(100, 2, seed=1)
    hot = search(problem, Auto(heat=Heat(hot=0.5, warm=0.5, cold=0.5)), trials=20_000, prove=False)
    cool = search(problem, Auto(), trials=20_000, prove=False)
    assert cool.best.step_time < hot.best.step_time
