"""A problem as a chain of pieces, where it may be cut: what `contiguous` cuts into parts."""

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
class Chain:
    """Units in the order of the forward pass, in pieces between the places where it may be cut."""

    units: Units
    layer: Array  # [units] i8
    piece: Array  # [units] i8
    num_pieces: int

    @staticmethod
    def of(units: Units, most_pieces: int) -> Chain:
        """The chain of the layers, with at most so many pieces: it is cut where the fewest bytes
        cross."""
        layers = Layers.of(units.problem.graph)
        order = layers.chain(units)
        place = np.empty(units.num_units, dtype=np.int64)
        place[order] = np.arange(units.num_units)
        cuts = _cheapest_cuts(units, order, place, most_pieces)
        return Chain(
            units, layers.of_units(units), np.searchsorted(cuts, place, side="right"), len(cuts) + 1
        )

    def add_up(self, values: Array) -> Array:  # [pieces + 1, ...]
        """Values of units, added up over all pieces before each."""
        total = np.zeros((self.num_pieces + 1, *values.shape[1:]))
        np.add.at(total, self.piece + 1, values)
        return np.cumsum(total, axis=0)

    def held(self) -> Array:  # [pieces + 1] bytes
        """What all pieces before each hold for long."""
        return self.add_up(lasting_bytes(self.units).astype(float))

    def passing(self) -> Array:  # [pieces] bytes
        """The most that ops of a piece see held for a while, in program order on one device."""
        found = np.zeros(self.num_pieces)
        np.maximum.at(found, self.piece[self.units.unit], _passing(self.units.problem.graph))
        return found

    def beside(self) -> Array:  # [ops] bool
        """Backward and update ops that no other layer waits for: gradients of weights, mostly."""
        graph = self.units.problem.graph
        layer = self.layer[self.units.unit].tolist()
        starts, sources = graph.input_start.tolist(), graph.input_op.tolist()
        alone = (graph.phase > FORWARD).tolist()
        # Those that take its output have been looked at.
        for op in range(graph.num_ops - 1, -1, -1):
            for source in sources[starts[op] : starts[op + 1]]:
                if not alone[op] or layer[source] != layer[op]:
                    alone[source] = False
        return np.array(alone)

    def late(self) -> Array:  # [ops] bool
        """Backward and update ops that wait for those of another layer.

        All but those of the last layer do, which may be where the first is, if the two share a
        weight.
        """
        graph = self.units.problem.graph
        layer, after = self.layer[self.units.unit].tolist(), (graph.phase > FORWARD).tolist()
        found = [False] * graph.num_ops
        for op, sources in enumerate(graph.input_lists()):
            if after[op]:
                found[op] = any(
                    after[source] and (found[source] or layer[source] != layer[op])
                    for source in sources
                )
        return np.array(found)

    def traffic(self) -> Array:  # [4, pieces + 1, pieces + 1]
        """For a part from piece i up to j: tensors and bytes it gets from parts before it, and
        sends back to them."""
        graph = self.units.problem.graph
        moves = ~graph.is_parameter[graph.input_op]
        tensor, reader = (
            graph.input_op[moves],
            self.piece[self.units.unit[graph.edge_target[moves]]],
        )
        pairs = np.unique(tensor.astype(np.int64) * self.num_pieces + reader)
        tensor, reader = pairs // self.num_pieces, pairs % self.num_pieces
        maker = self.piece[self.units.unit[tensor]]
        size = graph.output_bytes[tensor].astype(float)
        found = np.zeros((4, self.num_pieces + 1, self.num_pieces + 1))
        # Got by the part that holds the reader, unless the same part has one that reads it earlier.
        ahead = maker < reader
        repeated = np.concatenate(
            [[False], (tensor[1:] == tensor[:-1]) & (maker[1:] < reader[:-1])]
        )
        since = np.where(repeated, np.concatenate([[0], reader[:-1]]), maker) + 1
        for row, weight in ((0, np.ones(len(size))), (1, size)):
            found[row] = _rectangles(
                self.num_pieces, since[ahead], reader[ahead], reader[ahead] + 1, weight[ahead]
            )
        # Sent back once, by the part that holds the maker, where its first reader is before that
        # part.
        first = (maker > reader) & np.concatenate([[True], tensor[1:] != tensor[:-1]])
        low = reader[first] + 1
        for row, weight in ((2, np.ones(len(size))), (3, size)):
            found[row] = _rectangles(
                self.num_pieces, low, maker[first], maker[first] + 1, weight[first]
            )
        return found


def _cheapest_cuts(units: Units, order: Array, place: Array, most_pieces: int) -> Array:
    """Places to cut at, at most one in each of so many windows of equal time: where the fewest
    bytes cross."""
    count = units.num_units
    if count <= most_pieces:
        return np.arange(1, count)
    source, target, size = units.edges
    low, high = np.minimum(place[source], place[target]), np.maximum(place[source], place[target])
    opened, closed = (np.bincount(place + 1, size, minlength=count + 1) for place in (low, high))
    crossing = np.cumsum(opened - closed)
    seconds = mean_seconds(units, list(range(units.problem.cluster.num_devices)))[order]
    done = np.cumsum(seconds + seconds.sum() / count)  # units without time count a little too
    window = np.minimum((done / done[-1] * (most_pieces - 1)).astype(np.int64), most_pieces - 2)[
        :-1
    ]
    cuts = np.arange(1, count)
    by_cost = np.lexsort((cuts, crossing[1:count], window))
    return np.sort(cuts[by_cost][np.unique(window[by_cost], return_index=True)[1]])


def _passing(graph: Graph) -> Array:  # [ops] bytes
    """Outputs that are not held for long, as they are while each op runs in program order, and its
    workspace."""
    until = np.arange(graph.num_ops)
    early = graph.phase[graph.edge_target] != UPDATE  # updates run as soon as they can
    np.maximum.at(until, graph.input_op[early], graph.edge_target[early])
    size = np.where(lasting(graph), 0, graph.output_bytes).astype(float)
    change = np.zeros(graph.num_ops + 1)
    np.add.at(change, np.arange(graph.num_ops), size)
    np.add.at(change, until + 1, -size)
    return np.where(graph.is_parameter, 0.0, np.cumsum(change)[:-1] + graph.workspace_bytes)


# [pieces + 1, pieces + 1].
def _rectangles(pieces: int, low: Array, high: Array, end: Array, weight: Array) -> Array:
    """Weights added up at every (i, j) with low <= i <= high and j >= end."""
    corner = np.zeros((pieces + 2, pieces + 1))
    np.add.at(corner, (low, end), weight)
    np.add.at(corner, (high + 1, end), -weight)
    return np.cumsum(np.cumsum(corner, axis=0), axis=1)[: pieces + 1]
