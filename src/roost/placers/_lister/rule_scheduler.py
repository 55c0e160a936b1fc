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
        self.problem, self.units = problem, units or Units.of(problem)
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
        order = rows[:, COLUMN["order"]].astype(int)
        eager = (rows[:, COLUMN["eager"]] > 0.5) & self.is_tight
        made = PortableSchedules(
            self,
            order,
            eager,
            unit_device=np.zeros((count, self.units.num_units), np.int32),
            is_reordered=np.zeros(count, bool),
            step_time=np.zeros(count),
            excess=np.zeros(count),
        )
        for number, early in sorted(set(zip(order.tolist(), eager.tolist(), strict=True))):
            mine = np.flatnonzero((order == number) & (eager == early))
            scheduler = self.under(number, early)
            rules = self.linear_rules(rows[mine], scheduler)
            if anchors is not None:
                near = anchors.rows(mine)
                rules = rules._replace(kept=near.unit_device, hold=near.hold * self.mean_time)
            schedules = scheduler.schedule(rules, scales)
            made.unit_device[mine] = schedules.unit_device
            made.step_time[mine] = schedules.step_time
            made.excess[mine] = schedules.excess
            made.simulations += schedules.simulations
        for row in np.flatnonzero(rows[:, COLUMN["listed"]] > 0.5).tolist():
            self._reorder(made, row)
        return made

    def _reorder(self, made: PortableSchedules, row: int) -> None:
        """Take an order made for the devices; where memory is tight only if it is better."""
        device = self.units.devices(made.unit_device[row])
        if not self.is_tight:
            # One simulation is counted: the first result is replaced.
            excess, step_time = 0.0, list_schedule(self.problem, device).seconds
        else:
            made.simulations += 1
            timeline = Simulator.of(self.problem).simulate(list_scheduled(self.problem, device))
            excess, step_time = float(timeline.missing.sum()), timeline.step_time
            is_better = (excess, step_time) < (made.excess[row], made.step_time[row])
            if not is_better:
                return
        made.is_reordered[row], made.step_time[row], made.excess[row] = True, step_time, excess

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
    fast, part = rows[:, COLUMN["fast"]], rows[:, [COLUMN["part"]]]
    number = np.round(fast * (len(faster) - 1)).astype(int)
    usable = np.where((fast > 0)[:, None], faster[number], choices[0])
    line = np.argsort(total, kind="stable")
    position = np.empty_like(usable, dtype=np.int64)  # among the usable ones
    position[:, line] = np.cumsum(usable[:, line], axis=1)
    count = np.ceil(part * usable.sum(axis=1, keepdims=True) - 1e-6)
    return np.asarray(usable & (position <= count))


@dataclass(eq=False)
class PortableSchedules:
    """Schedules made by portable rules, and their costs."""

    scheduler: RuleScheduler
    order: Array  # [rules] i8
    eager: Array  # [rules] bool: early updates
    unit_device: Array  # [rules, units] i4
    # [rules] bool: the order is made for the devices, it is not that of the rule.
    is_reordered: Array
    step_time: Array  # [rules] seconds; exact unless devices share a bus to send, or have gaps
    excess: Array  # [rules] bytes over memory
    simulations: int = 0

    def ranked(self) -> list[int]:
        """Rules from best to worst; of those that made the same placement only one."""
        row_of: dict[tuple[bytes, bool], int] = {}
        for row in np.lexsort((self.step_time, self.excess)).tolist():
            key = self.unit_device[row].tobytes(), bool(self.is_reordered[row])
            row_of.setdefault(key, row)
        return list(row_of.values())

    def placement(self, row: int) -> Placement:
        """The placement that a rule made."""
        unit_device = self.unit_device[row]
        if self.is_reordered[row]:
            device = self.scheduler.units.devices(unit_device)
            return list_scheduled(self.scheduler.problem, device)
        scheduler = self.scheduler.under(int(self.order[row]), bool(self.eager[row]))
        return scheduler.placement(unit_device)
