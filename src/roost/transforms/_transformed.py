"""A transformed graph, and the way back for placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from roost.core.arrays import Array, frozen
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.transforms import Transform


@dataclass(frozen=True, eq=False)
class Transformed:
    """A graph made from another, in which one new op stands for each op of the original.

    The new op decides the device of the ops it stands for, and its time is their sum. A dropped op
    has a new op too, one that may run wherever the dropped op may.
    """

    original: Graph
    graph: Graph
    new_op: Array  # [original ops] index in `graph` of the op that stands for it
    counts: Mapping[str, int] = field(
        default_factory=dict
    )  # of changes, such as "prune.folded": 12

    def __post_init__(self) -> None:
        new_op = frozen(self.new_op, np.int32, (self.original.num_ops,), "new_op")
        every = np.array_equal(np.unique(new_op), np.arange(self.graph.num_ops))
        assert every, "every new op stands for some op"
        object.__setattr__(self, "new_op", new_op)

    @classmethod
    def unchanged(cls, graph: Graph) -> Transformed:
        """The graph itself as a transformed graph."""
        return cls(graph, graph, np.arange(graph.num_ops))

    def then(self, transform: Transform | Transformed) -> Transformed:
        """The result of one more transform, which is given itself or by its result."""
        after = transform if isinstance(transform, Transformed) else transform.apply(self.graph)
        if after.original != self.graph:
            raise InputError(f"{after!r} does not begin with {self.graph!r}")
        counts = dict(self.counts)
        for what, count in after.counts.items():
            counts[what] = counts.get(what, 0) + count
        return Transformed(self.original, after.graph, after.new_op[self.new_op], counts)

    def expand(self, placement: Placement, keep_order: bool = True) -> Placement:
        """The placement of the original graph for a placement of the new graph.

        Ops of one new op are dispatched together, in the new graph's program order. If that differs
        from the original's program order, it becomes priorities; with `keep_order` false, the
        original's program order is used. The orders `rank` and `fifo` are kept by name. A window
        holds at least the parameters of one new op, so that each of them is fetched once.
        """
        if placement.num_ops != self.graph.num_ops:
            raise InputError(
                f"the placement has {placement.num_ops} devices; the new graph has "
                f"{self.graph.num_ops} ops"
            )
        if placement.graph and placement.graph != self.graph.digest:
            raise InputError(
                f"the placement was made for graph {placement.graph}, not for {self.graph.digest}"
            )
        order = placement.order
        priority = placement.priority
        if order == "program" and keep_order and not self._keeps_order:
            order = "priority"
            priority = -np.arange(self.graph.num_ops, dtype=np.float64)
        return replace(
            placement,
            device=placement.device[self.new_op],
            order=order,
            priority=None if priority is None else priority[self.new_op],
            prefetch_bytes=self._window(placement),
            graph=self.original.digest if placement.graph else "",
        )

    @cached_property
    def _keeps_order(self) -> bool:
        """Tell whether both graphs have the same program order."""
        return bool((np.diff(self.new_op[~self.original.is_parameter]) >= 0).all())

    def _window(self, placement: Placement) -> Array | int:
        """The window of each device: as given, or the most bytes that a new op fetches there."""
        graph = self.graph
        device = placement.device
        given = placement.prefetch_bytes
        if graph.num_ops == self.original.num_ops:
            return given
        crosses = device[graph.input_op] != device[graph.edge_target]
        fetched = crosses & graph.is_parameter[graph.input_op]
        needs = np.zeros(graph.num_ops, dtype=np.int64)
        np.add.at(needs, graph.edge_target[fetched], graph.output_bytes[graph.input_op[fetched]])
        if np.ndim(given) == 0 and not placement.devices:  # the number of devices is unknown
            return max(int(given), int(needs.max()))
        window = np.zeros(len(placement.devices) or len(np.asarray(given)), dtype=np.int64)
        np.maximum.at(window, device, needs)
        return np.maximum(window, given)

    def sum_costs(self, op_time: Array) -> Array:  # [new ops, devices] seconds
        """The time of each new op: the sum of op_time [original ops, devices] over its ops."""
        times = np.asarray(op_time, dtype=np.float64)
        if times.ndim != 2 or len(times) != self.original.num_ops:
            raise InputError(
                f"op_time is {list(times.shape)}; it must be [{self.original.num_ops}, devices]"
            )
        sums = np.zeros((self.graph.num_ops, times.shape[1]))
        np.add.at(sums, self.new_op, times)
        return sums

    def problem(self, problem: Problem) -> Problem:
        """The problem of placing the new graph on the same cluster, with summed costs."""
        if problem.graph != self.original:
            raise InputError(f"the problem is about {problem.graph!r}, not about {self.original!r}")
        costs = Costs(self.sum_costs(problem.op_time), problem.costs.source)
        return Problem(self.graph, problem.cluster, costs)

    def __repr__(self) -> str:
        return f"Transformed({self.original!r} -> {self.graph!r})"
