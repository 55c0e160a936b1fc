"""FLOP and bytes of an ONNX op, from the shapes of what it takes and makes.

A multiplication and an addition are two FLOP. What only moves data has none; what works on each
element has one for each that it makes, and reductions and normalisations a few for each that they
take: such ops are limited by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.frontends.tracing.tensors import Tensor, einsum_flop, words


@dataclass(frozen=True)
class Call:
    """An op with what it takes and makes; what it leaves out, or nobody reads, is None."""

    op: str  # lower-case, without its domain
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]

    def taken(self, index: int) -> Tensor:
        tensor = self.inputs[index]
        assert tensor is not None
        return tensor

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    @property
    def made(self) -> Tensor:
        """The first output that is read."""
        return next(tensor for tensor in self.outputs if tensor is not None)


# Move or make data without computing.
_MOVES = words(
    """affinegrid bernoulli bitcast cast castlike centercroppad col2im compress concat constant
    constantofshape
        depthtospace dropout expand eyelike flatten gather gatherelements gathernd identity
    multinomial nonzero onehot pad
        randomnormal randomnormallike randomuniform randomuniformlike range reshape reversesequence
    scatter scatterelements
    scatternd shape size slice spacetodepth split squeeze tensorscatter tile transpose trilu
    unsqueeze where"""
)

# Read as much of their first input as they make.
_GATHERS = frozenset(("compress", "gather", "gatherelements", "gathernd", "slice"))

# Look at the shape of what they take, not at what is in it.
SHAPE_ONLY = frozenset(("shape", "size", "eyelike", "randomnormallike", "randomuniformlike"))

_ELEMENTWISE = words(
    """abs acos acosh add and asin asinh atan atanh biasadd biasgelu bitshift bitwiseand bitwisenot
    bitwiseor bitwisexor
        blackmanwindow ceil celu clip cos cosh dequantizelinear div dynamicquantizelinear elu equal
    erf exp fastgelu floor
        gelu greater greaterorequal hammingwindow hannwindow hardmax hardsigmoid hardswish isinf
    isnan leakyrelu less
        lessorequal log max mean min mish mod mul neg not or pow prelu qlinearadd qlinearleakyrelu
    qlinearmul
        qlinearsigmoid quantizelinear quickgelu reciprocal relu resize rotaryembedding round selu
    shrink sigmoid sign sin
    sinh softplus softsign sqrt sub sum swiglu swish tan tanh thresholdedrelu upsample xor"""
)

# FLOP for each element taken.
_PER_INPUT = {
    "argmax": 1, "argmin": 1, "batchnormalization": 2, "cumprod": 1, "cumsum": 1,
    "globalaveragepool": 1,
    "globallppool": 2, "globalmaxpool": 1, "groupnormalization": 8, "instancenormalization": 8,
    "layernormalization": 8, "logsoftmax": 5, "lpnormalization": 3, "meanvariancenormalization": 6,
    "negativeloglikelihoodloss": 1, "qlinearglobalaveragepool": 1, "reducel1": 2, "reducel2": 2,
    "reducelogsum": 1,
    "reducelogsumexp": 3, "reducemax": 1, "reducemean": 1, "reducemin": 1, "reduceprod": 1,
    "reducesum": 1,
    "reducesumsquare": 2, "rmsnormalization": 4, "simplifiedlayernormalization": 4,
    "skiplayernormalization": 9,
    "skipsimplifiedlayernormalization": 5, "softmax": 5, "softmaxcrossentropyloss": 6, "topk": 4,
}  # fmt: skip

# Multiply in eight bits, whatever the type of what they make.
QUANTISED = words(
    """convinteger dynamicquantizelstm dynamicquantizematmul matmulinteger matmulintegertofloat
    qattention qgemm
    qlinearconv qlinearmatmul"""
)


def flop_of(call: Call) -> tuple[float, str]:
    """FLOP of an op, and whether they come from a formula, from counting elements, or are unknown
    and counted too."""
    if call.op in _FORMULAS:
        return float(_FORMULAS[call.op](call)), "formula"
    if call.op in _MOVES:
        return 0.0, "formula"
    if call.op in _PER_INPUT and call.has(0):
        return float(_PER_INPUT[call.op] * call.taken(0).elements), "elements"
    made = sum(tensor.elements for tensor in call.outputs if tensor is not None)
    return float(made), "elements" if call.op in _ELEMENTWISE else "unknown"


def bytes_of(call: Call) -> tuple[int, int]:
    """Bytes an op reads and writes."""
    written = sum(tensor.bytes for tensor in call.outputs if tensor is not None)
    if call.op in SHAPE_ONLY:
        return 0, written
    read = [tensor.bytes for tensor in call.inputs if tensor is not None]
    if call.op in _GATHERS and read:
        read[0] = min(read[0], written)
    return sum(read), written


def _matmul(call: Call) -> float:
    """The first input times any other; the last dimension of the first is summed over."""
    return 2.0 * call.made.elements * _summed(call, "transA")


def _summed(call: Call, transposed: str) -> int:
    shape = call.taken(0).shape
    if not shape:
        return 1
    return shape[-2] if call.attributes.get(transposed) and len(shape) > 1 else shape[-1]


def _matmul_n_bits(call: Call) -> float:
    return 2.0 * call.made.elements * int(call.attributes["K"])


def _conv(weight: int) -> Callable[[Call], float]:
    # A weight is [channels made, channels taken / groups, *kernel].
    return lambda call: 2.0 * call.made.elements * math.prod(call.taken(weight).shape[1:])


def _conv_transpose(call: Call) -> float:
    # Each element taken is multiplied by a weight of [channels taken, channels made / groups,
    # *kernel].
    return 2.0 * call.taken(0).elements * math.prod(call.taken(1).shape[1:])


def _recurrent(call: Call) -> float:
    """Each step multiplies by all weights: [directions, gates * hidden, taken] and [..., gates *
    hidden, hidden]."""
    steps_times_batch = math.prod(call.taken(0).shape[:2])
    return 2.0 * steps_times_batch * (call.taken(1).elements + call.taken(2).elements)


def _pool(call: Call) -> float:
    return float(call.made.elements * math.prod(call.attributes["kernel_shape"]))


def _lrn(call: Call) -> float:
    return float(call.made.elements * (2 * int(call.attributes["size"]) + 2))


def _einsum(call: Call) -> float:
    shapes = [call.taken(index).shape for index in range(len(call.inputs))]
    return einsum_flop(call.attributes["equation"], shapes)


def _attention(call: Call) -> float:
    """ai.onnx Attention: [batch, heads, steps, size], or [batch, steps, heads * size] with the
    heads as attributes."""
    query, key, value = (call.taken(index).shape for index in range(3))
    past = call.taken(4).shape[2] if call.has(4) else 0
    if len(query) == 4:
        batch, heads, steps, size = query
        return 2.0 * batch * heads * steps * (key[2] + past) * (size + value[3])
    batch, steps, width = query
    heads, value_heads = int(call.attributes["q_num_heads"]), int(call.attributes["kv_num_heads"])
    return 2.0 * batch * steps * (key[1] + past) * (width + heads * value[2] // value_heads)


def _packed_attention(past_index: int) -> Callable[[Call], float]:
    """com.microsoft Attention: projects [batch, steps, width] by [width, 3 * hidden], then
    attends."""

    def flop(call: Call) -> float:
        (batch, steps, width), projected = call.taken(0).shape, call.taken(1).shape[1]
        # [2, batch, heads, steps, size].
        past = call.taken(past_index).shape[3] if call.has(past_index) else 0
        value_width = call.made.shape[-1]
        query_width = (projected - value_width) // 2
        return (
            2.0 * batch * steps * (width * projected + (steps + past) * (query_width + value_width))
        )

    return flop


def _multi_head_attention(call: Call) -> float:
    """com.microsoft MultiHeadAttention: query [batch, steps, hidden]; key and value alike, by head,
    or packed in it."""
    query = call.taken(0).shape
    if len(query) == 5:  # [batch, steps, heads, 3, size]
        return 4.0 * query[0] * query[1] ** 2 * query[2] * query[4]
    past = call.taken(6).shape[2] if call.has(6) else 0
    key = call.taken(1).shape if call.has(1) else query
    steps = past + (key[2] if len(key) == 4 else key[1])
    return 2.0 * query[0] * query[1] * steps * (query[2] + call.made.shape[-1])


def _group_query_attention(call: Call) -> float:
    """com.microsoft GroupQueryAttention: makes [batch, steps, hidden], whichever way the inputs are
    packed."""
    batch, steps, hidden = call.made.shape
    past = call.taken(3).shape[2] if call.has(3) else 0
    return 4.0 * batch * steps * (steps + past) * hidden


_FORMULAS: dict[str, Callable[[Call], float]] = {
    "matmul": _matmul,
    "gemm": _matmul,
    "fusedmatmul": _matmul,
    "fusedgemm": _matmul,
    "matmulinteger": _matmul,
    "matmulintegertofloat": _matmul,
    "dynamicquantizematmul": _matmul,
    "qlinearmatmul": _matmul,
    "qgemm": _matmul,
    "matmulnbits": _matmul_n_bits,
    "conv": _conv(1),
    "fusedconv": _conv(1),
    "convinteger": _conv(1),
    "deformconv": _conv(1),
    "qlinearconv": _conv(3),
    "convtranspose": _conv_transpose,
    "lstm": _recurrent,
    "dynamicquantizelstm": _recurrent,
    "gru": _recurrent,
    "rnn": _recurrent,
    "averagepool": _pool,
    "lppool": _pool,
    "maxpool": _pool,
    "lrn": _lrn,
    "einsum": _einsum,
    "attention": _attention,
    "packedattention": _packed_attention(4),
    "qattention": _packed_attention(8),
    "multiheadattention": _multi_head_attention,
    "groupqueryattention": _group_query_attention,
}
