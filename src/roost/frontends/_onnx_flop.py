"""The table of FLOP formulas for ONNX ops; `onnx` asks it for the costs of a node."""

from __future__ import annotations

import math

from roost.frontends.tracing.op_costs import Formula, OpCall, OpCosts
from roost.frontends.tracing.tensors import by_name, einsum_flop, words

_MOVES = words(
    """
    affinegrid bernoulli bitcast cast castlike centercroppad col2im compress concat constant
    constantofshape depthtospace dropout expand eyelike flatten gather gatherelements gathernd
    identity multinomial nonzero onehot pad randomnormal randomnormallike randomuniform
    randomuniformlike range reshape reversesequence scatter scatterelements scatternd shape
    size slice spacetodepth split squeeze tensorscatter tile transpose trilu unsqueeze where
    """
)

_GATHERS = frozenset(("compress", "gather", "gatherelements", "gathernd", "slice"))

SHAPE_ONLY = frozenset(("shape", "size", "eyelike", "randomnormallike", "randomuniformlike"))

_ELEMENTWISE = words(
    """
    abs acos acosh add and asin asinh atan atanh biasadd biasgelu bitshift bitwiseand
    bitwisenot bitwiseor bitwisexor blackmanwindow ceil celu clip cos cosh dequantizelinear div
    dynamicquantizelinear elu equal erf exp fastgelu floor gelu greater greaterorequal
    hammingwindow hannwindow hardmax hardsigmoid hardswish isinf isnan leakyrelu less
    lessorequal log max mean min mish mod mul neg not or pow prelu qlinearadd qlinearleakyrelu
    qlinearmul qlinearsigmoid quantizelinear quickgelu reciprocal relu resize rotaryembedding
    round selu shrink sigmoid sign sin sinh softplus softsign sqrt sub sum swiglu swish tan
    tanh thresholdedrelu upsample xor
    """
)

_PER_INPUT = by_name(
    {
        1: """
            argmax argmin cumprod cumsum globalaveragepool globalmaxpool negativeloglikelihoodloss
            qlinearglobalaveragepool reducelogsum reducemax reducemean reducemin reduceprod
            reducesum
        """,
        2: "batchnormalization globallppool reducel1 reducel2 reducesumsquare",
        3: "lpnormalization reducelogsumexp",
        4: "rmsnormalization simplifiedlayernormalization topk",
        5: "logsoftmax skipsimplifiedlayernormalization softmax",
        6: "meanvariancenormalization softmaxcrossentropyloss",
        8: "groupnormalization instancenormalization layernormalization",
        9: "skiplayernormalization",
    }
)

# Multiply in eight bits, whatever the type of their output.
QUANTISED = words(
    """
    convinteger dynamicquantizelstm dynamicquantizematmul matmulinteger matmulintegertofloat
    qattention qgemm qlinearconv qlinearmatmul
    """
)


def _matmul(call: OpCall) -> float:
    """A product that sums over the last dimension of the first input."""
    return 2.0 * call.made.elements * _summed(call, "transA")


def _summed(call: OpCall, transposed: str) -> int:
    shape = call.taken(0).shape
    if not shape:
        return 1
    return shape[-2] if call.attributes.get(transposed) and len(shape) > 1 else shape[-1]


def _matmul_n_bits(call: OpCall) -> float:
    """A product with weights of a few bits; K is the dimension summed over."""
    return 2.0 * call.made.elements * int(call.attributes["K"])


def _conv(weight: int) -> Formula:
    """A convolution; input `weight` is [channels made, channels taken / groups, *kernel]."""
    return lambda call: 2.0 * call.made.elements * math.prod(call.taken(weight).shape[1:])


def _conv_transpose(call: OpCall) -> float:
    """Each element taken times a weight of [channels taken, channels made / groups, *kernel]."""
    return 2.0 * call.taken(0).elements * math.prod(call.taken(1).shape[1:])


def _recurrent(call: OpCall) -> float:
    """Each step times all weights, [directions, gates * hidden, taken] and [..., hidden]."""
    steps_times_batch = math.prod(call.taken(0).shape[:2])
    return 2.0 * steps_times_batch * (call.taken(1).elements + call.taken(2).elements)


def _pool(call: OpCall) -> float:
    """One FLOP for each place of the kernel."""
    return float(call.made.elements * math.prod(call.attributes["kernel_shape"]))


def _lrn(call: OpCall) -> float:
    """Squares and sums over `size` channels."""
    return float(call.made.elements * (2 * int(call.attributes["size"]) + 2))


def _einsum(call: OpCall) -> float:
    """A product over all combinations of indices."""
    shapes = [call.taken(index).shape for index in range(len(call.inputs))]
    return einsum_flop(call.attributes["equation"], shapes)


