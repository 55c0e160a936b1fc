"""The list scheduler of `lister` that asks its network: one problem under one dispatch order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roost.bounds.alike import alike
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._lister.compiled_network import (
    DecisionRecord,
    NetworkWeights,
    SamplingSettings,
    run_network,
)
from roost.placers._lister.device_features import DEVICE_FEATURES, ProblemConstants
from roost.placers._lister.unit_features import unit_features
from roost.placers._listing.list_scheduler import SCALES, ListScheduler, Schedules, total_time
from roost.placers._shared.groups import merged_units
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.units import Units

ORDERS = ("program", "rank")


@dataclass(frozen=True, eq=False)
class NetworkSchedules(Schedules):
    """Schedules made by the network."""

    record: DecisionRecord


@dataclass(frozen=True, eq=False)
class NetworkScheduler:
    """A problem under one order, ready for the network."""

    scheduler: ListScheduler
    constants: ProblemConstants
    features: Array  # [units, features] f4 of each unit

    @staticmethod
    def of(scheduler: ListScheduler) -> NetworkScheduler:
        """The network's scheduler under the order of a list scheduler."""
        units = scheduler.units
        problem = scheduler.units.problem
        total = total_time(units)
        constants = ProblemConstants(
            total=total,
            least_total=float(total.min()),
            balance=max(1e-12, float(1.0 / (1.0 / total).sum())),
            tick=max(1e-12, float(units.time.min(axis=1).mean())),
            alike=first_alike(problem),
            first_op=_first_ops(scheduler),
            shared=problem.cluster.has_shared_buses,
            op_unit=units.unit,
            reads=_reads(units),
            size=np.array(problem.graph.output_bytes),
        )
        return NetworkScheduler(scheduler, constants, unit_features(scheduler, constants))

    @property
    def units(self) -> Units:
        return self.scheduler.units

    @property
    def problem(self) -> Problem:
        return self.units.problem

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices of units; each parameter is fetched once a step."""
        placement = self.scheduler.placement(unit_device)
        return replace(placement, prefetch_bytes=fetched_once(self.problem, placement.device))

    def schedule(
        self,
        network: NetworkWeights,
        settings: SamplingSettings,
        scales: Array = SCALES,
        record: bool = False,
    ) -> NetworkSchedules:
        """One schedule for each row of the settings."""
        count = len(settings.heat)
        num_units = self.units.num_units
        rows = count if record else 0
        num_devices = self.problem.cluster.num_devices
        decisions = DecisionRecord(
            seen=np.zeros((rows, num_units, num_devices, len(DEVICE_FEATURES)), np.float32),
            mask=np.zeros((rows, num_units), np.uint64),
            unit=np.full((rows, num_units), -1, np.int32),
            choice=np.zeros((rows, num_units), np.int32),
            log_prob=np.zeros((rows, num_units)),
        )
        unit_device = np.zeros((count, num_units), np.int32)
        step_time = np.zeros(count)
        excess = np.zeros(count)
        simulations = run_network(
            self.scheduler.layout,
            self.scheduler.listing,
            self.constants,
            network,
            settings,
            self.problem.cluster.memory,
            scales,
            self.scheduler.is_tight,
            decisions,
            unit_device,
            step_time,
            excess,
        )
        return NetworkSchedules(unit_device, step_time, excess, int(simulations), decisions)

    def canonical(self, unit_device: Array) -> Array:
        """The same placement, with devices that are alike renamed in the order of first use."""
        first = self.constants.first_op
        alike = self.constants.alike
        order = np.argsort(np.where(first < 0, np.iinfo(np.int64).max, first), kind="stable")
        name = np.full(len(alike), -1)
        free = {kind: np.flatnonzero(alike == kind).tolist() for kind in set(alike.tolist())}
        for device in unit_device[order].tolist():
            if name[device] < 0:
                name[device] = free[int(alike[device])].pop(0)
        return np.asarray(name[unit_device], dtype=np.int32)


def network_schedulers(
    problem: Problem, most_units: int, orders: tuple[str, ...] = ORDERS
) -> list[NetworkScheduler]:
    """The problem under each order; with early updates where memory is tight."""
    units = units_of(problem, most_units)
    schedulers = [ListScheduler.of(units, order) for order in orders]
    if any(scheduler.is_tight for scheduler in schedulers):
        schedulers = [ListScheduler.of(units, order, eager=True) for order in orders]
    return [NetworkScheduler.of(scheduler) for scheduler in schedulers]


def units_of(problem: Problem, most: int) -> Units:
    """The units of a problem, merged until there are at most about so many."""
    kept: dict[int, Units] = vars(problem).setdefault("_listed_units", {})
    if most not in kept:
        units = Units.of(problem)
        kept[most] = units if units.num_units <= most else merged_units(units, most)
    return kept[most]


def first_alike(problem: Problem) -> Array:  # [devices] i8
    """The first device that each device could change places with."""
    first = np.arange(problem.cluster.num_devices)
    for devices in alike(problem):
        first[devices] = devices[0]
    return first


def _first_ops(scheduler: ListScheduler) -> Array:  # [units] i8, -1 for a unit without ops
    first = np.full(scheduler.units.num_units, -1, np.int64)
    unit = scheduler.listing.unit[::-1].astype(np.int64)
    first[unit] = np.arange(len(unit))[::-1]  # the last write stays: the first op
    return first


def _reads(units: Units) -> Array:
    """[reads, 2] parameters and the ops that read them in other units, by parameter."""
    graph = units.problem.graph
    is_apart = units.unit[graph.input_op] != units.unit[graph.edge_target]
    edges = graph.is_parameter[graph.input_op] & is_apart
    pairs = np.stack([graph.input_op[edges], graph.edge_target[edges]], axis=1).astype(np.int64)
    return np.ascontiguousarray(pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])
