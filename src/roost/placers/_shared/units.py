"""Units: the ops that a placer moves together, which are the groups of the graph or more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD
from roost.core.problem import Problem
from roost.transforms.merging.unions import Unions


@dataclass(frozen=True, eq=False)
class Units:
    """A partition of the ops: any allowed device for each unit makes a valid placement."""

    problem: Problem
    unit: Array  # [ops] i8, numbered by the first op of each that is no parameter

    @staticmethod
    def of(problem: Problem, tie: str = "readers") -> Units:
        """The groups of a problem, and each op without one, joined further.

        `tie` says what parameters are joined with. "readers": all the ops that read them, so that
        nothing is ever fetched. "updates": the updates that read them, so that nothing is sent
        home. "nothing": they go anywhere. Two that may share no device are never joined. They are
        made once for a problem: several placers ask for them.
        """
        kept: dict[str, Units] = vars(problem).setdefault("_units", {})
        if tie not in kept:
            kept[tie] = Units._made(problem, tie)
        return kept[tie]

    @staticmethod
    def _made(problem: Problem, tie: str) -> Units:
        graph = problem.graph
        bits = 1 << np.arange(problem.cluster.num_devices, dtype=object)
        sets = Unions([int(mask) for mask in (problem.allowed * bits).sum(axis=1)])
        members = np.flatnonzero(graph.group >= 0)
        for op, leader in zip(
            members.tolist(), problem.group_leader[graph.group[members]].tolist(), strict=True
        ):
            sets.join(op, leader)
        if tie != "nothing":
            reads = graph.is_parameter[graph.input_op]
            if tie == "updates":
                phase = graph.phase[graph.edge_target]
                reads &= (phase != FORWARD) & (phase != BACKWARD)
            for parameter, reader in zip(
                graph.input_op[reads].tolist(), graph.edge_target[reads].tolist(), strict=True
            ):
                sets.join(parameter, reader)
        return Units(problem, numbered(graph.is_parameter, sets.roots()))

    @cached_property
    def num_units(self) -> int:
        return int(self.unit.max()) + 1

    @cached_property
    def ops(self) -> Array:
        """The ops by unit, ascending: those of unit i are ops[start[i] : start[i + 1]]."""
        return np.argsort(self.unit, kind="stable")

    @cached_property
    def start(self) -> Array:  # [units + 1]
        return np.concatenate([[0], np.cumsum(np.bincount(self.unit, minlength=self.num_units))])

    @cached_property
    def allowed(self) -> Array:  # [units, devices] bool
        found = np.ones((self.num_units, self.problem.cluster.num_devices), dtype=bool)
        np.logical_and.at(found, self.unit, self.problem.allowed)
        return found

    @cached_property
    def time(self) -> Array:  # [units, devices] seconds, added up
        found = np.zeros((self.num_units, self.problem.cluster.num_devices))
        np.add.at(found, self.unit, self.problem.op_time)
        return found

    @cached_property
    def resident_bytes(self) -> Array:  # [units] bytes of its parameters
        found = np.zeros(self.num_units, dtype=np.int64)
        parameters = self.problem.graph.is_parameter
        np.add.at(found, self.unit[parameters], self.problem.graph.output_bytes[parameters])
        return found

    @cached_property
    def edges(self) -> tuple[Array, Array, Array]:
        """Tensors between units: from, to, and bytes; one for each pair, parameters included."""
        graph = self.problem.graph
        source = self.unit[graph.input_op]
        target = self.unit[graph.edge_target]
        apart = source != target
        key = source[apart] * self.num_units + target[apart]
        pairs, inverse = np.unique(key, return_inverse=True)
        # A tensor that several ops of a unit read is sent there once.
        tensor = np.unique(np.stack([inverse, graph.input_op[apart]]), axis=1)
        size = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(size, tensor[0], graph.output_bytes[tensor[1]])
        return pairs // self.num_units, pairs % self.num_units, size

    def devices(self, unit_device: Array) -> Array:  # [ops] i4
        """The device of each op, from that of each unit."""
        return np.asarray(unit_device, dtype=np.int32)[self.unit]

    def unit_devices(self, device: Array) -> Array:  # [units] i4
        """The device of each unit: that of its first op that is no parameter."""
        return np.asarray(device, dtype=np.int32)[self.leader]

    @cached_property
    def leader(self) -> Array:  # [units] its first op that is no parameter, or its first
        return _leaders(self.problem.graph.is_parameter, self.unit, self.num_units)


def _leaders(is_parameter: Array, unit: Array, count: int) -> Array:
    leader = np.zeros(count, dtype=np.int64)
    order = np.arange(len(unit))
    # What is written last stays.
    for ops in (order[is_parameter][::-1], order[~is_parameter][::-1]):
        leader[unit[ops]] = ops
    return leader


def numbered(is_parameter: Array, root: Array) -> Array:
    """Units from the roots of sets, by the first op of each that is no parameter."""
    _, unit = np.unique(root, return_inverse=True)
    leader = _leaders(is_parameter, unit, int(unit.max()) + 1)
    number = np.empty(len(leader), dtype=np.int64)
    number[np.argsort(leader, kind="stable")] = np.arange(len(leader))
    return number[unit]
