"""A problem as a chain of sections, which `contiguous` cuts into consecutive parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD, UPDATE, Graph
from roost.placers._shared.fitting import lasting, lasting_bytes
from roost.placers._shared.layers import Layers
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import mean_seconds


@dataclass(frozen=True, eq=False)
class SectionChain:
    """Units in the order of the forward pass, in sections; it may be cut between two sections."""

    units: Units
    layer: Array  # [units] i8
    section: Array  # [units] i8
    num_sections: int

    @staticmethod
    def of(units: Units, most_sections: int) -> SectionChain:
        """The chain of the layers, with at most so many sections: few bytes cross between two."""
        layers = Layers.of(units.problem.graph)
        order = layers.chain(units)
        position = np.empty(units.num_units, dtype=np.int64)
        position[order] = np.arange(units.num_units)
        cuts = _cheapest_cuts(units, order, position, most_sections)
        section = np.searchsorted(cuts, position, side="right")
        return SectionChain(units, layers.of_units(units), section, len(cuts) + 1)

    def add_up(self, values: Array) -> Array:  # [sections + 1, ...]
        """Values of units, added up over all sections before each."""
        total = np.zeros((self.num_sections + 1, *values.shape[1:]))
        np.add.at(total, self.section + 1, values)
        return np.cumsum(total, axis=0)

    def held(self) -> Array:  # [sections + 1] bytes
        """Bytes that all sections before each hold for long."""
        return self.add_up(lasting_bytes(self.units).astype(float))

    def passing(self) -> Array:  # [sections] bytes
        """The most bytes held for a while that ops of a section see, in program order."""
        most = np.zeros(self.num_sections)
        op_section = self.section[self.units.unit]
        np.maximum.at(most, op_section, _passing(self.units.problem.graph))
        return most

    def unawaited(self) -> Array:  # [ops] bool
        """Backward and update ops that no other layer waits for: gradients of weights, mostly."""
        graph = self.units.problem.graph
        layer = self.layer[self.units.unit].tolist()
        unawaited = (graph.phase > FORWARD).tolist()
        # Backwards, so the readers of an output are known before the op that makes it.
        for op, sources in reversed(list(enumerate(graph.input_lists()))):
            for source in sources:
                if not unawaited[op] or layer[source] != layer[op]:
                    unawaited[source] = False
        return np.array(unawaited)

    def late(self) -> Array:  # [ops] bool
        """Backward and update ops that wait for those of another layer.

        Those of the last layer do not wait; nor do those of the first if the two share a weight.
        """
        graph = self.units.problem.graph
        layer = self.layer[self.units.unit].tolist()
        after = (graph.phase > FORWARD).tolist()
        late = [False] * graph.num_ops
        for op, sources in enumerate(graph.input_lists()):
            late[op] = after[op] and any(
                after[source] and (late[source] or layer[source] != layer[op]) for source in sources
            )
        return np.array(late)

    def traffic(self) -> Array:  # [4, sections + 1, sections + 1]
        """Traffic between a part from section i up to j and earlier parts.

        The four tables are tensors and bytes that it gets, and tensors and bytes it sends back.
        """
        graph = self.units.problem.graph
        is_made = ~graph.is_parameter[graph.input_op]
        op_section = self.section[self.units.unit]
        reader = op_section[graph.edge_target[is_made]]
        # Each tensor counts once for each section that reads it.
        key = graph.input_op[is_made].astype(np.int64) * self.num_sections + reader
        tensor, reader = np.divmod(np.unique(key), self.num_sections)
        maker = op_section[tensor]
        size = graph.output_bytes[tensor].astype(float)
        weights = (np.ones(len(size)), size)
        # Got by the part that holds the reader, unless an earlier section of the part reads it.
        same = tensor[1:] == tensor[:-1]
        is_repeated = np.concatenate([[False], same & (maker[1:] < reader[:-1])])
        earlier = np.concatenate([[0], reader[:-1]])
        since = np.where(is_repeated, earlier, maker) + 1
        is_got = maker < reader
        got = [
            self._rectangles(since[is_got], reader[is_got], reader[is_got] + 1, weight[is_got])
            for weight in weights
        ]
        # Sent back once, by the part that holds the maker, if the first reader is before that part.
        is_back = (maker > reader) & np.concatenate([[True], ~same])
        low = reader[is_back] + 1
        high = maker[is_back]
        back = [self._rectangles(low, high, high + 1, weight[is_back]) for weight in weights]
        return np.stack([*got, *back])

    def _rectangles(self, low: Array, high: Array, end: Array, weight: Array) -> Array:
        """[sections + 1, sections + 1] weights added up where low <= i <= high and j >= end."""
        corner = np.zeros((self.num_sections + 2, self.num_sections + 1))
        np.add.at(corner, (low, end), weight)
        np.add.at(corner, (high + 1, end), -weight)
        return np.cumsum(np.cumsum(corner, axis=0), axis=1)[: self.num_sections + 1]


def _cheapest_cuts(units: Units, order: Array, position: Array, most_sections: int) -> Array:
    """Positions to cut at: where the fewest bytes cross, one in each window of equal time."""
    count = units.num_units
    if count <= most_sections:
        return np.arange(1, count)
    source, target, size = units.edges
    low = np.minimum(position[source], position[target])
    high = np.maximum(position[source], position[target])
    opened, closed = (np.bincount(end + 1, size, minlength=count + 1) for end in (low, high))
    crossing = np.cumsum(opened - closed)
    seconds = mean_seconds(units, list(range(units.problem.cluster.num_devices)))[order]
    done = np.cumsum(seconds + seconds.sum() / count)  # units without time count a little too
    window = (done / done[-1] * (most_sections - 1)).astype(np.int64)
    window = np.minimum(window, most_sections - 2)[:-1]
    cuts = np.arange(1, count)
    by_cost = np.lexsort((cuts, crossing[1:count], window))
    first_of_window = np.unique(window[by_cost], return_index=True)[1]
    return np.sort(cuts[by_cost][first_of_window])


def _passing(graph: Graph) -> Array:  # [ops] bytes
    """Bytes that are not held for long, while each op runs in program order, with its workspace."""
    position = np.arange(graph.num_ops)
    until = np.arange(graph.num_ops)
    early = graph.phase[graph.edge_target] != UPDATE  # updates run as soon as they can
    np.maximum.at(until, graph.input_op[early], graph.edge_target[early])
    size = np.where(lasting(graph), 0, graph.output_bytes).astype(float)
    change = np.zeros(graph.num_ops + 1)
    np.add.at(change, position, size)
    np.add.at(change, until + 1, -size)
    return np.where(graph.is_parameter, 0.0, np.cumsum(change)[:-1] + graph.workspace_bytes)
