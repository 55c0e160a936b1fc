"""The list scheduler of the placers: one problem under one dispatch order, and schedules by rules.

`heft`, `topo`, `rules` and `lister` make schedules by linear rules; `etf` and `sct` make them by
earliest task first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._listing.earliest_first import earliest_first
from roost.placers._listing.held_memory import Listing
from roost.placers._listing.linear_rules import FEATURES, LinearRules, peak_on_one_device, run_rules
from roost.placers._listing.listed_problem import listing_of
from roost.placers._shared.orders import last_before
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.base import Layout
from roost.simulator.order import dispatch_order

# A placement that does not fit is made again as if the devices had less memory.
SCALES = np.array([1.0, 0.95, 0.9, 0.8, 0.65])

# A device that needs this many times as long for everything as the next faster one is of a slower
# kind.
_SLOWER = 1.5
_MOST_CHOICES = 4

NOBODY = np.zeros(0, np.int32)  # no op has a favourite


@dataclass(frozen=True, eq=False)
class ListScheduler:
    """A problem under one dispatch order, ready for the compiled list schedulers."""

    units: Units
    example: Placement  # any devices, and the order
    layout: Layout
    listing: Listing

    @staticmethod
    def of(units: Units, order: str, eager: bool = False) -> ListScheduler:
        """The scheduler under the order "program" or "rank"; if `eager`, updates come early.

        The gradients that updates wait for are then freed early. In many training steps these are
        half of all bytes held.
        """
        problem = units.problem
        anywhere = np.zeros(problem.graph.num_ops, np.int32)
        return ListScheduler.like(units, problem.placement(anywhere, order), eager)

    @staticmethod
    def like(units: Units, example: Placement, eager: bool = False) -> ListScheduler:
        """The scheduler under the order of a placement."""
        if eager:
            example = _eager(units.problem, example)
        layout = Simulator.of(units.problem).layout(example)
        return ListScheduler(units, example, layout, listing_of(units, layout))

    @staticmethod
    def all_of(units: Units, orders: tuple[str, ...] = ("program", "rank")) -> list[ListScheduler]:
        """One scheduler for each order; where memory is tight also with early updates."""
        schedulers = [ListScheduler.of(units, order) for order in orders]
        has_updates = (units.problem.graph.phase == UPDATE).any()
        if has_updates and any(scheduler.is_tight for scheduler in schedulers):
            schedulers += [ListScheduler.of(units, order, eager=True) for order in orders]
        return schedulers

    @cached_property
    def is_tight(self) -> bool:
        """True if one device that runs everything may overflow; no device ever holds more."""
        most = peak_on_one_device(self.layout, self.listing)
        return bool(most > self.units.problem.cluster.memory.min())

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices of units, in this order."""
        return replace(self.example, device=self.units.devices(unit_device))

    def linear_rules(
        self, weights: Array, usable: Array, share: Array, fair: Array, cautious: Array
    ) -> LinearRules:
        """Rules with weights [rules, features] for usable [rules, devices] devices.

        `share` and `fair` [rules] are factors on a fair share of the work and of the memory.
        """
        units = self.units
        rules = no_rules(self.units.problem, len(weights))
        memory = units.problem.cluster.memory * usable
        memory_share = memory / np.maximum(1, memory.sum(axis=1, keepdims=True))
        lasting = float(self.listing.lasting.sum())
        rules.weights[:] = weights
        rules.usable[:] = bits(usable)
        rules.line[:] = fastest_first(units)
        rules.share[:] = (share / (usable / total_time(units)).sum(axis=1))[:, None]
        rules.fair[:] = memory_share * lasting * fair[:, None]
        rules.cautious[:] = cautious
        return rules

    def schedule(self, rules: LinearRules, scales: Array = SCALES) -> RuleSchedules:
        """The placement that each rule makes."""
        count = len(rules.weights)
        unit_device = np.zeros((count, self.units.num_units), np.int32)
        step_time = np.zeros(count)
        excess = np.zeros(count, np.int64)
        simulations = run_rules(
            self.layout,
            self.listing,
            rules,
            self.units.problem.cluster.memory,
            scales,
            self.is_tight,
            unit_device,
            step_time,
            excess,
        )
        return RuleSchedules(unit_device, step_time, excess, int(simulations), self)

    def earliest_first(
        self, usable: Array, scale: float = 1.0, favourite: Array = NOBODY, parent: Array = NOBODY
    ) -> list[Placement]:
        """The schedule of earliest task first, under its own order, program order and rank order.

        Only usable [devices] devices are taken where there is room. `favourite` and `parent` [ops]
        are as the compiled loop takes them.
        """
        problem = self.units.problem
        units = self.units
        op = self.layout.op
        unit_device = np.zeros(units.num_units, np.int32)
        sequence = np.zeros(len(op), np.int64)
        earliest_first(
            self.layout,
            self.listing,
            np.uint64(bits(usable)),
            np.maximum(1.0, problem.cluster.memory * scale),
            favourite,
            parent,
            self.is_tight,
            unit_device,
            sequence,
        )
        position = np.full(problem.graph.num_ops, -1.0)
        position[op[sequence]] = np.arange(len(sequence))
        earliest = np.maximum(position, last_before(problem, position) + 0.5)
        position = np.where(problem.graph.phase == UPDATE, earliest, position)
        device = units.devices(unit_device)
        return with_other_orders(problem.placement(device, "priority", -position))


