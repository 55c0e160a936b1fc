"""What the list schedulers share: a problem under one order, ready for their compiled loops, and
batches of rules."""

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
from roost.placers._listing.linear_rules import FEATURES, LinearRules, everything_on_one, run_rules
from roost.placers._listing.listed_problem import listing_of
from roost.placers._listing.memory_room import Listing
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.base import Layout
from roost.simulator.order import dispatch_order

# A placement that does not fit is tried again as if the devices had less memory.
SCALES = np.array([1.0, 0.95, 0.9, 0.8, 0.65])

# A device that needs this many times as long for everything as the next faster one is of a slower
# kind.
_SLOWER = 1.5
_MOST_CHOICES = 4

_NOBODY = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem under one dispatch order, ready for list scheduling."""

    units: Units
    example: Placement  # any devices, and the order
    layout: Layout
    listing: Listing

    @staticmethod
    def of(units: Units, order: str, eager: bool = False) -> Prepared:
        """Under the order "program" or "rank"; if `eager`, with updates as early as can be.

        The gradients that updates wait for are then given back early: in many training steps that
        is half of all that is held.
        """
        problem = units.problem
        return Prepared.like(
            units, problem.placement(np.zeros(problem.graph.num_ops, np.int32), order), eager
        )

    @staticmethod
    def like(units: Units, example: Placement, eager: bool = False) -> Prepared:
        """Under the order of a placement."""
        if eager:
            example = _eager(units.problem, example)
        layout = Simulator.of(units.problem).layout(example)
        return Prepared(units, example, layout, listing_of(units, layout))

    @staticmethod
    def all_of(units: Units, orders: tuple[str, ...] = ("program", "rank")) -> list[Prepared]:
        """Under each of these orders, and where memory is tight under each of them with early
        updates too."""
        found = [Prepared.of(units, order) for order in orders]
        if (
            any(prepared.is_tight for prepared in found)
            and (units.problem.graph.phase == UPDATE).any()
        ):
            found += [Prepared.of(units, order, eager=True) for order in orders]
        return found

    @cached_property
    def is_tight(self) -> bool:
        """Whether memory can matter at all: no device ever holds more than one that runs everything
        would."""
        return bool(
            everything_on_one(self.layout, self.listing) > self.units.problem.cluster.memory.min()
        )

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices of units, in this order."""
        return replace(self.example, device=self.units.devices(unit_device))

    def roll(self, rules: LinearRules, scales: Array = SCALES) -> Rolled:
        """The placement that each rule makes."""
        count, memory = len(rules.weights), self.units.problem.cluster.memory
        unit_device = np.zeros((count, self.units.num_units), np.int32)
        step_time, excess = np.zeros(count), np.zeros(count, np.int64)
        simulations = run_rules(
            self.layout,
            self.listing,
            rules,
            memory,
            scales,
            self.is_tight,
            unit_device,
            step_time,
            excess,
        )
        return Rolled(self, unit_device, step_time, excess, int(simulations))

    def earliest_first(
        self, usable: Array, scale: float = 1.0, favourite: Array = _NOBODY, parent: Array = _NOBODY
    ) -> list[Placement]:
        """The schedule of earliest task first, under its own order, program order and rank order.

        Only usable [devices] devices are taken where there is room. `favourite` and `parent` [ops]
        are as the kernel takes them.
        """
        problem, units = self.units.problem, self.units
        unit_device, sequence = (
            np.zeros(units.num_units, np.int32),
            np.zeros(len(self.layout.op), np.int64),
        )
        capacity = np.maximum(1.0, problem.cluster.memory * scale)
        earliest_first(
            self.layout,
            self.listing,
            np.uint64(bits(usable)),
            capacity,
            favourite,
            parent,
            self.is_tight,
            unit_device,
            sequence,
        )
        own = np.full(problem.graph.num_ops, -1.0)
        own[self.layout.op[sequence]] = np.arange(len(sequence))
        own = np.where(
            problem.graph.phase == UPDATE, np.maximum(own, _last_before(problem, own) + 0.5), own
        )
        return in_orders(problem.placement(units.devices(unit_device), "priority", -own))


@dataclass(frozen=True, eq=False)
class Rolled:
    """Placements made by rules, and what they cost; step times are exact unless devices share a bus
    to send."""

    under: Prepared
    unit_device: Array  # [rules, units] i4
    step_time: Array  # [rules] seconds
    excess: Array  # [rules] bytes over memory
    simulations: int  # one for each rule, and one more each time that what it made did not fit

    def best(self, count: int = 1) -> list[Placement]:
        """The best placements, each once."""
        return [self.under.placement(self.unit_device[row]) for row in self.ranked()[:count]]

    def ranked(self) -> list[int]:
        """Rules from best to worst; of those that made the same placement only one."""
        found: dict[bytes, int] = {}
        for row in np.lexsort((self.step_time, self.excess)).tolist():
            found.setdefault(self.unit_device[row].tobytes(), row)
        return list(found.values())


def in_orders(placement: Placement) -> list[Placement]:
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
    """How long each device would take for everything."""
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
    when = np.where(update, np.minimum(position, _last_before(problem, position) + 0.5), position)
    # Several updates may come after the same op: they stay in their order.
    rank = np.empty(len(position))
    rank[np.lexsort((position, when))] = np.arange(len(position))
    return replace(example, order="priority", priority=-rank)


def _last_before(problem: Problem, position: Array) -> Array:  # [ops]
    """The last position of what must come before each update: its inputs, and all that read what it
    rewrites.

    The simulator would let an update pass an op that still reads its parameter; a real step would
    then be wrong.
    """
    graph = problem.graph
    source, target, update = graph.input_op, graph.edge_target, graph.phase == UPDATE
    reads = graph.is_parameter[source]
    # Of a parameter: that of its last reader which is no update.
    last = np.where(graph.is_parameter, -1.0, position)
    readers = reads & ~update[target]
    np.maximum.at(last, source[readers], position[target[readers]])
    before = np.full(graph.num_ops, -1.0)
    np.maximum.at(before, target, last[source])
    return before
