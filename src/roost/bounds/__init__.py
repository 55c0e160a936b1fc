"""Problem -> a lower bound on the step time of every placement in every order, and its kind of
proof.

Each file has one kind of bound. They hold for whatever the simulator allows: parameters anywhere,
any window, any order; for placements that fit, unless it is proved that none does.
"""

from __future__ import annotations

import time

from roost.bounds._relaxed import Relaxed
from roost.bounds.contradiction import contradiction
from roost.bounds.exact import exact_bound, installed
from roost.bounds.heads_tails import Ends, through
from roost.bounds.interval import interval
from roost.bounds.memory import nothing_fits
from roost.bounds.path import critical_path
from roost.bounds.streaming import streaming
from roost.bounds.work import work
from roost.core.problem import Problem
from roost.core.trial import Bound
from roost.errors import InputError

__all__ = ["bound", "nothing_fits"]

_SHAVED = 1e-9  # of a bound: sums are rounded here in another order than in the simulator
_EXACT_SECONDS = 2.0  # below which the exact solver is not worth its start
_EXACT_OPS = 400  # that take time; above this it proves nothing more in a minute


def bound(problem: Problem, seconds: float = 1.0, upper: float | None = None) -> Bound:
    """Return the best bound that can be proved in about so many seconds.

    `upper` is a step time that some placement is known to reach: with it the search need not look
    beyond, and a bound that meets it is the end of all search.
    """
    if not isinstance(problem, Problem):
        raise InputError(
            f"bound takes a problem, not {type(problem).__name__}; roost.estimate makes one of a "
            f"graph"
        )
    stop = time.monotonic() + seconds
    fits = nothing_fits(problem) is None  # else the bound is for placements that do not
    relaxed = Relaxed.of(problem, memory=fits)
    ends = Ends.of(relaxed)
    found = {
        "critical path": critical_path(relaxed),
        "work over speed": work(relaxed),
        "heads and tails": float(through(relaxed, ends).min(axis=1).max()),
        "interval": interval(relaxed, ends),
        "streaming": streaming(relaxed) if fits else 0.0,
    }
    best = max(found.values())
    known = min(step for step in (upper, _one_device(relaxed), float("inf")) if step is not None)
    if best < known < float("inf") and time.monotonic() < stop:
        found["contradiction"] = contradiction(relaxed, best, known, (stop - time.monotonic()) / 2)
    best = max(found.values())
    optimal = False
    busy = int((relaxed.time.min(axis=1) > 0).sum())
    left = stop - time.monotonic()
    worthwhile = fits and busy <= _EXACT_OPS and (upper is None or best < upper)
    if worthwhile and left > _EXACT_SECONDS and installed():
        found["cp-sat"], optimal = exact_bound(problem, left, upper)
    proof = "cp-sat, optimal" if optimal else max(found, key=lambda kind: found[kind])
    return Bound(max(found.values()) * (1 - _SHAVED), proof)


def _one_device(relaxed: Relaxed) -> float | None:
    """Seconds of everything on the best device; None where no device may have it all."""
    total = float(relaxed.busy.sum(axis=0).min())
    return total if total < float("inf") else None
