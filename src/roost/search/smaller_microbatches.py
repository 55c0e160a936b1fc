"""A fix where no placement of a step fits: smaller microbatches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from roost.core.problem import Problem
from roost.errors import Infeasible, InputError
from roost.search.infeasible import nothing_found
from roost.search.microbatches import MicrobatchResult, solve_microbatches

_log = logging.getLogger(__name__)

_TRIALS, _SECONDS = 300, 5.0  # for each number of microbatches
_MOST = 4  # numbers that are tried


def divisors(batch: int) -> list[int]:
    """The numbers of microbatches of one size that a batch can be cut into."""
    return [count for count in range(1, batch + 1) if batch % count == 0]


def none_fits(
    found: MicrobatchResult,
    batch: int | None,
    problem_of: Callable[[int], Problem],
    **settings: Any,
) -> Infeasible:
    """The error for a search whose best trial does not fit.

    `microbatches` of the error is a number of microbatches with which a short search finds a fit.
    `settings` are those of `solve_microbatches`. An interrupted search is not followed by another.
    """
    error = nothing_found(found.problem, found.result)
    if batch is not None:  # a share of the activations says nothing of gradients that are kept
        error.args = (str(error).partition(", or activations of")[0],)
    most = max(row.count for row in found.rows)
    if batch is None or found.result.ended in ("interrupted", "stopped"):
        return error
    larger = [count for count in divisors(batch) if count > most]
    tried = sorted({*larger[: _MOST - 1], *larger[-1:]})
    if tried:
        _log.info("nothing fits; looking for smaller microbatches that do")
    for count in tried:
        limits = {"trials": _TRIALS, "seconds": _SECONDS} | settings
        try:
            other = solve_microbatches(problem_of, (count,), **limits)
        except InputError:  # such a model cannot be captured at that size
            return error
        if other.best.feasible:
            error.microbatches = count
            size = batch // count
            error.args = (f"{error}. It fits in {count} microbatches of {size} instead of {most}",)
            return error
    error.args = (f"{error}. Microbatches of one sample do not fit either",)
    return error
