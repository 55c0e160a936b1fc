"""FLOP and bytes of a traced PyTorch op, from the shapes of its fake tensors.

FLOP come from PyTorch's own formulas where it has one, from ours for attention, and else are one
for each element of what the op makes or, for a reduction, of what it takes: such ops are limited by
memory anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from roost.frontends.tracing import attention

aten = torch.ops.aten

# What is read of the first tensor is as much as is made of it.
_GATHERS = {
    aten.embedding,
    aten.index,
    aten.index_select,
    aten.gather,
    aten.nll_loss_forward,
    aten.slice_backward,
}
# Made from the shape of their tensors, not from what is in them.
_MAKERS = {
    *(
        aten.empty_like,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
        aten.new_empty,
        aten.new_ones,
    ),
    *(aten.new_full, aten.rand_like, aten.randn_like),
}
# Move or make data without computing.
_MOVES = {
    *(
        aten.clone,
        aten.copy,
        aten._to_copy,
        aten.cat,
        aten.stack,
        aten.index,
        aten.index_select,
        aten.gather,
    ),
    *(
        aten.embedding,
        aten.constant_pad_nd,
        aten.repeat,
        aten.slice_backward,
        aten.select_backward,
        aten.full,
    ),
    *(
        aten.zeros,
        aten.ones,
        aten.arange,
        aten.empty,
        aten.scalar_tensor,
        aten.select_scatter,
        aten.slice_scatter,
    ),
    *_MAKERS,
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: a dimension of stride 0 repeats the same ones."""
    sizes = (
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0
    )
    return math.prod(sizes) * tensor.element_size()


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with fake tensors for nodes."""
    found: Any = fx.map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
    return found  # type: ignore[no-any-return]


def flop_of(node: fx.Node) -> tuple[int, bool]:
    """FLOP of an op, and whether they come from a formula rather than from counting elements."""
    packet = (
        node.target.overloadpacket
        if isinstance(node.target, torch._ops.OpOverload)
        else node.target
    )
    args, kwargs = arguments(node)
    if packet is torch.ops.roost.attention:
        return attention.flop(*(tensor.shape for tensor in args[:3])), True
    if packet is torch.ops.roost.attention_backward:
        return attention.backward_flop(*(tensor.shape for tensor in args[1:4])), True
    if packet is aten.convolution_backward:
        return _convolution_backward(*args), True
    formula = flop_registry.get(packet)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=node.meta["val"])), True
    if packet in _MOVES:
        return 0, True
    made = sum(tensor.numel() for tensor in tensors_in(node.meta.get("val")))
    taken = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
    return max(made, taken), False


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation:
    Any, transposed: bool,
    *rest: Any,
) -> int:  # fmt: skip
    """As many as the forward, for each of the two gradients that is wanted.

    PyTorch's own formula forgets the groups of a grouped convolution.
    """
    forward = conv_flop_count(
        list(x.shape), list(weight.shape), list(gradient.shape), transposed=transposed
    )
    wanted = rest[-1]
    return int(forward * (int(wanted[0]) + int(wanted[1])))


def bytes_of(node: fx.Node) -> tuple[int, int]:
    """Bytes an op reads and writes."""
    packet = (
        node.target.overloadpacket
        if isinstance(node.target, torch._ops.OpOverload)
        else node.target
    )
    args, kwargs = arguments(node)
    written = sum(num_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))
    if packet in _MAKERS:
        return 0, written
    read = [num_bytes(tensor) for tensor in tensors_in((args, kwargs))]
    if packet in _GATHERS and read:
        read[0] = min(read[0], written)
    return sum(read), written
