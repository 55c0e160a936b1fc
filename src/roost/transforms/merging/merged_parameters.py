"""Merging of the parameters of merged parts.

A parameter has no inputs, so merging two closes no cycle. But a parameter merged with a distant one
would be used far from its home. So parameters merge if the same part reads them first and the same
stages read them. A weight, read in three phases, stays apart from its optimizer state.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from roost.core.graph import Graph
from roost.transforms.merging.lightest_first import LightestFirst

_MOST_BYTES = 8.0  # of a set, in means


class MergedParameters:
    """The parameters of a graph, and the parts that they follow."""

    def __init__(self, graph: Graph, merger: LightestFirst, num_groups: int) -> None:
        self.merger = merger
        self.graph = graph
        self.ops: list[int] = np.flatnonzero(graph.is_parameter).tolist()
        self.size: list[int] = graph.output_bytes.tolist()
        total = int(graph.output_bytes[graph.is_parameter].sum())
        self.most_bytes = _MOST_BYTES * total / num_groups
        readers = [graph.consumers_of(op).tolist() for op in self.ops]
        self.leader = [row[0] if row else -1 for row in readers]
        stage = merger.parts.stage
        self.stages = [tuple(sorted({stage[reader] for reader in row})) for row in readers]

    def sets(self) -> list[list[int]]:
        """The parameters to merge now: of one group or none, and not too many bytes."""
        merger = self.merger
        num_groups = self.graph.num_groups
        sets: list[list[int]] = []
        open_set: dict[Hashable, tuple[int, int]] = {}  # the set that may take more, and its bytes
        for op, leader, stages in zip(self.ops, self.leader, self.stages, strict=True):
            unit = merger.units.find(merger.unit[op])
            bound = unit if unit < num_groups else -1 - merger.units.mask[unit]
            key = (merger.parts.part_of(leader) if leader >= 0 else -1, bound, stages)
            number, held = open_set.get(key, (-1, 0))
            if number < 0 or held + self.size[op] > self.most_bytes:
                number = len(sets)
                held = 0
                sets.append([])
            sets[number].append(op)
            open_set[key] = (number, held + self.size[op])
        return sets

    def merged(self, excess: int) -> list[list[int]]:
        """The sets, each in one unit; neighbours merge two by two to remove the excess."""
        sets = self.sets()
        for ops in sets:
            for op in ops[1:]:
                self.merger.join(ops[0], op)
        while excess > 0:
            fewer = self._pairs(sets, excess)
            if len(fewer) == len(sets):
                break
            excess -= len(sets) - len(fewer)
            sets = fewer
        return sets

    def _pairs(self, sets: list[list[int]], excess: int) -> list[list[int]]:
        """The sets with neighbours merged two by two, until no excess is left."""
        kept: list[list[int]] = []
        is_open = False
        for ops in sets:
            if is_open and excess and self.merger.may_join(kept[-1][0], ops[0]):
                self.merger.join(kept[-1][0], ops[0])
                kept[-1] = kept[-1] + ops
                is_open = False
                excess = excess - 1
            else:
                kept.append(ops)
                is_open = True
        return kept
