"""The search over numbers of microbatches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import roost
from roost.errors import InputError
from roost.search.evaluate import Progress
from roost.search.microbatches import (
    MicrobatchResult,
    single_device,
    solve_microbatches,
    unrolled_problem,
)
from roost.transforms.microbatch import Microbatch

sys.path.insert(0, str(Path(__file__).parents[1] / "placers"))

from layered_step import layered_step, machine, step_problem

BATCH = 8


def problem_of(count: int, memory: int = 10**6) -> roost.Problem:
    """Layers whose work and activations are in proportion to the microbatch."""
    share = BATCH // count
    base = step_problem(layered_step(activation=100 * share), machine(4, memory))
    return roost.Problem(base.graph, base.cluster, base.op_time * share)


def found(memory: int = 10**6, **more: object) -> MicrobatchResult:
    settings = {"trials": 4000, "threads": 1, "counts": (1, 2, 4, 8)} | more
    return solve_microbatches(lambda count: problem_of(count, memory), **settings)


def test_the_answer_is_no_worse_than_any_placer_with_any_number():
    result = found()
    assert result.best.feasible
    assert result.best.step_time <= min(row.step_time for row in result.rows if row.feasible)
    assert {row.count for row in result.rows} > {1, 4}
    single = next(row for row in result.rows if row.placer == "single" and row.count == 1)
    assert result.best.step_time <= 0.27 * single.step_time


def test_the_answer_is_a_placement_of_its_problem():
    result = found()
    assert result.problem.graph == result.microbatched.graph
    assert result.count == result.microbatched.count
    again = roost.simulate(result.problem, result.best.placement)
    assert again.step_time == result.best.step_time
    assert result.result.bound.step_time <= result.best.step_time


def test_equal_trials_give_equal_answers():
    one, other = found(trials=1500, seed=3), found(trials=1500, seed=3)
    assert one.best.placement.digest == other.best.placement.digest
    assert one.rows == other.rows


def test_the_whole_batch_is_the_answer_where_microbatches_do_not_pay():
    def slow(count: int) -> roost.Problem:
        base = step_problem(layered_step(), machine(2, bandwidth=1.0))
        return base  # a microbatch takes as long as the batch

    result = solve_microbatches(slow, (1, 2, 4), trials=1000, threads=1)
    assert result.count == 1
    assert result.problem.graph == result.microbatched.original


def test_microbatches_are_the_answer_where_the_batch_does_not_fit():
    whole = roost.solve(problem_of(1), "single", trials=10).best
    result = found(memory=int(0.5 * whole.peak_memory.max()))
    assert result.best.feasible
    assert result.count > 1


def test_layers_that_see_the_batch_are_refused():
    builder = roost.GraphBuilder()
    builder.add("x", "input", phase="input", output_bytes=4)
    builder.add("norm", "batch_norm", ["x"], flop=1.0, output_bytes=4, module="stem.norm")
    problem = roost.estimate(builder.freeze(), machine())
    with pytest.raises(InputError, match=r"stem.norm.*batch_statistics"):
        solve_microbatches(lambda count: problem, (1, 2), trials=10)


@pytest.mark.parametrize("counts", [(), 4, (0,), (1.5,)])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(InputError, match="count"):
        solve_microbatches(problem_of, counts, trials=10)


def test_another_placer_searches_the_step_of_each_number():
    result = found(placer="single", counts=(1, 2))
    assert {(row.count, row.placer) for row in result.rows} == {(1, "single"), (2, "single")}
    assert result.result.placer == "single"


def test_a_search_that_is_stopped_gives_the_best_so_far():
    seen = []

    def stop(progress: object) -> bool:
        seen.append(progress)
        return len(seen) > 3

    result = found(on_trial=stop)
    assert result.result.ended == "stopped"
    assert result.best.feasible
    assert len(seen) <= 6


@pytest.mark.parametrize("counts", [(4,), (2, 4), (1, 2)])
def test_the_smallest_budget_has_an_answer(counts: tuple[int, ...]) -> None:
    assert found(trials=1, counts=counts).best.feasible


def test_ctrl_c_while_starts_are_simulated_keeps_the_best_so_far() -> None:
    def stop_at_a_start(progress: Progress) -> None:
        if progress.trial.placer in ("pipeline", "data_parallel", "hybrid"):
            raise KeyboardInterrupt

    result = found(on_trial=stop_at_a_start)
    assert result.best.feasible
    assert result.result.ended == "interrupted"


def test_what_is_told_is_the_best_over_all_numbers() -> None:
    told: list[Progress] = []
    found(trials=1500, on_trial=told.append)
    steps = [each.best.step_time for each in told if each.best.feasible]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_one_device_is_compared_with_the_fewest_microbatches_that_fit_there() -> None:
    def heavy(count: int) -> roost.Problem:
        share = BATCH // count
        base = step_problem(layered_step(activation=1000 * share), machine(4, 24_000))
        return roost.Problem(base.graph, base.cluster, base.op_time * share)

    result = solve_microbatches(heavy, (1, 2, 4, 8), trials=1000, threads=1)
    single = [row.count for row in result.rows if row.placer == "single" and row.feasible]
    alone = [count for count in (1, 2, 4, 8) if fits_alone(heavy(count), count)]
    assert min(single) == min(alone) > 1


def fits_alone(base: roost.Problem, count: int) -> bool:
    problem = unrolled_problem(base, Microbatch(count).apply(base.graph))
    return single_device(problem) is not None
