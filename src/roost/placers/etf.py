"""Earliest task first (Hwang, Chow, Anger, Lee 1989; m-ETF of Baechi, Jeon et al., SoCC 2020).

Of all ready ops and all devices, the pair that can start first is next; of equals the op with the
highest upward rank.

Differs in: ops that must share a device follow the first of them. Only devices with room are
candidates. The choice takes buses to be free; only the chosen op then queues on them. Slower kinds
of devices are tried with and without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import NOBODY, SCALES, ListScheduler, device_choices
from roost.placers._shared.units import Units


@dataclass(frozen=True)
class Etf:
    """The earliest start among all ready ops and devices."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        scheduler = ListScheduler.all_of(Units.of(problem), ("rank",))[-1]
        return earliest_first_trial(scheduler, evaluate).placement


def earliest_first_trial(
    scheduler: ListScheduler,
    evaluate: Evaluate,
    favourites: tuple[Array, Array] = (NOBODY, NOBODY),
    expand: Callable[[Placement], Placement] = lambda placement: placement,
) -> Trial:
    """The best schedule of earliest task first.

    `favourites` are as `ListScheduler.earliest_first` takes them. `expand` turns a placement into
    one of the problem that is evaluated.
    """
    trials: list[Trial] = []
    for usable in device_choices(scheduler.units):
        for scale in SCALES:
            placements = scheduler.earliest_first(usable, scale, *favourites)
            new = evaluate([expand(placement) for placement in placements])
            trials += new
            if any(trial.feasible for trial in new):
                break
    return best_of(trials)
