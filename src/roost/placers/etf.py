"""Earliest task first (Hwang, Chow, Anger, Lee 1989; m-ETF of Baechi, Jeon et al., SoCC 2020).

Of all ready ops and all devices, the pair that can start first is next; of equals the op with the
highest upward rank. Differs in: what must share a device follows the first of it; only devices with
room are asked; the choice takes buses to be free, and only the op chosen then queues on them;
slower kinds of devices are tried with and without.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import SCALES, ListScheduler, device_choices
from roost.placers._shared.units import Units


@dataclass(frozen=True)
class Etf:
    """The earliest start among all ready ops and devices."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        units = Units.of(problem)
        scheduler = ListScheduler.all_of(units, ("rank",))[-1]
        found: list[Trial] = []
        for usable in device_choices(units):
            for scale in SCALES:
                trials = evaluate(scheduler.earliest_first(usable, scale))
                found += trials
                if any(trial.feasible for trial in trials):
                    break
        return best_of(found).placement
