"""Exact for small graphs: a constraint model of devices, ops and links, solved by CP-SAT of
OR-tools.

As in *Device Placement Optimization with Reinforcement Learning* (Mirhoseini et al. 2017) exact
methods are out of reach for whole networks; for up to a hundred groups or so they are not. Differs
in: every answer is simulated, so the placer knows whether its proof holds for the simulator too.
`roost.bounds.exact.solve_exactly` says both.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf, isinf

from roost.bounds import cumulative
from roost.bounds.exact import Exact, solve_exactly
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial, best_of
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._shared.units import Units
from roost.placers.single import Single

_log = logging.getLogger(__name__)
_LONGEST = 1e6  # seconds: the solver takes no infinity
_FEW = 30  # groups that one worker solves at once
_SHOWN = 8  # of the placements that did not fit


@dataclass(frozen=True)
class Cpsat:
    """The shortest step there is, where it can be proved in the time given; else the best found."""

    # A limit in the solver's own count, for budgets without seconds: one is two to four seconds of
    # a core. It does not depend on the clock, so the same seed gives the same answer.
    work: float = 8.0
    largest: int = 150  # groups, and ops without one; raises InputError above this
    largest_alike: int = 400  # the same where devices are alike and transfers free
    workers: int = 2  # where there are more than a few groups

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Start from the best so far, or from the best device."""
        num_units = Units.of(problem, "nothing").num_units
        largest = self.largest_alike if cumulative.applies(problem) else self.largest
        if num_units > largest:
            raise InputError(
                f"{num_units} groups are more than the {largest} that cpsat takes; auto takes any"
            )
        start = evaluate.best
        if start is None:
            start = evaluate([Single().place(problem, evaluate)])[0]
        seed = int(evaluate.rng.integers(2**31 - 1))
        workers = self.workers if num_units > _FEW else 1
        seconds = evaluate.seconds_left
        found = solve_exactly(
            problem,
            min(seconds, _LONGEST),
            start.placement,
            seed=seed,
            workers=workers,
            work=self.work if isinf(seconds) else inf,
            in_turn=workers > 1,
        )
        _log.info("cpsat: %s", _said(found))
        if not found.nothing_fits:
            evaluate.prove(Bound(found.bound, "cp-sat, optimal" if found.optimal else "cp-sat"))
        return best_of([start, *_tried(found, evaluate)]).placement


def _tried(found: Exact, evaluate: Evaluate) -> list[Trial]:
    """Trials of the solver's answer; if nothing fits, of the last placements it looked at."""
    if found.placement is not None:
        return evaluate([found.placement])
    return evaluate(found.candidates[-_SHOWN:]) if found.candidates else []


def _said(found: Exact) -> str:
    if found.nothing_fits:
        return "nothing fits, proved"
    if found.placement is None:
        return f"nothing that fits was found; no step is shorter than {found.bound:.6g} s"
    proof = "the optimum" if found.optimal else f"no step is shorter than {found.bound:.6g} s"
    return f"{found.step_time:.6g} s, {proof}"
