"""Downhill one move at a time: never worse, within its budget, the same when it goes on, also where
ops fetch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from layered import nastier

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Result
from roost.placers import Evaluate
from roost.placers._annealing.downhill import go_downhill
from roost.placers._shared.units import Units
from roost.search.solve import search
from roost.simulator.compiled import simulate
from roost.testing.problems import training_like


@dataclass(frozen=True, eq=False)
class Downhill:
    """From one placement downhill."""

    start: Placement

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        evaluate([self.start])
        go_downhill(problem, evaluate, self.start)
        assert evaluate.best is not None
        return evaluate.best.placement


def scattered(problem: Problem, tie: str = "readers") -> Placement:
    """Every unit somewhere."""
    units, rng = Units.of(problem, tie), np.random.default_rng(0)
    chosen = [rng.choice(np.flatnonzero(allowed)) for allowed in units.allowed]
    return problem.placement(units.devices(np.array(chosen)), "rank")


def found(problem: Problem, start: Placement, trials: int, **given: object) -> Result:
    return search(problem, Downhill(start), trials=trials, prove=False, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("tie", ["readers", "updates", "nothing"])
def test_it_is_better_than_where_it_began(tie: str) -> None:
    problem = training_like(60, 3)
    start = scattered(problem, tie)
    best = found(problem, start, 600).best
    assert best.step_time < 0.9 * simulate(problem, start).step_time
    assert best.step_time == simulate(problem, best.placement).step_time


@pytest.mark.parametrize("seed", range(12))
def test_it_is_never_worse_and_within_its_budget_with_all_that_may_go_wrong(seed: int) -> None:
    problem = nastier(seed)
    start = scattered(problem)
    first = search(problem, Downhill(start), trials=1, prove=False).best
    result = found(problem, start, 100)
    assert not first.better_than(result.best)
    assert result.num_trials <= 100


def test_it_is_better_than_annealing_with_few_trials() -> None:
    """What it is for: a thousand simulations are sixty moves where sixteen are simulated for
    each."""
    from roost.placers._annealing.population import Heat, Population

    @dataclass(frozen=True, eq=False)
    class Anneal(Downhill):
        def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
            evaluate([self.start])
            Population(problem, evaluate, Heat(members=1), 1).run([self.start])
            assert evaluate.best is not None
            return evaluate.best.placement

    ratio = []
    for seed in range(5):
        problem = training_like(300, 4, seed)
        start = scattered(problem)
        annealed = search(problem, Anneal(start), trials=1_000, prove=False).best.step_time
        ratio.append(found(problem, start, 1_000).best.step_time / annealed)
    assert np.exp(np.mean(np.log(ratio))) < 1.0


def test_a_run_that_was_cut_goes_on_to_the_same_end(tmp_path) -> None:  # type: ignore[no-untyped-def]
    problem = training_like(60, 3)
    start = scattered(problem)
    whole = found(problem, start, 4_000)
    found(
        problem,
        start,
        4_000,
        journal=tmp_path / "j.jsonl",
        on_trial=lambda progress: progress.num_trials > 1_500,
    )
    again = found(problem, start, 4_000, journal=tmp_path / "j.jsonl")
    assert again.best.placement.digest == whole.best.placement.digest
    assert again.num_trials == whole.num_trials
