"""FLOP and bytes of a traced PyTorch op, from the shapes of its fake tensors.

FLOP come from a formula of ours, else from PyTorch's, else from counting elements. An op without a
formula has one FLOP for each element it makes, or takes if those are more: memory limits it anyway.

To add an op: write a formula with the op's arguments and `out_val`, and enter it in `FORMULAS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Size, Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from roost.frontends.tracing import attention  # noqa: F401  registers roost::attention

aten = torch.ops.aten
Formula = Callable[..., int]


def attention_flop(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any) -> int:
    """Two batched products. A causal mask takes nothing off, as PyTorch counts it."""
    return 2 * _pairs(query.shape, key.shape) * (query.shape[-1] + value.shape[-1])


def attention_backward_flop(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any
) -> int:
    """Five batched products: the scores are made again."""
    return 2 * _pairs(query.shape, key.shape) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query: Size, key: Size) -> int:
    """Pairs of a query and a key, in all heads."""
    return math.prod(query[:-1]) * key[-2]


def convolution_backward_flop(
    gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any
) -> int:
    """The FLOP of the forward, once for each gradient that is wanted.

    PyTorch's own formula forgets the groups of a grouped convolution.
    """
    transposed = rest[4]
    wanted = rest[-1]
    forward = conv_flop_count(
        list(x.shape), list(weight.shape), list(gradient.shape), transposed=transposed
    )
    return int(forward * (int(wanted[0]) + int(wanted[1])))


def grouped_product_flop(first: Tensor, second: Tensor, *rest: Any, out_val: Any) -> int:
    """Products of groups, as experts compute them: each row, or column, is in one group.

    Two dimensions of a tensor are all groups side by side; three are one matrix for each group.
    """
    rows = first.shape[-2] if first.dim() == 3 and second.dim() == 2 else 0
    return 2 * (rows * second.numel() if rows else first.numel() * second.shape[-1])


def grouped_product_backward_flop(first: Tensor, second: Tensor, *rest: Any, out_val: Any) -> int:
    """The gradients of both operands, each as costly as the product itself."""
    return 2 * grouped_product_flop(first, second, out_val=out_val)


def fourier_flop(x: Tensor, dims: list[int], *rest: Any, out_val: Any) -> int:
    """Five N log2 N for complex numbers (Cooley and Tukey), half of it where one end is real."""
    length = math.prod(max(x.shape[dim], out_val.shape[dim]) for dim in dims)
    count = max(x.numel(), out_val.numel())
    whole = 5.0 * count * math.log2(max(length, 2))
    return int(whole if x.is_complex() and out_val.is_complex() else whole / 2)


def packed_product_flop(x: Tensor, weight: Tensor, *rest: Any, out_val: Any) -> int:
    """A product with weights that are packed: their shape does not tell their number."""
    return int(2 * x.numel() * out_val.shape[-1])


def vector_product_flop(matrix: Tensor, vector: Tensor, *rest: Any, out_val: Any) -> int:
    """A multiply and an add for each element of the larger operand."""
    return 2 * max(matrix.numel(), vector.numel())


def added_vector_product_flop(
    added: Tensor, matrix: Tensor, vector: Tensor, *rest: Any, out_val: Any
) -> int:
    """`added + matrix @ vector`."""
    return 2 * matrix.numel() + added.numel()


def distances_flop(first: Tensor, second: Tensor, *rest: Any, out_val: Any) -> int:
    """A difference, a power and a sum for each coordinate of each pair."""
    return int(3 * out_val.numel() * first.shape[-1])


def factorisation_flop(matrix: Tensor, *rest: Any, out_val: Any) -> int:
    """About the cube of the smaller side for each matrix, with the larger side once (Golub)."""
    rows, columns = matrix.shape[-2:]
    return int(2 * matrix.numel() * min(rows, columns))


def no_flop(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """None: the op moves or makes data without computing."""
    return 0


# Ops that read the shape of their tensors only.
_SHAPE_ONLY = {
    aten.empty_like,
    aten.full_like,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones_like,
    aten.rand_like,
    aten.randn_like,
    aten.zeros_like,
}
# Ops that read as many bytes of their first tensor as they make.
_GATHERS = {
    aten.embedding,
    aten.gather,
    aten.index,
    aten.index_select,
    aten.nll_loss_forward,
    aten.slice_backward,
}
_MOVES = {
    *_SHAPE_ONLY,
    aten._to_copy,
    aten.arange,
    aten.cat,
    aten.clone,
    aten.constant_pad_nd,
    aten.copy,
    aten.embedding,
    aten.empty,
    aten.full,
    aten.gather,
    aten.index,
    aten.index_select,
    aten.ones,
    aten.repeat,
    aten.scalar_tensor,
    aten.select_backward,
    aten.select_scatter,
    aten.slice_backward,
    aten.slice_scatter,
    aten.stack,
    aten.zeros,
}

# Op -> its FLOP from its arguments and `out_val`, its result. PyTorch's `flop_registry` has more.
FORMULAS: dict[Any, Formula] = {
    torch.ops.roost.attention: attention_flop,
    torch.ops.roost.attention_backward: attention_backward_flop,
    aten.convolution_backward: convolution_backward_flop,
    aten._grouped_mm: grouped_product_flop,
    aten._scaled_grouped_mm: grouped_product_flop,
    aten._fft_c2c: fourier_flop,
    aten._fft_c2r: fourier_flop,
    aten._fft_r2c: fourier_flop,
    aten._weight_int4pack_mm: packed_product_flop,
    aten._weight_int8pack_mm: packed_product_flop,
    aten.dot: vector_product_flop,
    aten.mv: vector_product_flop,
    aten.addmv: added_vector_product_flop,
    aten._cdist_forward: distances_flop,
    aten.linalg_cholesky_ex: factorisation_flop,
    aten.linalg_inv_ex: factorisation_flop,
    aten.linalg_lu_factor_ex: factorisation_flop,
    aten.linalg_qr: factorisation_flop,
    aten._linalg_svd: factorisation_flop,
    **dict.fromkeys(_MOVES - flop_registry.keys(), no_flop),
}

# The same for ops of other packages, which may not be installed.
NAMED_FORMULAS: dict[str, Formula] = {
    "transformers::grouped_mm_fallback": grouped_product_flop,
    "transformers::grouped_mm_fallback_backward": grouped_product_backward_flop,
}


def flop_of(node: fx.Node) -> tuple[int, bool]:
    """FLOP of an op, and whether a formula gave them."""
    packet = _packet(node)
    args, kwargs = arguments(node)
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    formula = formula or NAMED_FORMULAS.get(_name(packet))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=node.meta["val"])), True
    made = sum(tensor.numel() for tensor in tensors_in(node.meta.get("val")))
    taken = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
    return max(made, taken), False


def bytes_of(node: fx.Node) -> tuple[int, int]:
    """Bytes an op reads and writes."""
    packet = _packet(node)
    written = sum(num_bytes(tensor) for tensor in tensors_in(node.meta.get("val")))
    if packet in _SHAPE_ONLY:
        return 0, written
    read = [num_bytes(tensor) for tensor in tensors_in(arguments(node))]
    if packet in _GATHERS and read:
        read[0] = min(read[0], written)
    if FORMULAS.get(packet, NAMED_FORMULAS.get(_name(packet))) is grouped_product_flop:
        read[1] = _read_of_groups(node, read[1])
    return sum(read), written


def _read_of_groups(node: fx.Node, whole: int) -> int:
    """Bytes of the matrices of groups: rows meet no more matrices than there are rows."""
    (first, second, *_), _ = arguments(node)
    if first.dim() != 2 or second.dim() != 3:
        return whole
    return int(whole * min(first.shape[0], second.shape[0]) // second.shape[0])


def _name(packet: Any) -> str:
    """`namespace::op`, as ops of other packages are known."""
    return str(getattr(packet, "_qualified_op_name", ""))


def _packet(node: fx.Node) -> Any:
    """The op of a node, whichever overload of it is called."""
    return getattr(node.target, "overloadpacket", node.target)


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
    """The arguments of a node, with fake tensors for its input nodes."""
    fakes: Any = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    return fakes  # type: ignore[no-any-return]
