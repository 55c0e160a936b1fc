"""A fix where nothing fits: the memory that is missing, and a batch that surely fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roost.cli import _console
from roost.cli._model import ModelSpec

if TYPE_CHECKING:
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.core.trial import Result
    from roost.errors import Infeasible

# Larger shares of the activations to try, and seconds and trials for each.
_LARGER = (2.0, 1.5, 1.25, 1.1)
_LARGER_BUDGET = (1.0, 2000)


def nothing_fits(
    problem: Problem, result: Result, model: ModelSpec | None, proof: Infeasible | None
) -> tuple[Infeasible, int | None]:
    """The error, and a batch that fits, if one is known."""
    from roost.search.infeasible import no_run, nothing_found

    error = nothing_found(problem, result, no_run(result) if proof is None else str(proof))
    batch = None if error.activation_share is None else _smaller_batch(problem, result, model)
    if batch is not None:
        # The batch replaces the hint on activations.
        error.args = (
            f"{str(error).partition(', or activations of')[0]}; batch {batch} surely fits",
        )
    return error, batch


def _smaller_batch(problem: Problem, result: Result, model: ModelSpec | None) -> int | None:
    """A simulated batch that fits; None if there is none, or the model has no batch."""
    from dataclasses import replace

    from roost.cost_models import estimate
    from roost.simulator.compiled import simulate

    batch = None if model is None else model.batch
    if model is None or batch is None:
        return None
    with _console.working("looking for a batch that fits"):
        share, roomy = _roomier(problem, result)
        placement = replace(roomy, graph="")
        for less in (1.0, 0.95, 0.85, 0.7):  # not everything grows in proportion to the batch
            size = int(batch * share * less)
            if size < 1:
                break
            graph = model.with_batch(size).capture()
            if graph.num_ops != problem.graph.num_ops:
                break  # the placement is for another graph
            if simulate(estimate(graph, problem.cluster), placement).feasible:
                return size
    return None


def _roomier(problem: Problem, result: Result) -> tuple[float, Placement]:
    """The largest share of the activations that fits, and its placement, by the same placer."""
    from roost.search.infeasible import roomiest, shrunk
    from roost.search.solve import search

    roomy = roomiest(problem, result)
    assert roomy is not None
    for more in _LARGER:
        smaller = shrunk(problem, min(1.0, roomy[0] * more))
        best = search(smaller, result.placer, *_LARGER_BUDGET, seed=result.seed, prove=False).best
        if best.feasible:
            return min(1.0, roomy[0] * more), best.placement
    return roomy