def _attention(call: OpCall) -> float:
    """Attention of ai.onnx: [batch, heads, steps, size], or [batch, steps, heads * size]."""
    query, key, value = (call.taken(index).shape for index in range(3))
    past = call.taken(4).shape[2] if call.has(4) else 0
    if len(query) == 4:
        batch, heads, steps, size = query
        return 2.0 * batch * heads * steps * (key[2] + past) * (size + value[3])
    batch, steps, width = query
    heads = int(call.attributes["q_num_heads"])
    value_heads = int(call.attributes["kv_num_heads"])
    return 2.0 * batch * steps * (key[1] + past) * (width + heads * value[2] // value_heads)


def _packed_attention(past_index: int) -> Formula:
    """Attention of com.microsoft: a projection by [width, 3 * hidden], then attention."""

    def flop(call: OpCall) -> float:
        (batch, steps, width) = call.taken(0).shape
        projected = call.taken(1).shape[1]
        # [2, batch, heads, steps, size].
        past = call.taken(past_index).shape[3] if call.has(past_index) else 0
        value_width = call.made.shape[-1]
        query_width = (projected - value_width) // 2
        return (
            2.0 * batch * steps * (width * projected + (steps + past) * (query_width + value_width))
        )

    return flop


def _multi_head_attention(call: OpCall) -> float:
    """MultiHeadAttention of com.microsoft; the query may hold key and value too."""
    query = call.taken(0).shape
    if len(query) == 5:  # [batch, steps, heads, 3, size]
        return 4.0 * query[0] * query[1] ** 2 * query[2] * query[4]
    past = call.taken(6).shape[2] if call.has(6) else 0
    key = call.taken(1).shape if call.has(1) else query
    steps = past + (key[2] if len(key) == 4 else key[1])
    return 2.0 * query[0] * query[1] * steps * (query[2] + call.made.shape[-1])


def _group_query_attention(call: OpCall) -> float:
    """GroupQueryAttention of com.microsoft; it makes [batch, steps, hidden]."""
    batch, steps, hidden = call.made.shape
    past = call.taken(3).shape[2] if call.has(3) else 0
    return 4.0 * batch * steps * (steps + past) * hidden


def _linear_attention(call: OpCall) -> float:
    """Attention with a state of [key size, value size] for each head; `update_rule` changes it."""
    (batch, steps, width), value_width = call.taken(0).shape, call.taken(2).shape[-1]
    heads, kept_heads = int(call.attributes["q_num_heads"]), int(call.attributes["kv_num_heads"])
    state = (width // heads) * (value_width // kept_heads)
    products = 2 if "delta" in call.attributes.get("update_rule", "gated_delta") else 1
    return 2.0 * batch * steps * state * (heads + products * kept_heads)


def _dft(call: OpCall) -> float:
    """A fast Fourier transform: 5 n log2(n) FLOP of complex numbers, half of that of real ones."""
    shape = call.taken(0).shape
    length = shape[int(call.attributes.get("axis", -2))]
    numbers = math.prod(shape[:-1])
    return 2.5 * shape[-1] * numbers * math.log2(max(length, 1))


def _stft(call: OpCall) -> float:
    """A Fourier transform of each frame; it makes [batch, frames, bins, 2]."""
    batch, frames, bins, _ = call.made.shape
    length = 2 * bins - 2 if call.attributes.get("onesided", 1) else bins
    return 2.5 * batch * frames * length * math.log2(max(length, 1))


def _grid_sample(call: OpCall) -> float:
    """Each element made is a weighted sum of the points around it."""
    mode = call.attributes.get("mode", "linear")
    points_a_side = 4 if "cubic" in mode else 1 if mode == "nearest" else 2
    return 2.0 * call.made.elements * float(points_a_side) ** (len(call.made.shape) - 2)


_FORMULAS: dict[str, Formula] = by_name(
    {
        _matmul: """
            matmul gemm fusedmatmul fusedgemm matmulinteger matmulintegertofloat
            dynamicquantizematmul qlinearmatmul qgemm
        """,
        _matmul_n_bits: "matmulnbits",
        _conv(1): "conv fusedconv convinteger deformconv causalconvwithstate",
        _conv(3): "qlinearconv",
        _conv_transpose: "convtranspose",
        _recurrent: "lstm dynamicquantizelstm gru rnn",
        _pool: "averagepool lppool maxpool",
        _lrn: "lrn",
        _einsum: "einsum",
        _attention: "attention flexattention",
        _linear_attention: "linearattention",
        _dft: "dft",
        _stft: "stft",
        _grid_sample: "gridsample",
        _packed_attention(4): "packedattention",
        _packed_attention(8): "qattention",
        _multi_head_attention: "multiheadattention",
        _group_query_attention: "groupqueryattention",
    }
)

COSTS = OpCosts(_FORMULAS, _MOVES, _GATHERS, SHAPE_ONLY, _ELEMENTWISE, _PER_INPUT)
