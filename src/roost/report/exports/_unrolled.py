"""An unrolled step as exporters read it: the module, the microbatch and the seconds of each op."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, INPUT, PARAMETER, UPDATE, Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports._modules import Modules
from roost.transforms.microbatch import SHARED, copies_of

if TYPE_CHECKING:
    from torch import nn

MINOR = 0.02  # a share of the computing that may be rounded away


@dataclass(frozen=True, eq=False)
class UnrolledStep:
    """A placed step of microbatches. A step that was never unrolled is one microbatch."""

    problem: Problem
    placement: Placement
    copy: Array  # [ops] the microbatch, or SHARED
    units: tuple[str, ...]  # blocks and leaf modules, in the order of their first calls
    calls: tuple[int, ...]  # units in the order in which forward calls them
    unit: Array  # [ops] index in units; -1 for ops outside of them
    modules: Modules  # of the forward ops of one microbatch

    @staticmethod
    def of(model: nn.Module | None, problem: Problem, placement: Placement) -> UnrolledStep:
        """The step of a graph from `transforms/microbatch.py`, or of one as captured."""
        graph = problem.graph
        copy = copies_of(graph)
        if (copy == SHARED).all():
            copy = np.where(np.isin(graph.phase, (PARAMETER, UPDATE)), SHARED, 0)
        kept = _forward_of_one(graph, copy)
        modules = Modules(_subgraph(graph, kept), model)
        of_kept = modules.unit
        calls = [
            unit
            for unit, _ in groupby(of_kept[op] for op in modules.forward_ops().tolist())
            if unit is not None
        ]
        if not calls:
            raise InputError(
                f"graph {graph.name!r} has no modules; capture it from a model of PyTorch"
            )
        units = tuple(dict.fromkeys(calls))
        number = {name: index for index, name in enumerate(units)}
        return UnrolledStep(
            problem,
            problem.check(placement),
            copy,
            units,
            tuple(number[unit] for unit in calls),
            np.array(_units_of(graph, modules, number)),
            modules,
        )

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return int(self.copy.max()) + 1

    @property
    def trains(self) -> bool:
        return bool((self.problem.graph.phase == BACKWARD).any())

    @cached_property
    def seconds(self) -> Array:  # [ops] of forward and backward under the placement
        graph = self.problem.graph
        time = self.problem.op_time[np.arange(graph.num_ops), self.placement.device]
        return np.where((self.copy == SHARED) | (graph.phase == UPDATE), 0.0, time)

    @cached_property
    def by_unit(self) -> Array:  # [units, devices] seconds
        return self._summed(self.unit, len(self.units))

    @cached_property
    def busiest(
        self,
    ) -> Array:  # [units] device; a unit that takes no time goes with the one before
        device = np.where(self.by_unit.any(axis=1), self.by_unit.argmax(axis=1), -1)
        known = np.flatnonzero(device >= 0)
        if len(known):
            place = np.searchsorted(known, np.arange(len(device)), side="right") - 1
            device = device[known[np.maximum(place, 0)]]
        return np.maximum(device, 0)

    @cached_property
    def by_copy(self) -> Array:  # [microbatches, devices] seconds
        return self._summed(self.copy, self.count)

    def _summed(self, row: Array, count: int) -> Array:
        sums = np.zeros((count, self.problem.cluster.num_devices))
        inside = row >= 0
        np.add.at(sums, (row[inside], self.placement.device[inside]), self.seconds[inside])
        return sums

    @cached_property
    def computing(self) -> list[int]:
        """The devices with more than a minor share of the computing."""
        share = self.by_copy.sum(axis=0)
        return np.flatnonzero(share > MINOR * share.sum()).tolist() or [0]

    @cached_property
    def home_bytes(self) -> Array:  # [devices] bytes of weights and optimizer states
        graph = self.problem.graph
        held = np.where(graph.is_parameter, graph.output_bytes, 0)
        sums = np.zeros(self.problem.cluster.num_devices)
        np.add.at(sums, self.placement.device, held)
        return sums

    def moved(self, wanted: Array) -> Array:  # [ops] device
        """Devices for all ops, from those wanted; -1 goes with its inputs, inputs with readers.

        An op that may not run there, or that shares a group with another, stays within the rules.
        """
        problem = self.problem
        graph = problem.graph
        device = wanted.copy()
        inputs = graph.input_lists()
        for op in np.flatnonzero(device < 0).tolist():
            near = [source for source in inputs[op] if not graph.is_parameter[source]]
            device[op] = next((device[each] for each in near if device[each] >= 0), -1)
        for op in np.flatnonzero((device < 0) | (graph.phase == INPUT)).tolist():
            readers = [device[each] for each in graph.consumers_of(op).tolist()]
            near = [each for each in readers if each >= 0]
            device[op] = near[0] if near else self.placement.device[op]
        members = np.flatnonzero(graph.group >= 0)
        device[members] = device[problem.group_leader[graph.group[members]]]
        forbidden = ~problem.allowed[np.arange(graph.num_ops), device]
        if forbidden.any():
            groups = np.unique(graph.group[forbidden & (graph.group >= 0)])
            forbidden |= np.isin(graph.group, groups)
            device[forbidden] = self.placement.device[forbidden]
        return device

    def with_devices(self, device: Array, order: str, priority: Array | None = None) -> Placement:
        """The placement with other devices and another order."""
        return replace(self.placement, device=device, order=order, priority=priority)


def _units_of(graph: Graph, modules: Modules, number: dict[str, int]) -> list[int]:
    """The unit of each op: that of its forward op, else of its module; -1 for none."""
    by_name = {
        modules.graph.op_names[op]: number[unit]
        for op, unit in enumerate(modules.unit)
        if unit is not None
    }
    units = []
    for name, path in zip(graph.op_names, graph.modules, strict=True):
        own = modules.unit_of_module(re.sub(r"@\d+", "", path))
        units.append(by_name.get(name.partition("#")[0], number.get(own or "", -1)))
    return units


def _forward_of_one(graph: Graph, copy: Array) -> Array:  # ops
    """The forward ops and inputs of the first microbatch, and the weights that they read."""
    inside = np.isin(graph.phase, (INPUT, FORWARD)) & np.isin(copy, (0, SHARED))
    read = np.zeros(graph.num_ops, dtype=bool)
    read[graph.input_op[inside[graph.edge_target]]] = True
    return np.flatnonzero(inside | (read & graph.is_parameter))


def _subgraph(graph: Graph, kept: Array) -> Graph:
    """The graph of some ops, without the numbers of their copies."""
    new = {int(op): index for index, op in enumerate(kept.tolist())}
    inputs = [[new[s] for s in graph.inputs_of(op).tolist() if s in new] for op in kept.tolist()]
    columns: dict[str, Any] = {}
    for column in ("kinds", "dtypes", "modules", "allowed"):
        values = getattr(graph, column)
        columns[column] = tuple(values[op] for op in kept.tolist())
    for column in ("flop", "bytes_read", "bytes_written", "output_bytes", "workspace_bytes"):
        columns[column] = getattr(graph, column)[kept]
    return Graph(
        name=graph.name,
        op_names=tuple(graph.op_names[op].partition("#")[0] for op in kept.tolist()),
        phase=graph.phase[kept],
        group_names=(),
        group=np.full(len(kept), -1),
        input_start=np.cumsum([0, *map(len, inputs)]),
        input_op=np.array([op for row in inputs for op in row], dtype=np.int32),
        **columns,
    )
