"""Search for the best number of microbatches and the best placement of the unrolled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roost.core.problem import Problem
from roost.core.trial import Result
from roost.cost_models import estimate
from roost.placers import Placer
from roost.search.evaluate import Progress
from roost.search.solve import search
from roost.transforms.microbatch import Microbatch, Microbatched


@dataclass(frozen=True)
class MicrobatchRow:
    """The best step of one placer at one number of microbatches."""

    count: int
    placer: str
    step_time: float  # seconds
    feasible: bool


@dataclass(frozen=True, eq=False)
class MicrobatchResult:
    """The best number of microbatches, and the result of its search."""

    count: int
    microbatched: Microbatched
    problem: Problem  # of the unrolled graph
    result: Result
    rows: tuple[MicrobatchRow, ...]


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
    shared_inputs: tuple[str, ...] = (),
) -> MicrobatchResult:
    """Search each count with an equal share of the budget, and keep the best."""
    share = None if seconds is None else seconds / len(counts)
    tries = None if trials is None else max(1, trials // len(counts))
    best: MicrobatchResult | None = None
    rows: list[MicrobatchRow] = []
    for count in counts:
        of_one = problem_of(count)
        settings = Microbatch(count, shared_inputs=shared_inputs, batch_statistics=batch_statistics)
        made = settings.apply(of_one.graph)
        estimated = estimate(made.graph, of_one.cluster).op_time
        problem = Problem(made.graph, of_one.cluster, made.op_time(of_one.op_time, estimated))  # type: ignore[arg-type]
        result = search(problem, placer, share, tries, seed, on_trial)
        for trial in (result.best, *result.baselines.values()):
            rows.append(MicrobatchRow(count, trial.placer, trial.step_time, trial.feasible))
        found = MicrobatchResult(count, made, problem, result, ())
        if best is None or result.best.better_than(best.result.best):
            best = found
    assert best is not None
    return MicrobatchResult(best.count, best.microbatched, best.problem, best.result, tuple(rows))
