"""The list scheduler of `lister` that takes portable rules: one problem under all orders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._lister.portable_rules import COLUMN
from roost.placers._lister.visiting_orders import ORDERS, scheduler_in
from roost.placers._listing.linear_rules import FEATURES, LinearRules
from roost.placers._listing.list_scheduler import (
    SCALES,
    ListScheduler,
    Schedules,
    device_choices,
    several_fast,
    total_time,
)
from roost.placers._shared.orders import list_schedule, list_scheduled
from roost.placers._shared.units import Units
from roost.placers.rules import SHARES
from roost.simulator.compiled import Simulator


class Anchors(NamedTuple):
    """Placements that rules keep near, a row for each rule."""

    unit_device: Array  # [rules, units] i4, -1 for a unit that may go anywhere
    # [rules] cost of each other device, in ops of mean length; 0 where it keeps near nothing.
    hold: Array

    def rows(self, rows: Array | slice) -> Anchors:
        """The anchors of some rules."""
        return Anchors(self.unit_device[rows], self.hold[rows])


class RuleScheduler:
    """Schedules by portable rules, for the units of a problem or for larger ones."""

    def __init__(self, problem: Problem, units: Units | None = None) -> None:
        self.problem = problem
        self.units = units or Units.of(problem)
        self._schedulers: dict[tuple[int, bool], ListScheduler] = {}

    def under(self, order: int, eager: bool = False) -> ListScheduler:
        """The list scheduler under an order, made when it is first needed."""
        if (order, eager) not in self._schedulers:
            self._schedulers[order, eager] = scheduler_in(self.units, ORDERS[order], eager)
        return self._schedulers[order, eager]

    @cached_property
    def is_tight(self) -> bool:
        """True if memory can matter."""
        return self.under(0).is_tight

    @cached_property
    def mean_time(self) -> float:
        """The mean time of a unit, in seconds."""
        return float(self.units.time.min(axis=1).mean())

    def schedule(
        self, rows: Array, scales: Array = SCALES, anchors: Anchors | None = None
    ) -> PortableSchedules:
        """The schedule of each rule, near its anchor where there are anchors."""
        count = len(rows)
        simulations = 0
        unit_device = np.zeros((count, self.units.num_units), np.int32)
        step_time = np.zeros(count)
        excess = np.zeros(count)
        schedulers: list[ListScheduler | None] = [None] * count
        order = rows[:, COLUMN["order"]].astype(int)
        eager = (rows[:, COLUMN["eager"]] > 0.5) & self.is_tight
        for number, early in sorted(set(zip(order.tolist(), eager.tolist(), strict=True))):
            mine = np.flatnonzero((order == number) & (eager == early))
            scheduler = self.under(number, early)
            rules = self.linear_rules(rows[mine], scheduler)
            if anchors is not None:
                near = anchors.rows(mine)
                rules = rules._replace(kept=near.unit_device, hold=near.hold * self.mean_time)
            made = scheduler.schedule(rules, scales)
            unit_device[mine] = made.unit_device
            step_time[mine] = made.step_time
            excess[mine] = made.excess
            simulations += made.simulations
            for row in mine.tolist():
                schedulers[row] = scheduler
        for row in np.flatnonzero(rows[:, COLUMN["listed"]] > 0.5).tolist():
            over, seconds = self._in_own_order(unit_device[row])
            # Where memory is tight both orders are simulated, and the better one is taken.
            simulations += self.is_tight
            if not self.is_tight or (over, seconds) < (excess[row], step_time[row]):
                schedulers[row] = None
                step_time[row] = seconds
                excess[row] = over
        return PortableSchedules(unit_device, step_time, excess, simulations, self, schedulers)

    def _in_own_order(self, unit_device: Array) -> tuple[float, float]:
        """Bytes over memory and step time of devices in an order that is made for them."""
        device = self.units.devices(unit_device)
        if not self.is_tight:
            return 0.0, list_schedule(self.problem, device).seconds
        timeline = Simulator.of(self.problem).simulate(list_scheduled(self.problem, device))
        return float(timeline.missing.sum()), timeline.step_time

    def linear_rules(self, rows: Array, scheduler: ListScheduler) -> LinearRules:
        """The rules in seconds and bytes of this problem."""
        total = total_time(self.units)
        weights = rows[:, : len(FEATURES)].copy()
        weights[:, [COLUMN[name] for name in SHARES]] *= self.mean_time
        weights[:, COLUMN["price"]] *= float(total.min()) if scheduler.is_tight else 0.0
        return scheduler.linear_rules(
            weights,
            usable=usable_by(rows, device_choices(self.units), total),
            share=rows[:, COLUMN["share"]],
            fair=rows[:, COLUMN["fair"]],
            cautious=rows[:, COLUMN["cautious"]] > 0.5,
        )


def usable_by(rows: Array, choices: Array, total: Array) -> Array:  # [rules, devices] bool
    """The devices that each rule takes where it can."""
    faster = several_fast(choices)
    fast = rows[:, COLUMN["fast"]]
    part = rows[:, [COLUMN["part"]]]
    number = np.round(fast * (len(faster) - 1)).astype(int)
    usable = np.where((fast > 0)[:, None], faster[number], choices[0])
    line = np.argsort(total, kind="stable")
    position = np.empty_like(usable, dtype=np.int64)  # among the usable ones
    position[:, line] = np.cumsum(usable[:, line], axis=1)
    count = np.ceil(part * usable.sum(axis=1, keepdims=True) - 1e-6)
    return np.asarray(usable & (position <= count))


@dataclass(frozen=True, eq=False)
class PortableSchedules(Schedules):
    """Schedules made by portable rules."""

    rule_scheduler: RuleScheduler
    # [schedules] None where the order is made for the devices, and not that of the rule.
    schedulers: list[ListScheduler | None]

    def _key(self, row: int) -> object:
        return super()._key(row), self.schedulers[row] is None

    def placement(self, row: int) -> Placement:
        """The placement that a rule made."""
        scheduler = self.schedulers[row]
        if scheduler is not None:
            return scheduler.placement(self.unit_device[row])
        device = self.rule_scheduler.units.devices(self.unit_device[row])
        return list_scheduled(self.rule_scheduler.problem, device)
