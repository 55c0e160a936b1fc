"""Rules by which people place models by hand: each layer gets one of so many parts."""

from __future__ import annotations

from collections import Counter

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.placers._shared.layers import Layers, without_calls
from roost.placers.published import BLOCKS, element

_RECURRENT_KINDS = ("lstm", "gru", "rnn")
_FEWEST_CALLS = 3  # of a layer that is unrolled over time; a module called twice may just be shared


def rule_for(graph: Graph, layers: Layers) -> str:
    """The rule that fits the structure of a model."""
    if recurrent_layers(graph, layers):
        return "recurrent"
    if set(BLOCKS) <= set(layers.names):
        return "blocks"
    if {"cell_0", "reduction_0"} <= set(layers.names):
        return "cells"
    return "layers"


def split(weights: Array, shares: Array) -> Array:  # [items] part
    """Contiguous parts with about these shares of the weight.

    An item belongs to the part that holds its middle.
    """
    total = weights.sum()
    middle = np.linspace(0, 1, len(weights))
    if total > 0:
        middle = (np.cumsum(weights) - weights / 2) / total
    part = np.searchsorted(np.cumsum(shares), middle, side="right")
    return np.asarray(np.minimum(part, np.flatnonzero(shares)[-1]))


def split_within(weights: Array, shares: Array, sizes: Array, room: Array) -> Array:  # [items] part
    """The parts of `split`, but a part ends where its room does; the last part takes the rest."""
    part = 0
    parts = []
    left = float(room[0])
    for wanted, size in zip(split(weights, shares).tolist(), sizes.tolist(), strict=True):
        while part < len(shares) - 1 and (wanted > part or size > left):
            part += 1
            left = float(room[part])
        left -= size
        parts.append(part)
    return np.array(parts, dtype=np.int64)


def blocks(graph: Graph, layers: Layers, num_devices: int) -> Array:  # [layers] part
    """Inception-V3: contiguous blocks with about as many convolutions and pools in each part."""
    num_elements = Counter(name.partition(".")[0] for name in Layers.of(graph, element).names)
    count = np.array([num_elements[name] for name in layers.names], dtype=float)
    return split(count, np.full(num_devices, 1 / num_devices))


def cells(graph: Graph, layers: Layers, num_devices: int) -> Array:  # [layers] part
    """NASNet: contiguous cells, as many in each part."""
    is_cell = np.array(
        ["cell_" in name or "reduction_" in name for name in layers.names], dtype=float
    )
    return split(is_cell, np.full(num_devices, 1 / num_devices))


def recurrent(graph: Graph, layers: Layers, num_devices: int) -> Array:  # [layers] part
    """RNNLM and NMT: one recurrent layer on each device.

    The embedding is with the first, attention and softmax with the last. If there are more layers
    than devices, layer i of the encoder is with layer i of the decoder.
    """
    stack = recurrent_layers(graph, layers)
    sides = {layer: _side(layers.names[layer]) for layer in stack}
    part = np.zeros(layers.num_layers, dtype=np.int64)
    part[stack] = np.arange(len(stack))
    if len(stack) > num_devices:
        for side in set(sides.values()):
            own = [layer for layer in stack if sides[layer] == side]
            part[own] = np.arange(len(own)) * num_devices // len(own)
    for layer, name in enumerate(layers.names):
        if layer not in stack:
            part[layer] = part[_companion(layer, name, sides)]
    return part


def _companion(layer: int, name: str, sides: dict[int, str]) -> int:
    """The recurrent layer that another layer goes with; `sides` are those of recurrent layers."""
    stack = list(sides)
    own = [other for other in stack if sides[other] == _side(name)]
    if "attention" in name or (not own and layer > stack[0]):
        return stack[-1]
    below = [other for other in own if other < layer]
    return below[-1] if below else (own or stack)[0]


def recurrent_layers(graph: Graph, layers: Layers) -> list[int]:
    """Numbered layers that are called again and again, or compute a whole recurrence in one op."""
    calls = dict.fromkeys(layers.names, 0)
    for module in set(graph.modules):
        if (path := without_calls(module)) in calls:
            calls[path] += 1
    is_recurrent = [any(word in kind for word in _RECURRENT_KINDS) for kind in graph.kinds]
    in_one_op = set(layers.layer[np.flatnonzero(is_recurrent)].tolist())
    return [
        layer
        for layer, name in enumerate(layers.names)
        if name.rpartition(".")[2].isdigit()
        and (calls[name] >= _FEWEST_CALLS or layer in in_one_op)
    ]


def _side(name: str) -> str:
    """The encoder or the decoder, in a model that has both."""
    return name.partition(".")[0]
