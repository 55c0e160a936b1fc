"""The problem as bounds read it: devices where each op may run at all, and its seconds there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A problem without contention on links, with the part of memory that no order can escape."""

    problem: Problem
    unit: Array  # [ops] i8, ops that must share a device
    time: Array  # [ops, devices] f8 seconds; infinite where the op may not run, or would not fit

    @staticmethod
    def of(problem: Problem, memory: bool = True) -> Relaxed:
        """Groups become units; where `memory` is true, a device too small for a unit is closed to
        it."""
        graph = problem.graph
        unit = np.where(graph.group >= 0, graph.group, graph.num_groups + np.arange(graph.num_ops))
        _, unit = np.unique(unit, return_inverse=True)
        unit = unit.astype(np.int64)
        allowed = _everywhere(problem.allowed, unit)
        if memory:
            roomy = allowed & (unit_needs(problem, unit) <= problem.cluster.memory)
            if roomy.any(axis=1).all():  # else nothing fits, and `memory.nothing_fits` says so
                allowed = roomy
        return Relaxed(problem, unit, np.where(allowed[unit], problem.op_time, np.inf))

    def within(self, possible: Array) -> Relaxed:
        """The same, with each op only where `possible` [ops, devices] says, and its whole unit with
        it."""
        allowed = _everywhere(possible, self.unit)
        return replace(self, time=np.where(allowed[self.unit], self.time, np.inf))

    def joined(self, one: Array, other: Array) -> Relaxed:
        """The same, where these pairs of ops share a device."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        pairs = (self.unit[one], self.unit[other])
        count = self.num_units
        _, component = connected_components(
            coo_array((np.ones(len(one)), pairs), shape=(count, count))
        )
        return replace(self, unit=component.astype(np.int64)[self.unit]).within(
            np.isfinite(self.time)
        )

    @property
    def num_units(self) -> int:
        return int(self.unit.max()) + 1

    @cached_property
    # [ops, devices] seconds for which the op keeps the device from the next.
    def busy(self) -> Array:
        return self.time + np.where(self.time > 0, self.problem.cluster.device_gap, 0.0)

    @cached_property
    def unit_busy(self) -> Array:  # [units, devices] seconds
        found = np.zeros((self.num_units, self.time.shape[1]))
        np.add.at(found, self.unit, self.busy)
        return found

    @property
    def possible(self) -> bool:
        """True while every op has a device left."""
        return bool(np.isfinite(self.time).any(axis=1).all())


def unit_needs(problem: Problem, unit: Array) -> Array:  # [units, devices] bytes
    """The least memory that a device needs to run the ops of a unit, whatever else it does and in
    whatever order.

    The parameters of the unit are there; while an op runs so are its output, its workspace and all
    it reads, as outputs, copies, residents or in the window. Of an op that takes no time only what
    lasts the whole step is counted, as that is all that `fifo` counts.
    """
    graph = problem.graph
    cluster = problem.cluster
    count = int(unit.max()) + 1
    parameter = graph.is_parameter
    size = graph.output_bytes
    resident = np.bincount(unit[parameter], size[parameter].astype(float), count)
    source = graph.input_op
    target = graph.edge_target
    at_home = unit[source] == unit[target]
    fetched = parameter[source] & ~at_home
    lasting = np.bincount(target[fetched], size[source[fetched]].astype(float), graph.num_ops)
    received = ~parameter[source] & (at_home | cluster.copies_in_memory)
    passing = np.bincount(target[received], size[source[received]].astype(float), graph.num_ops)
    passing += np.where(parameter, 0, size + graph.workspace_bytes)
    need = lasting[:, None] + np.where(problem.op_time > 0, passing[:, None], 0.0)
    most = np.zeros((count, cluster.num_devices))
    np.maximum.at(most, unit, need)
    return most + resident[:, None]


def _everywhere(possible: Array, unit: Array) -> Array:  # [units, devices]
    """True for a device where all ops of a unit may run."""
    found = np.ones((int(unit.max()) + 1, possible.shape[1]), dtype=bool)
    np.logical_and.at(found, unit, possible)
    return found
