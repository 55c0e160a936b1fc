"""Good placements for the network of `lister` to imitate: the best of rules, annealed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._annealing.annealer import Annealer
from roost.placers._lister.network_scheduler import NetworkScheduler
from roost.placers.rules import random_rules

_RULES = 128
_HOT, _COLD = 0.003, 0.00003  # temperatures, as shares of the step time
_CLOSE = 1.03  # as good as the best, as a factor on its step time


class Targets(NamedTuple):
    """Placements to imitate, all about as good as the best; none where nothing fits."""

    unit_device: Array  # [targets, units] i4
    step_time: float  # seconds of the best, infinite where there is none


def targets_of(
    scheduler: NetworkScheduler, rng: np.random.Generator, starts: int, batches: int
) -> Targets:
    """The best of so many starts, each annealed for so many batches: a fixed amount of work."""
    problem = scheduler.problem
    units = scheduler.units
    rule_scheduler = scheduler.scheduler
    schedules = rule_scheduler.schedule(random_rules(rule_scheduler, rng, _RULES))
    annealed: list[tuple[float, Array]] = []
    for number, row in enumerate(schedules.ranked()[:starts]):
        start = schedules.unit_device[row]
        annealer = Annealer(problem, units, scheduler.placement(start))
        chain = annealer.chain(start, int(rng.integers(2**62)) + number)
        annealer.run(chain, batches if annealer.batch > 1 else 4 * batches, _HOT, _COLD)
        excess, step_time = annealer.cost(chain.best)
        if excess == 0 and np.isfinite(step_time):
            annealed.append((step_time, scheduler.canonical(chain.best)))
    if not annealed:
        return Targets(np.zeros((0, units.num_units), np.int32), float("inf"))
    best = min(step_time for step_time, _ in annealed)
    close = [devices for step_time, devices in annealed if step_time <= _CLOSE * best]
    distinct = {devices.tobytes(): devices for devices in close}
    return Targets(np.stack(list(distinct.values())), best)
