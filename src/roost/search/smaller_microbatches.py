"""A fix where no placement of a step fits: smaller microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from roost.core.problem import Problem
from roost.errors import Infeasible, InputError
from roost.search.infeasible import nothing_found
from roost.search.microbatches import MicrobatchResult, solve_microbatches

_TRIALS = 300  # for each number of microbatches


def fewest_that_fit(
    problem_of: Callable[[int], Problem], counts: Iterable[int], **settings: Any
) -> int | None:
    """The smallest of some numbers of microbatches with which a short search finds a fit."""
    for count in sorted(counts):
        try:
            found = solve_microbatches(problem_of, (count,), trials=_TRIALS, **settings)
        except InputError:  # such a model cannot be captured at that size
            return None
        if found.best.feasible:
            return count
    return None


def none_fits(found: MicrobatchResult, batch: int | None, fix: int | None) -> Infeasible:
    """The error for a search whose best trial does not fit; `fix` microbatches would."""
    error = nothing_found(found.problem, found.result)
    tried = sorted({row.count for row in found.rows})
    if fix is None:
        if batch is not None and batch in tried:
            error.args = (f"{error}. Microbatches of one sample do not fit either",)
        return error
    size = "" if batch is None else f", of {batch // fix} each,"
    text = str(error).partition(", or activations of")[0]
    error.args = (f"{text}. It fits in {fix} microbatches{size} instead of {max(tried)}",)
    return error
