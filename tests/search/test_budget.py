"""Budgets: what they refuse, how they are counted, and how they are divided."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
from engine import Clock, Counting, Told, fork_join, placements, searching

from roost.errors import BudgetSpent, InputError
from roost.placers import Round
from roost.search.budget import Budget
from roost.search.solve import search, solve


@pytest.mark.parametrize("limit", ["trials", "seconds"])
@pytest.mark.parametrize("value", [-1, -0.5, nan, True, False, "ten", None, 1j])
def test_what_is_no_budget_is_named(limit: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{limit} is .*must be a number that is not negative"):
        Budget(**{limit: value})


@pytest.mark.parametrize(
    "given", [{"trials": 0}, {"seconds": 0}, {"trials": 0.5}, {"trials": 0, "seconds": 5}]
)
def test_a_budget_of_nothing_is_refused_in_words(given: dict[str, float]) -> None:
    with pytest.raises(
        InputError, match="evaluates nothing; give at least one trial and some time"
    ):
        Budget(**given)
    with pytest.raises(InputError, match="evaluates nothing"):
        solve(fork_join(), "single", **given)  # type: ignore[arg-type]


def test_trials_are_whole() -> None:
    with pytest.raises(InputError, match=r"trials is 1\.5; it must be a whole number"):
        solve(fork_join(), "single", trials=1.5)  # type: ignore[arg-type]
    assert Budget(trials=2.0).trials_left == 2


def test_seconds_are_those_since_it_was_made() -> None:
    clock = Clock()
    budget = Budget(seconds=10, clock=clock)
    clock.now += 4
    assert (budget.elapsed, budget.seconds_left, budget.is_spent) == (4, 6, False)
    clock.now += 6
    assert (budget.elapsed, budget.is_spent) == (10, True)


def test_trials_are_counted_by_whoever_evaluates() -> None:
    budget = Budget(trials=3)
    assert (budget.trials_left, budget.seconds_left) == (3, inf)
    budget.num_trials += 3
    assert budget.is_spent


def test_what_a_journal_has_took_the_seconds_that_it_says() -> None:
    clock = Clock()
    budget = Budget(seconds=10, clock=clock)
    budget.catch_up(7)
    assert budget.elapsed == 7
    budget.catch_up(3)  # never back
    assert budget.elapsed == 7
    clock.now += 2
    assert budget.elapsed == 9


def test_as_much_of_a_batch_is_evaluated_as_there_are_trials() -> None:
    problem = fork_join()
    search, evaluate = searching(problem, trials=5)
    batch = placements(problem, 8)
    with pytest.raises(BudgetSpent, match="5 of 8 placements"):
        evaluate(batch)
    assert search.source.asked == [placement.digest for placement in batch[:5]]  # type: ignore[attr-defined]
    assert (search.budget.num_trials, evaluate.trials_left) == (5, 0)
    assert search.best is not None
    with pytest.raises(BudgetSpent, match="0 of 1"):
        evaluate(batch[:1])


def test_a_batch_that_just_fits_is_returned_in_its_order() -> None:
    problem = fork_join()
    batch = placements(problem, 5)
    _, evaluate = searching(problem, trials=5)
    assert [trial.placement for trial in evaluate(batch)] == batch
    assert evaluate([]) == []


def test_as_much_of_a_batch_is_evaluated_as_there_is_time_for() -> None:
    problem, clock = fork_join(), Clock()
    search, evaluate = searching(problem, clock, each=1.0, seconds=3)
    # A trial that takes a second is a slice of its own.
    with pytest.raises(BudgetSpent, match="3 of 8"):
        evaluate(placements(problem, 8))
    assert search.budget.num_trials == 3
    assert evaluate.seconds_left == 0


def test_short_trials_are_evaluated_in_slices_of_about_a_fifth_of_a_second() -> None:
    problem, clock = fork_join(), Clock()
    search, evaluate = searching(problem, clock, each=0.05, seconds=0.3)
    with pytest.raises(BudgetSpent, match="8 of 40"):
        evaluate(placements(problem, 40))
    assert search.budget.elapsed == pytest.approx(0.4)


def test_no_round_is_begun_when_the_budget_is_spent() -> None:
    problem, clock = fork_join(), Clock()
    batch = placements(problem, 2)
    _, evaluate = searching(problem, clock, trials=4, seconds=5)
    evaluate.round(lambda: Round(batch[:1], simulations=4))
    with pytest.raises(BudgetSpent):
        evaluate.round(lambda: pytest.fail("a round was begun"))
    _, evaluate = searching(problem, clock, trials=4, seconds=5)
    evaluate(batch[:1])
    clock.now += 5
    with pytest.raises(BudgetSpent):
        evaluate.round(lambda: pytest.fail("a round was begun"))


def test_what_comes_first_is_evaluated_however_late_it_comes() -> None:
    problem, clock = fork_join(), Clock()
    batch = placements(problem, 3)
    search, evaluate = searching(problem, clock, seconds=5)
    clock.now += 6
    with pytest.raises(BudgetSpent, match="1 of 3"):
        evaluate(batch)
    with pytest.raises(BudgetSpent, match="0 of 1"):
        evaluate(batch[1:2])
    assert search.best is not None
    assert search.best.placement.digest == batch[0].digest
    search, evaluate = searching(problem, clock, seconds=5)
    clock.now += 6
    evaluate.round(lambda: Round(batch[:1], simulations=4))
    with pytest.raises(BudgetSpent):
        evaluate.round(lambda: pytest.fail("a round was begun"))


def test_the_simulations_of_a_round_are_counted_and_its_placements_are_not() -> None:
    problem = fork_join()
    search, evaluate = searching(problem, trials=1000)
    evaluate.round(lambda: Round(placements(problem, 3), simulations=700))
    assert (search.budget.num_trials, evaluate.trials_left) == (700, 300)


def test_a_placer_that_is_asked_by_another_spends_at_most_its_part() -> None:
    problem, clock = fork_join(), Clock()
    search, evaluate = searching(problem, clock, trials=10, seconds=100)
    batch = placements(problem, 12)
    part = evaluate.named("part", trials=3, seconds=10)
    assert (part.trials_left, part.seconds_left) == (3, 10)
    with pytest.raises(BudgetSpent):
        part(batch[:4])
    assert (search.budget.num_trials, evaluate.trials_left) == (3, 7)
    clock.now += 10
    assert (part.seconds_left, evaluate.seconds_left) == (0, 90)
    inner = evaluate.named("outer", trials=5).named("inner", trials=50, seconds=500)
    assert (inner.trials_left, inner.seconds_left) == (5, 90)
    assert len(evaluate(batch[:7])) == 7
    assert inner.trials_left <= 0  # what others spend is gone for it too


def test_a_part_without_limits_has_those_of_the_whole() -> None:
    problem, clock = fork_join(), Clock()
    _, evaluate = searching(problem, clock, trials=10, seconds=8)
    part = evaluate.named("part")
    assert (part.trials_left, part.seconds_left) == (10, 8)
    with pytest.raises(BudgetSpent, match="10 of 12"):
        part(placements(problem, 12))


def test_a_search_ends_when_its_clock_says_so() -> None:
    problem, clock = fork_join(), Clock()

    def endless(problem: Any, evaluate: Any) -> Any:
        while True:
            evaluate(placements(problem, 1, seed=int(evaluate.rng.integers(1000))))

    source = Counting(problem, clock, 1.0)
    budget = Budget(seconds=7, clock=clock)
    result = search(problem, Told(endless), budget=budget, source=source, prove=False)
    assert (result.ended, result.num_trials, result.seconds) == ("budget", 7, 7)
    assert source.closed


@pytest.mark.parametrize("given", [np.int64(7), np.float32(7.0), 7])
def test_numbers_of_numpy_are_numbers(given: Any) -> None:
    assert Budget(trials=given).trials_left == 7


def test_more_than_a_float_holds_is_without_end() -> None:
    budget = Budget(trials=10**400, seconds=10**400)
    assert (budget.trials, budget.seconds) == (inf, inf)
