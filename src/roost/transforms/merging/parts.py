"""Parts of a graph that merge two at a time and never close a cycle.

Stages keep phases apart and are in order, so a cycle could only close within a stage. All parts
stand in one topological order. Two parts of a stage may merge if no path of two edges or more leads
from one to the other (the rule behind Herrmann et al. 2019, "Multilevel algorithms for acyclic
partitioning of directed acyclic graphs"). Two neighbours in the order always may.

Differs in: a bounded search looks for the other path, instead of levels that exclude it; and pairs
merge one after the other, not in matchings.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import PHASES, Graph

_MOST_EDGES = 64  # in the search for another path; a pair with more does not merge
_MOST_BETWEEN = 128  # parts that may have to change places in the order


def stages(graph: Graph) -> Array:  # [ops]
    """The stage of each op: no earlier than the stages of its inputs; `stage % 5` is its phase.

    A plain training step has one stage for each phase. A forward op after a backward op begins
    five more.
    """
    phase = graph.phase.tolist()
    inputs = graph.input_lists()
    stage = [0] * graph.num_ops
    for op, sources in enumerate(inputs):
        last = max((stage[source] for source in sources), default=0)
        stage[op] = last + (phase[op] - last) % len(PHASES)
    return np.array(stage)


class Parts:
    """Parts of the ops that compute, first one for each op. One of its ops is a part's number."""

    def __init__(self, graph: Graph) -> None:
        count = graph.num_ops
        stage = stages(graph)
        order = np.argsort(stage, kind="stable")
        order = order[~graph.is_parameter[order]]
        place = np.full(count, -1)
        place[order] = np.arange(len(order))
        self.alive: dict[int, None] = dict.fromkeys(order.tolist())
        self.stage: list[int] = [*stage.tolist(), -1]  # [parts] and the end of the order
        self._place: list[int] = place.tolist()  # [parts] in the order
        self._part = list(range(count))
        self._after = [count] * (count + 1)
        self._before = [count] * (count + 1)
        for one, other in pairwise([count, *order.tolist(), count]):
            self._after[one] = other
            self._before[other] = one
        # [parts] other part of the stage -> bytes from it, or to it.
        self.inputs: list[dict[int, int]] = [{} for _ in range(count)]
        self.consumers: list[dict[int, int]] = [{} for _ in range(count)]
        source = graph.input_op
        target = graph.edge_target
        inside = (stage[source] == stage[target]) & ~graph.is_parameter[source]
        source = source[inside]
        target = target[inside]
        sizes = graph.output_bytes[source].tolist()
        for one, other, size in zip(source.tolist(), target.tolist(), sizes, strict=True):
            self.consumers[one][other] = self.inputs[other][one] = size

    def __len__(self) -> int:
        return len(self.alive)

    def part_of(self, op: int) -> int:
        """The part that an op is in now."""
        part = self._part
        while part[op] != op:
            part[op] = op = part[part[op]]
        return op

    def beside(self, part: int) -> list[int]:
        """The neighbours of a part in the order, of the same stage."""
        neighbours = (self._before[part], self._after[part])
        return [other for other in neighbours if self.stage[other] == self.stage[part]]

    def bytes_between(self, part: int, other: int) -> int:
        """Bytes that two parts exchange."""
        return self.consumers[part].get(other, 0) + self.inputs[part].get(other, 0)

    def merge(self, part: int, other: int) -> int:
        """Merge two parts into one, and return it; -1 if that may close a cycle."""
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
        num_edges = {p: len(self.consumers[p]) + len(self.inputs[p]) for p in (first, last)}
        few, many = sorted((first, last), key=lambda p: (num_edges[p], p))
        self._take_place(few, many, at)
        self._take_edges(few, many)
        self._part[few] = many
        del self.alive[few]
        return many

    def _make_room(self, first: int, last: int) -> int:
        """The place for both, after moving parts between them if needed; -1 if there is none."""
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
        # Consumers of the first go behind the two, or inputs of the last in front of them.
        moved = [p for p in between if p in bound]
        rest = [p for p in between if p not in bound]
        self._reorder([first, *rest, last, *moved] if ahead else [*moved, first, *rest, last])
        return last if ahead else first

    def _search(
        self, start: int, goal: int, edges: list[dict[int, int]], after: bool
    ) -> set[int] | None:
        """The parts between the two that `start` leads to.

        None if they lead to the goal, or have too many edges.
        """
        reached: set[int] = set()
        stack = [start]
        left = _MOST_EDGES
        limit = self._place[goal]
        place = self._place
        while stack:
            part = stack.pop()
            left -= len(edges[part])
            if left < 0:
                return None
            for other in edges[part]:
                if other == goal:
                    if part != start:
                        return None
                elif other not in reached and (place[other] > limit) == after:
                    reached.add(other)
                    stack.append(other)
        return reached

    def _between(self, first: int, last: int) -> list[int] | None:
        """The parts between two in the order; None if there are too many."""
        between: list[int] = []
        part = self._after[first]
        while part != last:
            between.append(part)
            if len(between) > _MOST_BETWEEN:
                return None
            part = self._after[part]
        return between

    def _reorder(self, parts: list[int]) -> None:
        """Put adjacent parts into this order."""
        inside = set(parts)
        before = next(p for p in (self._before[part] for part in parts) if p not in inside)
        after = next(p for p in (self._after[part] for part in parts) if p not in inside)
        places = sorted(self._place[part] for part in parts)
        for part, place in zip(parts, places, strict=True):
            self._place[part] = place
        for one, other in pairwise([before, *parts, after]):
            self._after[one] = other
            self._before[other] = one

    def _take_place(self, few: int, many: int, at: int) -> None:
        """Leave `many` in the order, at the place of one of the two."""
        # At the place of `few`: take `many` out, then put it in for `few`.
        gone = few if at == many else many
        self._after[self._before[gone]] = self._after[gone]
        self._before[self._after[gone]] = self._before[gone]
        if at != many:
            before = self._before[few]
            after = self._after[few]
            self._after[before] = self._before[after] = many
            self._before[many] = before
            self._after[many] = after
            self._place[many] = self._place[few]

    def _take_edges(self, few: int, many: int) -> None:
        for ahead, behind in ((self.consumers, self.inputs), (self.inputs, self.consumers)):
            for other, size in ahead[few].items():
                del behind[other][few]
                if other != many:
                    total = ahead[many].get(other, 0) + size
                    ahead[many][other] = behind[other][many] = total
            ahead[few] = {}
