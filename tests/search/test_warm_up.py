"""What is compiled and imported once in a process comes before the budget, and no placer can spend
long on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from engine import Clock
from numba.core import event

from roost import catalog
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers.auto import Auto
from roost.search import warm_up
from roost.search.solve import search


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """As in a new process."""
    seen: set[object] = set()
    monkeypatch.setattr(warm_up, "_warm", seen)
    return seen


@dataclass(frozen=True)
class Asked:
    """A placer that looks at what it is given."""

    look: Callable[[Problem, Evaluate], None] = field(repr=False)
    starts: tuple[str, ...] = ()

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        self.look(problem, evaluate)
        return problem.placement(np.zeros(problem.graph.num_ops, np.int32))


def test_it_is_once_in_a_process_and_short_whatever_the_budget() -> None:
    left: list[tuple[str, float, float]] = []

    def look(problem: Problem, evaluate: Evaluate) -> None:
        left.append((problem.graph.name, evaluate.seconds_left, evaluate.trials_left))

    for _ in range(2):
        search(warm_up.small_problem(), Asked(look), trials=10**9, prove=False)
    assert [trials for _, _, trials in left] == [1000, 10**9, 10**9]
    assert 0 < left[0][1] <= 0.5


def test_loops_for_crossings_that_keep_both_ends_busy_are_warmed_up_by_themselves() -> None:
    seen: list[bool] = []
    asked = Asked(lambda problem, evaluate: seen.append(problem.cluster.keeps_busy))
    for busy in (False, True, True, False):
        warm_up.warm_up(asked, busy=busy)
    assert seen == [False, True]


def test_the_clock_stands_still_while_something_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, left = Clock(), []
    monkeypatch.setattr(event, "timer", clock)
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=clock))

    def look(problem: Problem, evaluate: Evaluate) -> None:
        with event.trigger_event("numba:compile"):
            clock.now += 30
        left.append(evaluate.seconds_left)
        clock.now += 0.3
        left.append(evaluate.seconds_left)

    warm_up.warm_up(Asked(look))
    assert left == pytest.approx([0.5, 0.2])


def test_those_that_a_placer_asks_are_warm_too(cold: set[object]) -> None:
    warm_up.warm_up(
        Asked(lambda problem, evaluate: None, starts=("heft", "metis", "no such placer"))
    )
    assert {catalog.find("placers", name) for name in ("heft", "metis")} <= cold


def test_auto_asks_every_baseline_and_comes_to_its_own_search(
    cold: set[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from roost.placers import auto

    ran: list[bool] = []

    class Watched(auto.Population):
        def run(self, starts: list[Placement]) -> None:
            ran.append(True)
            super().run(starts)

    monkeypatch.setattr(auto, "Population", Watched)
    warm_up.warm_up(Auto())
    assert ran == [True]
    assert {catalog.find("placers", name) for name in Auto().baselines} <= cold


def test_a_proof_is_warmed_up_where_one_is_asked_for(cold: set[object]) -> None:
    placer = Asked(lambda problem, evaluate: None)
    warm_up.warm_up(placer)
    assert warm_up.bound not in cold
    warm_up.warm_up(placer, prove=True)
    assert warm_up.bound in cold
