"""Sets of ops that share a device, and the device kinds that each set may still use."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.errors import GraphError

_MOST_KINDS = 62  # a set of kinds is an int64


class Kinds:
    """Sets of device kinds as bits; one more bit is for all kinds that the graph does not name."""

    def __init__(self, graph: Graph) -> None:
        choices = dict.fromkeys(graph.allowed)
        self.names = sorted({kind for choice in choices for kind in choice})
        if len(self.names) > _MOST_KINDS:
            raise GraphError(
                f"the graph names {len(self.names)} device kinds; {_MOST_KINDS} are the most"
            )
        self.any = 2 ** (len(self.names) + 1) - 1
        bit = {kind: 1 << number for number, kind in enumerate(self.names)}
        self._mask = {
            choice: sum(bit[kind] for kind in set(choice)) if choice else self.any
            for choice in choices
        }
        self._choice = {mask: choice for choice, mask in reversed(self._mask.items())}

    def masks(self, graph: Graph) -> Array:  # [ops]
        """The device kinds of each op."""
        return np.array([self._mask[choice] for choice in graph.allowed], dtype=np.int64)

    def allowed(self, mask: int) -> tuple[str, ...]:
        """The set as a graph writes it."""
        if mask in self._choice:
            return self._choice[mask]
        names = (name for number, name in enumerate(self.names) if mask >> number & 1)
        return () if mask == self.any else tuple(names)


class Unions:
    """Disjoint sets of items with the kinds that all items of a set allow.

    Two sets without a common kind never join.
    """

    def __init__(self, masks: list[int]) -> None:
        self.mask = masks  # [items] valid for roots
        self._parent = list(range(len(masks)))

    def find(self, item: int) -> int:
        """The smallest item of its set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = item = parent[parent[item]]
        return item

    def may_join(self, one: int, other: int) -> bool:
        """Tell whether two items are in one set, or allow a common kind."""
        return bool(self.mask[self.find(one)] & self.mask[self.find(other)])

    def join(self, one: int, other: int) -> bool:
        """Join the sets of two items; return false if they are one already, or may not join."""
        one = self.find(one)
        other = self.find(other)
        both = self.mask[one] & self.mask[other]
        if one == other or not both:
            return False
        one, other = min(one, other), max(one, other)
        self._parent[other] = one
        self.mask[one] = both
        return True

    def roots(self) -> Array:  # [items]
        """The smallest item in the set of each item."""
        return np.array([self.find(item) for item in range(len(self._parent))], dtype=np.int64)


def units_of(graph: Graph, kinds: Kinds) -> tuple[Array, Unions]:
    """The unit of each op, and the sets of units.

    A group is a unit, and so is an op without a group. Groups come first, in their order; then an
    op without a group has the number `num_groups + op`.
    """
    alone = graph.num_groups + np.arange(graph.num_ops)
    unit = np.where(graph.group >= 0, graph.group, alone).astype(np.int64)
    masks = np.full(graph.num_groups + graph.num_ops, kinds.any, dtype=np.int64)
    np.bitwise_and.at(masks, unit, kinds.masks(graph))
    empty = np.flatnonzero(masks[: graph.num_groups] == 0)
    if len(empty):
        members = [graph.op_names[op] for op in np.flatnonzero(graph.group == empty[0])]
        raise GraphError(
            f"group {graph.group_names[empty[0]]!r} can go nowhere: its ops, such as "
            f"{members[0]!r}, have no allowed device kind in common"
        )
    return unit, Unions(masks.tolist())
