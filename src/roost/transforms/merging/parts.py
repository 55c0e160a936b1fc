"""Parts of a graph that merge, two at a time, and never close a cycle.

Ops are kept in stages, which keep phases apart and are themselves in order, so that a cycle could
only close within a stage. All parts stand in one topological order. Two of a stage may merge where
no path of two edges or more leads from one to the other (the rule behind Herrmann et al. 2019,
"Multilevel algorithms for acyclic partitioning of directed acyclic graphs"); two that are next to
each other in the order always may.

Differs in: the other path is searched for, within bounds, instead of being excluded by levels; and
pairs merge one after the other, not in matchings.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import PHASES, Graph

# Looked at in the search for another path; where there are more, the pair is left alone.
_MOST_EDGES = 64
_MOST_BETWEEN = 128  # parts that may have to change places in the order


def stages(graph: Graph) -> Array:  # [ops]
    """The stage of each op: not before those of its inputs, and `stage % 5` is its phase.

    A plain training step has one stage for each phase. A forward op after a backward op begins
    another five.
    """
    phase, inputs = graph.phase.tolist(), graph.input_lists()
    stage = [0] * graph.num_ops
    for op, sources in enumerate(inputs):
        last = max((stage[source] for source in sources), default=0)
        stage[op] = last + (phase[op] - last) % len(PHASES)
    return np.array(stage)


class Parts:
    """Parts of the ops that compute; at first each op is one. A part is known by one of its ops."""

    def __init__(self, graph: Graph) -> None:
        count = graph.num_ops
        stage = stages(graph)
        order = np.argsort(stage, kind="stable")
        order = order[~graph.is_parameter[order]]
        place = np.full(count, -1)
        place[order] = np.arange(len(order))
        self.alive: dict[int, None] = dict.fromkeys(order.tolist())
        # Of each part; the end of the order is in no stage.
        self.stage: list[int] = [*stage.tolist(), -1]
        self._place: list[int] = place.tolist()  # in the order
        self._part = list(range(count))
        self._after, self._before = [count] * (count + 1), [count] * (count + 1)
        for one, other in pairwise([count, *order.tolist(), count]):
            self._after[one], self._before[other] = other, one
        # Bytes from other parts of the stage.
        self.inputs: list[dict[int, int]] = [{} for _ in range(count)]
        self.consumers: list[dict[int, int]] = [{} for _ in range(count)]
        source, target = graph.input_op, graph.edge_target
        inside = (stage[source] == stage[target]) & ~graph.is_parameter[source]
        source, target = source[inside], target[inside]
        sizes = graph.output_bytes[source].tolist()
        for one, other, size in zip(source.tolist(), target.tolist(), sizes, strict=True):
            self.consumers[one][other] = self.inputs[other][one] = size

    def __len__(self) -> int:
        return len(self.alive)

    def part_of(self, op: int) -> int:
        part = self._part
        while part[op] != op:
            part[op] = op = part[part[op]]
        return op

    def beside(self, part: int) -> list[int]:
        """The parts next to it in the order, of the same stage."""
        return [
            other
            for other in (self._before[part], self._after[part])
            if self.stage[other] == self.stage[part]
        ]

    def bytes_between(self, part: int, other: int) -> int:
        return self.consumers[part].get(other, 0) + self.inputs[part].get(other, 0)

    def merge(self, part: int, other: int) -> int:
        """The part that both have become; -1 where that would close a cycle, or cannot be told
        cheaply."""
        first, last = (part, other) if self._place[part] < self._place[other] else (other, part)
        joined = int(last in self.consumers[first])
        if self._after[first] == last or len(self.consumers[first]) == joined:
            at = last
        elif len(self.inputs[last]) == joined:
            at = first
        else:
            at = self._make_room(first, last)
            if at < 0:
                return -1
        few, many = sorted(
            (first, last), key=lambda p: (len(self.consumers[p]) + len(self.inputs[p]), p)
        )
        self._take_place(few, many, at)
        self._take_edges(few, many)
        self._part[few] = many
        del self.alive[few]
        return many

    def _make_room(self, first: int, last: int) -> int:
        """Which of the two places serves both; parts between them change places if need be. -1
        where neither does."""
        ahead = len(self.consumers[first]) <= len(self.inputs[last])
        if ahead:
            bound = self._search(first, last, self.consumers, after=False)
        else:
            bound = self._search(last, first, self.inputs, after=True)
        if bound is None:
            return -1
        if not bound:
            return last if ahead else first
        between = self._between(first, last)
        if between is None:
            return -1
        # What comes after the first goes behind the two, or what comes before the last goes in
        # front of them.
        moved, rest = [p for p in between if p in bound], [p for p in between if p not in bound]
        self._reorder([first, *rest, last, *moved] if ahead else [*moved, first, *rest, last])
        return last if ahead else first

    def _search(
        self, start: int, goal: int, edges: list[dict[int, int]], after: bool
    ) -> set[int] | None:
        """All between the two that `start` leads to; None where that is the goal, or too much to
        look at."""
        found: set[int] = set()
        stack, left, limit, place = [start], _MOST_EDGES, self._place[goal], self._place
        while stack:
            part = stack.pop()
            left -= len(edges[part])
            if left < 0:
                return None
            for other in edges[part]:
                if other == goal:
                    if part != start:
                        return None
                elif other not in found and (place[other] > limit) == after:
                    found.add(other)
                    stack.append(other)
        return found

    def _between(self, first: int, last: int) -> list[int] | None:
        found: list[int] = []
        part = self._after[first]
        while part != last:
            found.append(part)
            if len(found) > _MOST_BETWEEN:
                return None
            part = self._after[part]
        return found

    def _reorder(self, parts: list[int]) -> None:
        """Put parts that stand next to each other into this order."""
        inside = set(parts)
        before = next(p for p in (self._before[part] for part in parts) if p not in inside)
        after = next(p for p in (self._after[part] for part in parts) if p not in inside)
        places = sorted(self._place[part] for part in parts)
        for part, place in zip(parts, places, strict=True):
            self._place[part] = place
        for one, other in pairwise([before, *parts, after]):
            self._after[one], self._before[other] = other, one

    def _take_place(self, few: int, many: int, at: int) -> None:
        """Leave `many` in the order, at the place of one of the two."""
        # Or first take `many` out, then put it where `few` stands.
        gone = few if at == many else many
        self._after[self._before[gone]] = self._after[gone]
        self._before[self._after[gone]] = self._before[gone]
        if at != many:
            before, after = self._before[few], self._after[few]
            self._after[before] = self._before[after] = many
            self._before[many], self._after[many] = before, after
            self._place[many] = self._place[few]

    def _take_edges(self, few: int, many: int) -> None:
        for ahead, behind in ((self.consumers, self.inputs), (self.inputs, self.consumers)):
            for other, size in ahead[few].items():
                del behind[other][few]
                if other != many:
                    total = ahead[many].get(other, 0) + size
                    ahead[many][other] = behind[other][many] = total
            ahead[few] = {}
