"""Merges ops until few are left: a graph small enough for a learner or an exact solver.

Each op of the coarse graph stands for ops of one phase that will share a device, and the coarse
graph has no cycle. A group is never split between devices: its ops may be in several coarse ops,
which are then in one group. They often must be, since a layer's forward and backward ops, in one
group, have the loss between them.

Lightest first, a part merges with the neighbour for which (weight of both)^2 / bytes between them
is least; `_parts.py` says which pairs may. In turn, until few enough are left: neighbours along an
edge, up to three times the mean weight, which are not in two different groups; then also those that
are; both again up to twice that weight; then any two that stand next to each other in the order.
Updates become one where the same coarse op first reads their parameters, and so do parameters.

There are never fewer ops than stages: one for each phase, and more where a path goes back from a
later phase to an earlier one. Nor are ops merged that allow no common device kind. Where that
leaves more than asked for, they stay, and `counts` says how many are too many.

An op has one output, so a coarse op sends all that leaves it to every device that needs any of it;
and it waits for all its inputs before it begins. Both make the coarse graph a little slower than
the original under the expanded placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.errors import InputError
from roost.transforms._transformed import Transformed
from roost.transforms.merging.lightest import Lightest
from roost.transforms.merging.merged import merged
from roost.transforms.merging.parameters import Parameters


@dataclass(frozen=True)
class Coarsen:
    """Merges ops into at most so many groups, each an op of the coarse graph."""

    num_groups: int = 200
    # Whether every coarse op counts as a group. If not, those that share a group count once, as one
    # decision of a placement; there are then more ops than groups.
    count_ops: bool = True

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise InputError(f"num_groups is {self.num_groups}; it must be at least 1")

    def apply(self, graph: Graph, weight: Array | None = None) -> Transformed:
        """The coarse graph, balanced by FLOP, or by `weight` [ops] such as the mean of op_time over
        the devices."""
        weight = graph.flop if weight is None else np.asarray(weight, dtype=np.float64)
        if weight.shape != (graph.num_ops,) or not np.isfinite(weight).all() or (weight < 0).any():
            raise InputError(f"weight must be {graph.num_ops} finite figures that are not negative")
        if graph.num_ops <= self.num_groups:
            return Transformed.unchanged(graph)
        work = Lightest(graph, weight, self.num_groups, self.count_ops)
        parameters = Parameters(graph, work, self.num_groups)
        while (excess := self._excess(work, parameters)) > 0:
            before = len(work.parts)
            work.merge_updates(excess)
            if len(work.parts) == before and not work.merge_to(before - max(1, excess // 2)):
                break
        sets = parameters.merged(excess)
        part = np.array([work.parts.part_of(op) for op in range(graph.num_ops)])
        for ops in sets:
            part[ops] = ops[0]
        merges = graph.num_ops - len(work.parts) - len(sets)
        counts = {
            "coarsen.merged": merges,
            "coarsen.too_many": max(0, self._excess(work, parameters)),
        }
        return merged(graph, part, work.unit, work.units, counts)

    def _excess(self, work: Lightest, parameters: Parameters) -> int:
        """How many groups there are too many."""
        sets = parameters.sets()
        if self.count_ops:
            return len(work.parts) + len(sets) - self.num_groups
        units = {
            work.units.find(work.unit[op]) for op in [*work.parts.alive, *(ops[0] for ops in sets)]
        }
        return len(units) - self.num_groups
