"""Merges ops until few are left: a graph small enough for a learner or an exact solver.

Each op of the coarse graph stands for ops of one phase that will share a device. The coarse graph
has no cycle. A group is never split between devices. Its ops may be in several coarse ops, which
then share a group: a layer's forward and backward ops, for example, have the loss between them.

The lightest part merges first, with the neighbour of least (weight of both)^2 / bytes between them;
`merging/parts.py` tells which pairs may merge. Parts merge in rounds, until few enough are left:

1. neighbours along an edge, up to three times the mean weight, not in two different groups;
2. the same, also of two different groups;
3. both rounds again, up to six times the mean weight;
4. any two that stand next to each other in the order.

Updates merge if the same coarse op first reads their parameters, and so do parameters.

There are never fewer ops than stages: one for each phase, and more if a path goes back from a later
phase to an earlier one. Ops without a common device kind never merge. If too many ops remain,
`counts` has the excess.

A coarse op has one output, so it sends everything to each device that needs any of it. It also
waits for all its inputs. Both make the coarse graph a little slower than the original under the
expanded placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.errors import InputError
from roost.transforms._transformed import Transformed
from roost.transforms.merging.lightest_first import LightestFirst
from roost.transforms.merging.merged_graph import merged_graph
from roost.transforms.merging.merged_parameters import MergedParameters


@dataclass(frozen=True)
class Coarsen:
    """Merges ops into at most so many groups, each an op of the coarse graph."""

    num_groups: int = 200
    # Count every coarse op. If false, coarse ops of one group count once, as one decision of a
    # placement, and there are more ops than `num_groups`.
    count_ops: bool = True

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise InputError(f"num_groups is {self.num_groups}; it must be at least 1")

    def apply(self, graph: Graph, weight: Array | None = None) -> Transformed:
        """The coarse graph, balanced by `weight` [ops], such as a mean time; by default by FLOP."""
        weight = graph.flop if weight is None else np.asarray(weight, dtype=np.float64)
        if weight.shape != (graph.num_ops,) or not np.isfinite(weight).all() or (weight < 0).any():
            raise InputError(f"weight must be {graph.num_ops} finite figures that are not negative")
        if graph.num_ops <= self.num_groups:
            return Transformed.unchanged(graph)
        merger = LightestFirst(graph, weight, self.num_groups, self.count_ops)
        parameters = MergedParameters(graph, merger, self.num_groups)
        parts = merger.parts
        while (excess := self._excess(merger, parameters)) > 0:
            before = len(parts)
            merger.merge_updates(excess)
            if len(parts) == before and not merger.merge_to(before - max(1, excess // 2)):
                break
        sets = parameters.merged(excess)
        part = np.array([parts.part_of(op) for op in range(graph.num_ops)])
        for ops in sets:
            part[ops] = ops[0]
        counts = {
            "coarsen.merged": graph.num_ops - len(parts) - len(sets),
            "coarsen.too_many": max(0, self._excess(merger, parameters)),
        }
        return merged_graph(graph, part, merger.unit, merger.units, counts)

    def _excess(self, merger: LightestFirst, parameters: MergedParameters) -> int:
        """The number of groups above `num_groups`."""
        sets = parameters.sets()
        if self.count_ops:
            return len(merger.parts) + len(sets) - self.num_groups
        ops = [*merger.parts.alive, *(ops[0] for ops in sets)]
        return len({merger.units.find(merger.unit[op]) for op in ops}) - self.num_groups
