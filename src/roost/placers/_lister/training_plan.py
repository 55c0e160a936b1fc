"""Division of the seconds of a training of `lister` into pieces of work, before the first piece.

The seconds that pieces take are estimates and never measured. So a training that was stopped and
goes on, or is repeated, does the same work and ends with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.placers._lister.network_scheduler import ORDERS, NetworkScheduler
from roost.placers._lister.rule_training import CHILDREN, FIRST, NEW, TRIED
from roost.placers._lister.visiting_orders import ORDERS as RULE_ORDERS
from roost.placers._lister.weights import PORTFOLIO

# Seconds that the parts of a training take, about.
_PER_ROW = 1.2e-6  # of a device in a decision, forward and backward
_PER_SCHEDULE = 2.5e-6  # of a unit in a schedule
_PER_BATCH = 60e-9  # of an op in a batch of annealing
# Of an op and of a unit in a schedule by a rule, in an order made for its devices.
_PER_RULE_OP = 120e-9
_PER_RULE_UNIT = 200e-9
_PER_CHOICE = 0.05  # of those rules that are best together

SHARES = {"rules": 0.8, "targets": 0.03, "imitation": 0.03, "trial": 0.1, "ways": 0.04}
PARTS = tuple(SHARES)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training."""

    imitation_rate: float = 2e-3
    trial_rate: float = 2e-3
    entropy: float = 0.005
    graphs: int = 8  # problems in an update
    schedules: int = 12  # of each problem
    kept: int = 160  # decisions of a schedule that are learned from, drawn anew each time
    best_of: int = 4
    starts: int = 4  # annealed for targets, under each order
    disturbed: float = 0.6  # share of the schedules that are led astray and imitate from there
    steps: int = 3  # on the same schedules


def plan_of(
    schedulers: Sequence[NetworkScheduler], seconds: float, settings: TrainingSettings
) -> dict[str, int]:
    """The size of each part of the training, by its name in `PARTS`.

    Generations of rules, batches of annealing for each target, updates by imitation, updates by
    trial and error, and samplers to choose from.
    """
    count = max(1, len(schedulers))
    ops = sum(each.problem.graph.num_ops for each in schedulers) / count
    num_units = sum(each.units.num_units for each in schedulers) / count
    rows = sum(each.problem.cluster.num_devices for each in schedulers) / count
    schedules = settings.graphs * settings.schedules
    decisions = schedules * min(settings.kept, num_units)
    rule = count / len(ORDERS) * (ops * _PER_RULE_OP + num_units * _PER_RULE_UNIT)
    imitation = decisions * rows * _PER_ROW + schedules * num_units * _PER_SCHEDULE
    generation = TRIED * (CHILDREN + NEW)
    seconds_each = {
        "rules": _PER_CHOICE + generation * rule,
        "targets": count * settings.starts * ops * _PER_BATCH,
        "imitation": imitation,
        "trial": imitation * 1.5,
        "ways": count * num_units * _PER_SCHEDULE,
    }
    plan = {
        part: int(max(1, share * seconds / seconds_each[part])) for part, share in SHARES.items()
    }
    first = len(RULE_ORDERS) * FIRST / generation  # the first rules, in generations' worth of work
    plan["rules"] = len(RULE_ORDERS) + int(max(1, plan["rules"] - first))
    plan["targets"] = int(np.clip(plan["targets"], 20, 4000))
    plan["ways"] = int(np.clip(plan["ways"], PORTFOLIO, 1024))
    return plan
