"""STANDIN: the search over the number of microbatches and the placement of their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.core.trial import Result
from roost.cost_models import estimate
from roost.placers import Placer
from roost.search.evaluate import Progress
from roost.search.solve import solve
from roost.transforms.microbatch import Microbatch, Microbatched


@dataclass(frozen=True, eq=False)
class MicrobatchResult:
    """The best placement of the best number of microbatches."""

    count: int
    microbatched: Microbatched
    problem: Problem  # of the unrolled graph
    result: Result


def solve_microbatches(
    problem_of: Callable[[int], Problem],
    counts: Sequence[int],
    *,
    seconds: float | None = None,
    trials: int | None = None,
    seed: int = 0,
    placer: str | Placer = "auto",
    on_trial: Callable[[Progress], object] | None = None,
    batch_statistics: bool = False,
    shared_inputs: Sequence[str] = (),
) -> MicrobatchResult:
    """Search for the best placement of each number of microbatches; give the best of all."""
    best: MicrobatchResult | None = None
    for count in counts:
        problem = problem_of(count)
        settings = Microbatch(
            count, shared_inputs=tuple(shared_inputs), batch_statistics=batch_statistics
        )
        made = settings.apply(problem.graph)
        unrolled = problem
        if count > 1:
            estimated = estimate(made.graph, problem.cluster).op_time
            costs = Costs(made.op_time(problem.op_time, estimated), problem.costs.source)
            unrolled = Problem(made.graph, problem.cluster, costs)
        share = None if seconds is None else seconds / len(counts)
        result = solve(unrolled, placer, share, trials, seed, on_trial)
        if best is None or result.best.better_than(best.result.best):
            best = MicrobatchResult(count, made, unrolled, result)
    assert best is not None
    return best
