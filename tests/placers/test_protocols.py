"""Minimal doubles of what a placer gets, and of the optional members that it may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest

import roost
from roost import catalog
from roost.core.trial import Trial, best_of
from roost.errors import BudgetSpent
from roost.placers import (
    AsksBaselines,
    Evaluate,
    LearnsFamily,
    OffersSeveral,
    asked_by,
    parts_of,
    several_of,
    weights_of,
)
from roost.placers.toolkit import go_downhill
from roost.search.simulating import Simulating
from roost.testing.tiny_problems import tiny_problem


class Simulates(Evaluate):
    """The least that an `evaluate` needs: the call, `rng` and `best`."""

    best: Trial | None = None

    def __init__(self, problem: roost.Problem, most: int) -> None:
        self.source, self.left, self.rng = Simulating(problem, 1), most, np.random.default_rng(0)

    def __call__(self, placements: Sequence[roost.Placement]) -> list[Trial]:
        if len(placements) > self.left:
            raise BudgetSpent("no trials are left")
        self.left -= len(placements)
        trials = self.source.trials(placements)
        self.best = best_of([*trials, *([self.best] if self.best else [])])
        return trials


@pytest.mark.parametrize("name", ["single", "heft", "rules", "contiguous", "random", "expert"])
def test_a_placer_runs_with_the_least_evaluate(name: str) -> None:
    problem = tiny_problem("unlike_devices")
    evaluate = Simulates(problem, 500)
    try:
        placement = catalog.find("placers", name)().place(problem, evaluate)
    except BudgetSpent:
        placement = evaluate.best.placement
    assert problem.check(placement)
    assert evaluate.best.feasible


def test_a_compiled_loop_runs_with_the_least_evaluate() -> None:
    problem = tiny_problem("unlike_devices")
    evaluate = Simulates(problem, 500)
    start = problem.placement(problem.allowed.argmax(axis=1))
    best = go_downhill(problem, evaluate, start)
    assert evaluate.best.step_time == evaluate([best])[0].step_time


def test_the_defaults_suit_a_search_without_limits() -> None:
    evaluate = Simulates(tiny_problem("chain"), 1)
    assert evaluate.seconds_left == evaluate.trials_left == evaluate.simulations_left == inf
    assert evaluate.named("other", trials=1) is evaluate
    assert evaluate.kept() is None


class OnlyPlaces:
    """The least that a placer needs."""

    def place(self, problem: roost.Problem, evaluate: Evaluate) -> roost.Placement:
        return problem.placement(problem.allowed.argmax(axis=1))


def test_a_placer_needs_nothing_but_place() -> None:
    problem, placer = tiny_problem("chain"), OnlyPlaces()
    evaluate = Simulates(problem, 1)
    assert several_of(placer, problem, evaluate) == [placer.place(problem, evaluate)]
    assert asked_by(placer) == parts_of(placer) == ()
    assert weights_of(placer) is None
    assert not isinstance(placer, AsksBaselines | OffersSeveral | LearnsFamily)


def test_optional_members_are_seen() -> None:
    problem = tiny_problem("chain")

    @dataclass(frozen=True)
    class Full(OnlyPlaces):
        baselines: tuple[str, ...] = ("single",)
        starts: tuple[str, ...] = ("rules",)
        weights: str | None = "policy.safetensors"
        parts: tuple[str, ...] = ("imitation",)

        def several(self, problem: roost.Problem, evaluate: Evaluate) -> list[roost.Placement]:
            return [problem.placement(problem.allowed.argmax(axis=1), "rank")]

    placer = Full()
    assert [each.order for each in several_of(placer, problem, Simulates(problem, 1))] == ["rank"]
    assert asked_by(placer) == ("single", "rules")
    assert weights_of(placer) == "policy.safetensors"
    assert parts_of(placer) == ("imitation",)


def test_weights_that_are_no_path_are_the_placers_own_affair() -> None:
    class Odd(OnlyPlaces):
        weights = np.zeros(3)

    assert weights_of(Odd()) is None
