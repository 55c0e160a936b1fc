"""Parameters merged as the parts that read them are.

A parameter has no inputs, so merging two closes no cycle; but one that is merged with another from
far away would be used far from where it lives. So those that the same part reads first become one,
where the same stages read them: a weight, read in three phases, stays apart from its optimizer
state.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from roost.core.graph import Graph
from roost.transforms.merging.lightest import Lightest

_MOST_BYTES = 8.0  # of a set, in means


class Parameters:
    """The parameters of a graph, and the parts that they follow."""

    def __init__(self, graph: Graph, work: Lightest, num_groups: int) -> None:
        self.work, self.graph = work, graph
        self.ops: list[int] = np.flatnonzero(graph.is_parameter).tolist()
        self.size: list[int] = graph.output_bytes.tolist()
        self.most_bytes = (
            _MOST_BYTES * int(graph.output_bytes[graph.is_parameter].sum()) / num_groups
        )
        readers = [graph.consumers_of(op).tolist() for op in self.ops]
        self.leader = [row[0] if row else -1 for row in readers]
        self.stages = [
            tuple(sorted({work.parts.stage[reader] for reader in row})) for row in readers
        ]

    def sets(self) -> list[list[int]]:
        """The parameters that are to be one, as things stand: of one group or of none, and not too
        many bytes."""
        work, num_groups = self.work, self.graph.num_groups
        sets: list[list[int]] = []
        open_set: dict[Hashable, tuple[int, int]] = {}  # which set takes more, and its bytes
        for op, leader, stages in zip(self.ops, self.leader, self.stages, strict=True):
            unit = work.units.find(work.unit[op])
            bound = unit if unit < num_groups else -1 - work.units.mask[unit]
            key = (work.parts.part_of(leader) if leader >= 0 else -1, bound, stages)
            number, held = open_set.get(key, (-1, 0))
            if number < 0 or held + self.size[op] > self.most_bytes:
                number, held = len(sets), 0
                sets.append([])
            sets[number].append(op)
            open_set[key] = (number, held + self.size[op])
        return sets

    def merged(self, excess: int) -> list[list[int]]:
        """The sets, each in one unit, and so many fewer if device kinds allow: neighbours become
        one, two by two."""
        sets = self.sets()
        for ops in sets:
            for op in ops[1:]:
                self.work.join(ops[0], op)
        while excess > 0:
            fewer = self._pairs(sets, excess)
            if len(fewer) == len(sets):
                break
            excess -= len(sets) - len(fewer)
            sets = fewer
        return sets

    def _pairs(self, sets: list[list[int]], excess: int) -> list[list[int]]:
        """Sets two by two, until none is in excess."""
        kept: list[list[int]] = []
        is_open = False
        for ops in sets:
            if is_open and excess and self.work.may_join(kept[-1][0], ops[0]):
                self.work.join(kept[-1][0], ops[0])
                kept[-1] = kept[-1] + ops
                is_open, excess = False, excess - 1
            else:
                kept.append(ops)
                is_open = True
        return kept
