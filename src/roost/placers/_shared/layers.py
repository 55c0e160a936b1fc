"""Layers: the chain that a model is, one after another in the order of its forward pass.

An op belongs to the layer that its module path names: `encoder.layers.3.attention.query` to
`encoder.layers.3`, `Mixed_5b.b1x1.conv` to `Mixed_5b`; all calls of a module are one layer. A
backward op belongs to the layer of its forward ops, a parameter to that of its first reader, an
update to that of the parameter. Ops without a path go with their neighbours; in a graph without any
paths each forward op is a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD, INPUT, PARAMETER, UPDATE, Graph
from roost.placers._shared.units import Units

_CALL = re.compile(r"@\d+")


@dataclass(frozen=True, eq=False)
class Layers:
    """The layer of each op, and where in the chain it stands."""

    names: tuple[str, ...]  # [layers] in the order of their first forward ops
    layer: Array  # [ops] i8 index in names
    position: Array  # [ops] i8 the forward op beside which it stands, within its layer

    @staticmethod
    def of(graph: Graph, key: Callable[[str], str] | None = None) -> Layers:
        """The layers of a graph; `key` gives the layer of a module path, if any."""
        names, own = _named(graph, key or top_level(graph.modules))
        if not names:
            forward = np.flatnonzero(graph.phase == FORWARD)
            own[forward] = np.arange(len(forward))
            names = tuple(graph.op_names[op] for op in forward.tolist()) or (graph.op_names[0],)
        layer, position = _spread(graph, own)
        return Layers(names, layer, position)

    @property
    def num_layers(self) -> int:
        return len(self.names)

    def of_units(self, units: Units) -> Array:  # [units] i8
        """The layer of each unit: that of its first op.

        A last layer that shares its weight with the embedding thus is where the embedding is; the
        rest of such a layer, and layers without parameters after it, such as the loss, go there as
        well.
        """
        found = self.layer[units.leader]
        return self._drawn(units.problem.graph, found[units.unit])[found]

    # [layers] the layer that each really is with.
    def _drawn(self, graph: Graph, placed: Array) -> Array:
        """The layer that each layer goes to: where most bytes of its forward ops went."""
        away = np.flatnonzero((graph.phase == FORWARD) & (placed != self.layer))
        target = np.arange(self.num_layers)
        if len(away) == 0:
            return target
        forward = np.flatnonzero(graph.phase == FORWARD)
        total = np.bincount(
            self.layer[forward], graph.output_bytes[forward], minlength=self.num_layers
        )
        gone = np.bincount(self.layer[away], graph.output_bytes[away], minlength=self.num_layers)
        with_parameters = np.isin(
            target, self.layer[graph.edge_target[graph.is_parameter[graph.input_op]]]
        )
        smallest_first = away[np.argsort(graph.output_bytes[away], kind="stable")]
        largest = np.zeros(self.num_layers, dtype=np.int64)
        largest[self.layer[smallest_first]] = placed[smallest_first]  # what is written last stays
        for layer in range(self.num_layers):
            if gone[layer] > total[layer] / 2:
                target[layer] = largest[layer]
            elif layer > 0 and not with_parameters[layer] and target[layer - 1] != layer - 1:
                target[layer] = target[layer - 1]
        return target

    def chain(self, units: Units) -> Array:  # [units] i8
        """The units one after another: by layer, and within one by position."""
        return np.lexsort((units.leader, self.position[units.leader], self.of_units(units)))

    @cached_property
    def index(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def without_calls(path: str) -> str:
    """`layers.0@3.query` is a call of `layers.0.query`."""
    return _CALL.sub("", path)


def top_level(modules: Iterable[str]) -> Callable[[str], str]:
    """A function from module paths to layers, which are cut after the first numbers."""
    inner: set[str] = set()  # paths that hold numbered layers, and so are no layer themselves
    for path in {without_calls(module) for module in modules}:
        parts = path.split(".")
        numbers = [part.isdigit() for part in [*parts, ""]]
        if True in numbers:
            # Stages.0.1 is the second layer of the first stage.
            last = numbers.index(False, numbers.index(True)) - 1
            inner.update(".".join(parts[:depth]) for depth in range(1, last + 1))

    def key(path: str) -> str:
        parts = path.split(".")
        for depth in range(1, len(parts)):
            if (prefix := ".".join(parts[:depth])) not in inner:
                return prefix
        return path

    return key


def _named(graph: Graph, key: Callable[[str], str]) -> tuple[tuple[str, ...], Array]:
    """Names of layers in forward order, and the layer that each op's path names, or -1."""
    key_of = {
        module: key(without_calls(module)) if module else ""
        for module in dict.fromkeys(graph.modules)
    }
    keys = [key_of[module] for module in graph.modules]
    phase = graph.phase.tolist()
    number: dict[str, int] = {}
    for op, name in enumerate(keys):
        if name and phase[op] == FORWARD:
            number.setdefault(name, len(number))
    own = np.array([number.get(name, -1) for name in keys], dtype=np.int64)
    # A weight that two layers share lives with the first that reads it.
    own[graph.phase == PARAMETER] = -1
    return tuple(number), own


def _spread(graph: Graph, own: Array) -> tuple[Array, Array]:
    """The layer and position of every op, from those whose layer is known."""
    layer = own.tolist()
    position = list(range(graph.num_ops))
    phase = graph.phase.tolist()
    inputs = graph.input_lists()
    for op, sources in enumerate(inputs):
        before = [source for source in sources if INPUT <= phase[source] <= FORWARD]
        after = [source for source in sources if phase[source] > FORWARD]
        if layer[op] < 0 and phase[op] != PARAMETER:
            layer[op] = _nearest(layer, before, after if phase[op] > FORWARD else [], -1)
        # Gradients come from further on, what was saved from the same layer. Tensors that many
        # layers read, such as masks, say nothing.
        if phase[op] > FORWARD:
            saved = [source for source in before if layer[source] == layer[op]]
            if not saved and not after:
                saved = before
            position[op] = _nearest(position, saved, after, op)
    _settle(graph, layer, position)
    return np.maximum(np.array(layer, dtype=np.int64), 0), np.array(position, dtype=np.int64)


def _nearest(place: list[int], before: list[int], after: list[int], otherwise: int) -> int:
    """The last place before an op, unless one of those after it comes earlier."""
    found = max((place[op] for op in before), default=-1)
    following = min((place[op] for op in after if place[op] >= 0), default=-1)
    if found < 0 or 0 <= following < found:
        found = following
    return otherwise if found < 0 else found


def _settle(graph: Graph, layer: list[int], position: list[int]) -> None:
    """Inputs and parameters go where they are first needed, updates to their parameters."""
    phase = graph.phase.tolist()
    inputs = graph.input_lists()
    consumers = graph.consumer_lists()
    for op in range(graph.num_ops - 1, -1, -1):
        if layer[op] < 0 or phase[op] <= INPUT:
            readers = [c for c in consumers[op] if layer[c] >= 0 and phase[c] != UPDATE]
            readers = readers or [c for c in consumers[op] if layer[c] >= 0]
            if readers:
                first = min(readers, key=lambda reader: (layer[reader], position[reader]))
                layer[op] = layer[first]
                position[op] = position[first]
    for op in np.flatnonzero(graph.phase == UPDATE).tolist():
        homes = [
            source for source in inputs[op] if phase[source] == PARAMETER and layer[source] >= 0
        ]
        if homes:
            layer[op] = layer[homes[0]]
            position[op] = position[homes[0]]