@dataclass(frozen=True, eq=False)
class Schedules:
    """Placements of many schedules, and their costs.

    Step times are exact unless devices have gaps or share a bus to send.
    """

    unit_device: Array  # [schedules, units] i4
    step_time: Array  # [schedules] seconds
    excess: Array  # [schedules] bytes over memory
    simulations: int  # one for each schedule, and one for each attempt to make it fit

    def ranked(self, cost: Array | None = None) -> list[int]:
        """Schedules from best to worst, each placement once; by `cost` [schedules] if given."""
        keys = (self.step_time, self.excess) if cost is None else (cost,)
        row_of: dict[object, int] = {}
        for row in np.lexsort(keys).tolist():
            row_of.setdefault(self._key(row), row)
        return list(row_of.values())

    def _key(self, row: int) -> object:
        """A key that is equal for equal placements."""
        return self.unit_device[row].tobytes()


@dataclass(frozen=True, eq=False)
class RuleSchedules(Schedules):
    """Schedules made by rules."""

    scheduler: ListScheduler

    def best(self, count: int = 1) -> list[Placement]:
        """The best distinct placements."""
        return [self.placement(row) for row in self.ranked()[:count]]

    def placement(self, row: int) -> Placement:
        """The placement of a rule."""
        return self.scheduler.placement(self.unit_device[row])


def with_other_orders(placement: Placement) -> list[Placement]:
    """The placement in its own order, and its devices in program order and in rank order."""
    others = [order for order in ("program", "rank") if order != placement.order]
    return [placement, *(replace(placement, order=order, priority=None) for order in others)]


def no_rules(problem: Problem, count: int) -> LinearRules:
    """Rules without weights, for all devices alike."""
    num_devices = problem.cluster.num_devices
    return LinearRules(
        weights=np.zeros((count, len(FEATURES))),
        usable=np.full(count, bits(np.ones(num_devices, bool))),
        line=np.zeros((count, num_devices)),
        share=np.zeros((count, num_devices)),
        fair=np.zeros((count, num_devices)),
        cautious=np.ones(count, bool),
        kept=np.full((count, 1), -1, np.int32),
        hold=np.zeros(count),
    )


def named_rules(units: Units, weights: Mapping[str, float]) -> LinearRules:
    """The rule with these weights, once for each choice of devices."""
    choices = device_choices(units)
    rules = no_rules(units.problem, len(choices))
    for feature, weight in weights.items():
        rules.weights[:, FEATURES.index(feature)] = weight
    rules.usable[:] = bits(choices)
    rules.line[:] = fastest_first(units)
    return rules


def total_time(units: Units) -> Array:  # [devices] seconds, never 0
    """Seconds that each device would take for everything."""
    return np.asarray(np.maximum(units.time.sum(axis=0), 1e-12))


def fastest_first(units: Units) -> Array:  # [devices]
    """The number of each device in a line from the fastest to the slowest."""
    line = np.empty(units.problem.cluster.num_devices)
    line[np.argsort(total_time(units), kind="stable")] = np.arange(len(line))
    return line


def device_choices(units: Units) -> Array:  # [choices, devices] bool
    """All devices, then without the slowest kind, and so on to those of the fastest kind alone."""
    total = total_time(units)
    order = np.argsort(total, kind="stable")
    kind = np.zeros(len(total), np.int64)
    kind[order[1:]] = np.cumsum(total[order[1:]] > _SLOWER * total[order[:-1]])
    slowest = np.arange(kind.max(), -1, -1)
    if len(slowest) > _MOST_CHOICES:
        slowest = np.concatenate([slowest[:1], slowest[1 - _MOST_CHOICES :]])
    return np.asarray(kind <= slowest[:, None])


def affordable(
    count: int, simulations_left: float, is_tight: bool, own_orders: bool = False
) -> tuple[int, Array]:
    """The number of schedules that the budget allows, at most `count`, and their scales.

    Where memory is tight, a placement that does not fit is made again for each scale; with
    `own_orders` each placement is simulated once more in an order made for its devices.
    """
    reorders = int(is_tight and own_orders)
    attempts = (len(SCALES) if is_tight else 1) + reorders
    count = int(max(1, min(count, simulations_left // attempts)))
    num_scales = int(max(1, min(attempts, simulations_left // count) - reorders))
    return count, SCALES[:num_scales]


def several_fast(choices: Array) -> Array:  # [choices, devices] bool
    """The choices without slower kinds, but of two or more devices; if none, all devices."""
    several = choices[1:][choices[1:].sum(axis=1) > 1]
    return several if len(several) else choices[:1]


def bits(usable: Array) -> Array:
    """A bit for each device, from a row or rows of bool."""
    weights = np.uint64(1) << np.arange(usable.shape[-1], dtype=np.uint64)
    return np.asarray((usable * weights).sum(axis=-1, dtype=np.uint64))


def _eager(problem: Problem, example: Placement) -> Placement:
    """The same order, but each update comes right after the last op that must come before it."""
    order = dispatch_order(problem, example)
    position = np.full(problem.graph.num_ops, -1.0)
    position[order] = np.arange(len(order))
    update = problem.graph.phase == UPDATE
    when = np.where(update, np.minimum(position, last_before(problem, position) + 0.5), position)
    # Several updates may come after the same op: they stay in their order.
    rank = np.empty(len(position))
    rank[np.lexsort((position, when))] = np.arange(len(position))
    return replace(example, order="priority", priority=-rank)
