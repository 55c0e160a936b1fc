"""Merging of parts of a graph: the lightest first, with a neighbour that exchanges many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import PARAMETER, UPDATE, Graph
from roost.transforms.merging.parts import Parts
from roost.transforms.merging.unions import Kinds, units_of

_MOST_WEIGHT = 3.0  # of a part, in means
_LEAST_WEIGHT = 0.01  # of any op, in means, so that parts of many free ops are not light
_HEAVY = 1.1  # an op heavier than a part may be can still merge up to so many times its weight
_MOST_TRIED = 5  # neighbours that a part tries to merge with, best first
_LEAST_PROGRESS = 0.02  # share of the parts that a round must merge for another round to follow


class LightestFirst:
    """The parts of a graph while they merge, and the units that share a device."""

    def __init__(self, graph: Graph, weight: Array, num_groups: int, count_parts: bool) -> None:
        self.graph = graph
        self.parts = Parts(graph)
        unit, self.units = units_of(graph, Kinds(graph))
        self.unit: list[int] = unit.tolist()  # [ops]
        mean = weight[~graph.is_parameter].mean() if len(self.parts) else 0.0
        weight = weight + _LEAST_WEIGHT * mean
        weight = np.where(graph.is_parameter, 0.0, weight if weight.any() else 1.0)
        by_unit = np.bincount(unit, weight, minlength=graph.num_groups + graph.num_ops)
        self.weight: list[float] = weight.tolist()  # [parts]
        self.heaviest: list[float] = weight.tolist()  # [parts] heaviest op
        self.unit_weight: list[float] = by_unit.tolist()
        self.unit_heaviest: list[float] = by_unit.tolist()
        self.num_members = [1] * graph.num_ops
        self.most = _MOST_WEIGHT * float(weight.sum()) / num_groups
        self.parts_per_unit = self._parts_per_unit() if count_parts else 1.0
        self._updates: list[int] = np.flatnonzero(graph.phase == UPDATE).tolist()
        self._leader = self._leaders()
        self._steps = self._merge()

    def _parts_per_unit(self) -> float:
        """The fewest parts of a unit, on average: one for each stage it is in."""
        pairs = {(self.unit[op], self.parts.stage[op]) for op in self.parts.alive}
        return len(pairs) / max(1, len({unit for unit, _ in pairs}))

    def merge_to(self, num_parts: int) -> bool:
        """Merge parts until so many are left; return false if nothing is left to merge."""
        return len(self.parts) <= num_parts or any(left <= num_parts for left in self._steps)

    def merge_updates(self, most: int) -> None:
        """Merge updates whose parameters the same part reads first, at most so many times."""
        open_part: dict[tuple[int, int], int] = {}  # the last part that may take more updates
        fewest = len(self.parts) - most
        for op in self._updates:
            if op not in self.parts.alive or len(self.parts) <= fewest:
                continue
            leader = self._leader[op]
            key = (self.parts.stage[op], self.parts.part_of(leader) if leader >= 0 else -1)
            other = open_part.get(key, -1)
            open_part[key] = op
            if other >= 0 and self._may_merge(other, op, 2 * self.most, join_groups=True):
                new = self.parts.merge(other, op)
                if new >= 0:
                    self._add_up(new, other + op - new)
                    open_part[key] = new

    def _leaders(self) -> dict[int, int]:
        """Update -> the op that reads a parameter of it first, else the op before it, else -1."""
        inputs = self.graph.input_lists()
        consumers = self.graph.consumer_lists()
        phase: list[int] = self.graph.phase.tolist()
        leader: dict[int, int] = {}
        for op in self._updates:
            read = [consumers[source][0] for source in inputs[op] if phase[source] == PARAMETER]
            leader[op] = next((reader for reader in read if phase[reader] != UPDATE), -1)
        for op in reversed(self._updates):
            if leader[op] < 0 and len(consumers[op]) == 1:
                leader[op] = leader.get(consumers[op][0], -1)
        for op in self._updates:
            if leader[op] < 0:
                made = (each for each in inputs[op] if phase[each] not in (PARAMETER, UPDATE))
                leader[op] = next(made, -1)
        return leader

    def _merge(self) -> Iterator[int]:
        """Merge parts one by one; yield the number left after each."""
        for most in (self.most, 2 * self.most):
            for join_groups in (False, True) if self.graph.num_groups > 1 else (False,):
                near = partial(self._along_edges, most=most, join_groups=join_groups)
                yield from self._rounds(near)
        yield from self._rounds(self._along_order, least_progress=0)

    def _rounds(
        self, neighbours: Callable[[int], Iterable[int]], least_progress: float = _LEAST_PROGRESS
    ) -> Iterator[int]:
        parts = self.parts
        while True:
            before = len(parts)
            waiting = [(self.weight[part], self.num_members[part], part) for part in parts.alive]
            heapify(waiting)
            while waiting:
                _, members, part = heappop(waiting)
                if part not in parts.alive or members != self.num_members[part]:
                    continue
                for other in neighbours(part):
                    if (new := parts.merge(part, other)) >= 0:
                        self._add_up(new, part + other - new)
                        heappush(waiting, (self.weight[new], self.num_members[new], new))
                        yield len(parts)
                        break
            if before - len(parts) <= least_progress * before:
                return

    def _add_up(self, new: int, gone: int) -> None:
        self.weight[new] += self.weight[gone]
        self.heaviest[new] = max(self.heaviest[new], self.heaviest[gone])
        self.num_members[new] += self.num_members[gone]
        self.join(new, gone)

    def may_join(self, op: int, other: int) -> bool:
        """Tell whether two ops may share a device."""
        return self.units.may_join(self.unit[op], self.unit[other])

    def join(self, op: int, other: int) -> None:
        """Make one unit of the units of two ops."""
        one = self.units.find(self.unit[op])
        two = self.units.find(self.unit[other])
        if one != two:
            joined = self.units.join(one, two)
            assert joined, "only parts that may share a device merge"
            root = min(one, two)
            self.unit_weight[root] = self.unit_weight[one] + self.unit_weight[two]
            self.unit_heaviest[root] = max(self.unit_heaviest[one], self.unit_heaviest[two])

    def _along_edges(self, part: int, most: float, join_groups: bool) -> Iterator[int]:
        """Parts with an edge to or from this one that it may merge with, best first."""
        mine = self.weight[part]
        weight = self.weight
        scored = []
        for near in (self.parts.consumers[part], self.parts.inputs[part]):
            for other, size in near.items():
                both = mine + weight[other]
                scored.append((both * both / (1.0 + size), other))
        scored = nsmallest(_MOST_TRIED, scored) if len(scored) > _MOST_TRIED else sorted(scored)
        return (other for _, other in scored if self._may_merge(part, other, most, join_groups))

    def _along_order(self, part: int) -> list[int]:
        """Parts next to this one in the order that it may merge with, best first."""
        near = [other for other in self.parts.beside(part) if self.may_join(part, other)]
        return sorted(near, key=lambda other: (self._badness(part, other), other))

    def _badness(self, part: int, other: int) -> float:
        both = self.weight[part] + self.weight[other]
        return both * both / (1.0 + self.parts.bytes_between(part, other))

    @staticmethod
    def _too_heavy(weight: float, most: float, heaviest: float) -> bool:
        return weight > most and weight > _HEAVY * heaviest

    def _may_merge(self, part: int, other: int, most: float, join_groups: bool) -> bool:
        weight = self.weight[part] + self.weight[other]
        if self._too_heavy(weight, most, max(self.heaviest[part], self.heaviest[other])):
            return False
        one = self.units.find(self.unit[part])
        two = self.units.find(self.unit[other])
        if one == two:
            return True
        num_groups = self.graph.num_groups
        if not join_groups and one < num_groups and two < num_groups:
            return False
        weight = self.unit_weight[one] + self.unit_weight[two]
        heaviest = max(self.unit_heaviest[one], self.unit_heaviest[two])
        too_heavy = self._too_heavy(weight, most * self.parts_per_unit, heaviest)
        return not too_heavy and self.units.may_join(one, two)
