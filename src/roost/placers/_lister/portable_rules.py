"""Rules for list scheduling in numbers without units, so that one rule means the same on every
problem.

`rules` draws its rules for the problem at hand. Here a rule is a row of numbers that can be kept in
a file, varied, and tried on other graphs and machines: shares are weighed in ops of mean length,
prices in the time of everything, and devices are named by how fast they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._lister.visiting_orders import ORDERS, prepared
from roost.placers._listing.linear_rules import FEATURES, LinearRules
from roost.placers._listing.list_scheduler import (
    SCALES,
    ListScheduler,
    bits,
    device_choices,
    fastest_first,
    no_rules,
    total_time,
)
from roost.placers._shared.orders import list_schedule, list_scheduled
from roost.placers._shared.units import Units
from roost.placers.rules import SHARES, weigh
from roost.simulator.compiled import Simulator

# What a row holds after the weights of the features.
SETTINGS = (
    "share",  # of the work that is fair, as a factor
    "fair",  # of the memory that is fair, as a factor
    "fast",  # 0: all devices; else without slower kinds, up to 1: the fastest kind alone
    "part",  # of those devices, the fastest first
    "cautious",  # above a half: outputs count where they were made until their last use anywhere
    "order",  # the number of the order
    "eager",  # above a half: early updates, where memory is tight
    "listed",  # above a half: in the end its devices run in an order that is made for them
)
COLUMNS = (*FEATURES, *SETTINGS)
_AT = {name: number for number, name in enumerate(COLUMNS)}
_LEAST = {
    "share": 0.1, "fair": 0.1, "fast": 0.0, "part": 0.01, "cautious": 0.0, "order": 0.0, "eager":
    0.0,
    "listed": 0.0,
}  # fmt: skip
_MOST = {
    "share": 10.0,
    "fair": 10.0,
    "fast": 1.0,
    "part": 1.0,
    "cautious": 1.0,
    "order": len(ORDERS) - 1.0,
    "eager": 1.0,
    "listed": 1.0,
}

# How a child differs from its parent: how often it takes numbers from another and how many, how
# often and how much a number changes, and how often it is drawn anew.
_CROSSED, _FROM_OTHER = 0.5, 0.4
_CHANGED, _STEP, _NEW = 0.35, 0.5, 0.06


def drawn(
    rng: np.random.Generator, count: int, orders: Sequence[int] = range(len(ORDERS))
) -> Array:
    """[rules, columns] so many rules, as `rules` draws them, under these orders in turn."""
    rows = np.zeros((count, len(COLUMNS)))
    weigh(rows[:, : len(FEATURES)], rng, 1.0, 1.0)
    rows[:, _AT["share"]] = rng.uniform(0.5, 1.5, count)
    rows[:, _AT["fair"]] = rng.uniform(0.8, 1.5, count)
    rows[:, _AT["fast"]] = (rng.random(count) < 0.7) * rng.random(count)
    rows[:, _AT["part"]] = np.where(rng.random(count) < 0.12, rng.uniform(0.01, 1.0, count), 1.0)
    rows[:, _AT["cautious"]] = rng.random(count) < 0.5
    rows[:, _AT["order"]] = np.resize(np.asarray(orders), count)
    rows[:, _AT["eager"]] = rng.random(count) < 0.75
    rows[:, _AT["listed"]] = rng.random(count) < 0.5
    return rows


def varied(rng: np.random.Generator, parents: Array, others: Array) -> Array:  # [rules, columns]
    """A child of each parent: some numbers are those of another rule, some are changed, a few are
    drawn anew."""
    count, width = parents.shape
    crossed = (rng.random((count, 1)) < _CROSSED) & (rng.random((count, width)) < _FROM_OTHER)
    found = np.where(crossed, others[rng.integers(0, len(others), count)], parents)
    new = rng.random((count, width)) < _NEW
    new[:, _AT["order"]] = False  # each order has to be made ready, so there are to be few
    found = np.where(new, drawn(rng, count), found)
    step = np.exp(rng.normal(0.0, _STEP, (count, width))) * (rng.random((count, width)) < _CHANGED)
    step[:, len(FEATURES) :][:, 4:] = 0.0  # what is a choice is not changed a little
    return within(np.where(step > 0, found * step, found))


def within(rows: Array) -> Array:
    """The rows with every setting where it can be."""
    rows = rows.copy()
    for name in SETTINGS:
        rows[:, _AT[name]] = np.clip(rows[:, _AT[name]], _LEAST[name], _MOST[name])
    return rows


def are_valid(rows: Array) -> bool:
    """Whether these can be rules."""
    whole = rows[:, _AT["order"]] == np.round(rows[:, _AT["order"]])
    return bool(np.isfinite(rows).all() and whole.all() and np.allclose(within(rows), rows))


class Near(NamedTuple):
    """Placements that rules are to keep near, a row for each rule."""

    unit_device: Array  # [rules, units] i4, -1 for a unit that may go anywhere
    # [rules] what each other device costs, in ops of mean length; 0 where it keeps near nothing.
    hold: Array

    def first(self, count: int) -> Near:
        return Near(self.unit_device[:count], self.hold[:count])


class Bench:
    """A problem on which rules are tried; they place its units, or larger ones where these are
    given."""

    def __init__(self, problem: Problem, units: Units | None = None) -> None:
        self.problem, self.units = problem, units or Units.of(problem)
        self._under: dict[tuple[int, bool], ListScheduler] = {}

    def under(self, order: int, eager: bool = False) -> ListScheduler:
        """The problem under an order, made ready when it is first asked for."""
        if (order, eager) not in self._under:
            self._under[order, eager] = prepared(self.units, ORDERS[order], eager)
        return self._under[order, eager]

    @cached_property
    def is_tight(self) -> bool:
        """Whether memory can matter."""
        return self.under(0).is_tight

    def roll(self, rows: Array, scales: Array = SCALES, near: Near | None = None) -> Tried:
        """The schedule of each rule; those that are told to keep near others do."""
        order = rows[:, _AT["order"]].astype(int)
        eager = (rows[:, _AT["eager"]] > 0.5) & self.is_tight
        step, excess = np.zeros(len(rows)), np.zeros(len(rows))
        devices = np.zeros((len(rows), self.units.num_units), np.int32)
        in_listed = np.zeros(len(rows), bool)
        simulations = 0
        for number, early in sorted(set(zip(order.tolist(), eager.tolist(), strict=True))):
            mine = np.flatnonzero((order == number) & (eager == early))
            under = self.under(number, early)
            rules = self.bound(rows[mine], under)
            if near is not None:
                tick = float(self.units.time.min(axis=1).mean())
                rules = rules._replace(kept=near.unit_device[mine], hold=near.hold[mine] * tick)
            rolled = under.schedule(rules, scales)
            devices[mine], step[mine], excess[mine] = (
                rolled.unit_device,
                rolled.step_time,
                rolled.excess,
            )
            simulations += rolled.simulations
        for row in np.flatnonzero(rows[:, _AT["listed"]] > 0.5).tolist():
            over, seconds = self._in_listed_order(devices[row])
            # Where memory is tight both orders are simulated; else the first was for nothing, and
            # is not looked at.
            simulations += self.is_tight
            if not self.is_tight or (over, seconds) < (excess[row], step[row]):
                in_listed[row], step[row], excess[row] = True, seconds, over
        return Tried(self, rows, devices, in_listed, step, excess, simulations)

    def _in_listed_order(self, unit_device: Array) -> tuple[float, float]:
        """Bytes over memory and step time of the devices of units, in the order that is made for
        them."""
        device = self.units.devices(unit_device)
        if not self.is_tight:
            return 0.0, list_schedule(self.problem, device).seconds
        timeline = Simulator.of(self.problem).simulate(list_scheduled(self.problem, device))
        return float(timeline.missing.sum()), timeline.step_time

    def bound(self, rows: Array, under: ListScheduler) -> LinearRules:
        """The rules in the units of this problem."""
        units, rules = self.units, no_rules(self.problem, len(rows))
        total = total_time(units)
        weights = rules.weights
        weights[:] = rows[:, : len(FEATURES)]
        weights[:, [_AT[name] for name in SHARES]] *= float(units.time.min(axis=1).mean())
        weights[:, _AT["price"]] *= float(total.min()) if under.is_tight else 0.0
        usable = usable_by(rows, device_choices(units), total)
        memory = self.problem.cluster.memory * usable
        shares = memory / np.maximum(1, memory.sum(axis=1, keepdims=True))
        rules.usable[:] = bits(usable)
        rules.line[:] = fastest_first(units)
        rules.share[:] = (rows[:, _AT["share"]] / (usable / total).sum(axis=1))[:, None]
        rules.fair[:] = shares * float(under.listing.lasting.sum()) * rows[:, [_AT["fair"]]]
        rules.cautious[:] = rows[:, _AT["cautious"]] > 0.5
        return rules


def usable_by(rows: Array, choices: Array, total: Array) -> Array:  # [rules, devices] bool
    """Which devices each rule takes where it can."""
    # Without slower kinds, but not one device alone.
    faster = choices[1:][choices[1:].sum(axis=1) > 1]
    faster = faster if len(faster) else choices[:1]
    fast, part = rows[:, _AT["fast"]], rows[:, [_AT["part"]]]
    number = np.round(fast * (len(faster) - 1)).astype(int)
    usable = np.where((fast > 0)[:, None], faster[number], choices[0])
    place = np.empty_like(usable, dtype=np.int64)  # among the usable ones
    line = np.argsort(total, kind="stable")
    place[:, line] = np.cumsum(usable[:, line], axis=1)
    return np.asarray(usable & (place <= np.ceil(part * usable.sum(axis=1, keepdims=True) - 1e-6)))


@dataclass(frozen=True, eq=False)
class Tried:
    """What rules made of a problem."""

    bench: Bench
    rows: Array  # [rules, columns]
    unit_device: Array  # [rules, units] i4
    # [rules] bool whether they run in an order that is made for them, not in that of the rule.
    in_listed: Array
    step_time: Array  # [rules] seconds; exact unless devices share a bus to send, or have gaps
    excess: Array  # [rules] bytes over memory
    simulations: int

    def ranked(self) -> list[int]:
        """Rules from best to worst; of those that made the same placement only one."""
        found: dict[tuple[bytes, bool], int] = {}
        for row in np.lexsort((self.step_time, self.excess)).tolist():
            found.setdefault((self.unit_device[row].tobytes(), bool(self.in_listed[row])), row)
        return list(found.values())

    def placement(self, row: int) -> Placement:
        if self.in_listed[row]:
            return list_scheduled(
                self.bench.problem, self.bench.units.devices(self.unit_device[row])
            )
        order, eager = self.rows[row, _AT["order"]], self.rows[row, _AT["eager"]] > 0.5
        return self.bench.under(int(order), bool(eager and self.bench.is_tight)).placement(
            self.unit_device[row]
        )
