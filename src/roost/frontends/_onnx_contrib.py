"""Output shapes of ops outside the ONNX standard, which ONNX Runtime's tools put in files.

(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from roost.frontends.tracing.op_costs import OpCall
from roost.frontends.tracing.tensors import Shape, Tensor, by_name, words

Outputs = list[Tensor | None]
Rule = Callable[[OpCall], Outputs]

# The output is like the first input. The standard has the last two, without shape inference.
_LIKE_FIRST = words(
    """
    biasadd biasgelu biassplitgelu fastgelu gelu quickgelu rotaryembedding qlinearleakyrelu
    qlinearsigmoid simplifiedlayernormalization groupnormalization meanvariancenormalization
    """
)

# The standard op with the same output shapes.
ALIKE = {"fusedconv": "Conv", "fusedgemm": "Gemm"}

# Ops with a graph inside that works on elements: it changes no shape.
WITH_BODY = frozenset(("FlexAttention",))


def outputs_of(call: OpCall) -> Outputs:
    """The outputs of an op; None, or past the end of the list, stands for an unknown one."""
    if call.op in _LIKE_FIRST:
        return [call.taken(0)]
    return _RULES[call.op](call) if call.op in _RULES else []


def _skip_normalization(call: OpCall) -> Outputs:
    return [call.taken(0), None, None, call.taken(0)]  # the fourth is the sum before the norm


def _fused_matmul(call: OpCall) -> Outputs:
    first = _transposed(call, 0, "transA")
    second = _transposed(call, 1, "transB")
    batch = np.broadcast_shapes(first[:-2], second[:-2])
    return [Tensor(call.taken(0).dtype, (*batch, first[-2], second[-1]))]


def _transposed(call: OpCall, index: int, attribute: str) -> Shape:
    shape = call.taken(index).shape
    if call.attributes.get(attribute) and len(shape) > 1:
        return (*shape[:-2], shape[-1], shape[-2])
    return shape


def _float_matmul(call: OpCall) -> Outputs:
    """Takes integers or floats and makes floats, of the type of the scale."""
    scale = call.taken(2)
    return [Tensor(scale.dtype, (*call.taken(0).shape[:-1], call.taken(1).shape[-1]))]


def _matmul_n_bits(call: OpCall) -> Outputs:
    taken = call.taken(0)
    return [Tensor(taken.dtype, (*taken.shape[:-1], int(call.attributes["N"])))]


def _quantised_binary(call: OpCall) -> Outputs:
    first = call.taken(0)
    second = call.taken(3)
    return [Tensor(first.dtype, tuple(np.broadcast_shapes(first.shape, second.shape)))]


def _quantised_gemm(call: OpCall) -> Outputs:
    rows = _transposed(call, 0, "transA")[0]
    columns = _transposed(call, 3, "transB")[1]
    dtype = call.taken(8).dtype if call.has(8) else call.taken(1).dtype
    return [Tensor(dtype, (rows, columns))]


def _quantised_lstm(call: OpCall) -> Outputs:
    steps, batch, _ = call.taken(0).shape
    directions = call.taken(1).shape[0]
    hidden = int(call.attributes["hidden_size"])
    last = Tensor(call.taken(0).dtype, (directions, batch, hidden))
    return [Tensor(last.dtype, (steps, *last.shape)), last, last]


def _attention(past_index: int, scale_index: int | None) -> Rule:
    def outputs(call: OpCall) -> Outputs:
        batch, steps, _ = call.taken(0).shape
        widths = call.attributes.get("qkv_hidden_sizes")
        width = int(widths[2]) if widths else call.taken(1).shape[1] // 3
        dtype = call.taken(0 if scale_index is None else scale_index).dtype
        heads = int(call.attributes["num_heads"])
        past = call.taken(past_index).shape[3] if call.has(past_index) else 0
        present = Tensor(dtype, (2, batch, heads, steps + past, width // heads))
        return [Tensor(dtype, (batch, steps, width)), present]

    return outputs


def _multi_head_attention(call: OpCall) -> Outputs:
    query = call.taken(0)
    heads = int(call.attributes["num_heads"])
    if len(query.shape) == 5:  # [batch, steps, heads, 3, size]
        batch, steps, _, _, size = query.shape
        return [Tensor(query.dtype, (batch, steps, heads * size))]
    batch, steps, width = query.shape
    value = call.taken(2).shape if call.has(2) else query.shape
    value_width = value[1] * value[3] if len(value) == 4 else value[2]
    past = call.taken(6).shape[2] if call.has(6) else 0
    kept = past + (value[2] if len(value) == 4 else value[1])
    return [
        Tensor(query.dtype, (batch, steps, value_width)),
        Tensor(query.dtype, (batch, heads, kept, width // heads)),
        Tensor(query.dtype, (batch, heads, kept, value_width // heads)),
    ]


def _group_query_attention(call: OpCall) -> Outputs:
    query = call.taken(0)
    batch, steps, width = query.shape
    heads = int(call.attributes["num_heads"])
    kept_heads = int(call.attributes["kv_num_heads"])
    # Without a key, the query holds key and value too.
    size = width // heads if call.has(1) else width // (heads + 2 * kept_heads)
    past = call.taken(3).shape[2] if call.has(3) else 0
    present = Tensor(query.dtype, (batch, kept_heads, steps + past, size))
    return [Tensor(query.dtype, (batch, steps, heads * size)), present, present]


_RULES: dict[str, Rule] = by_name(
    {
        _skip_normalization: "skiplayernormalization skipsimplifiedlayernormalization",
        _fused_matmul: "fusedmatmul",
        _float_matmul: "matmulintegertofloat dynamicquantizematmul",
        _matmul_n_bits: "matmulnbits",
        _quantised_binary: "qlinearadd qlinearmul",
        _quantised_gemm: "qgemm",
        _quantised_lstm: "dynamicquantizelstm",
        _attention(4, None): "packedattention",
        _attention(8, 3): "qattention",
        _multi_head_attention: "multiheadattention",
        _group_query_attention: "groupqueryattention",
    }
)


def knows(op: str) -> bool:
    """Tell whether an op has a rule."""
    return op in _LIKE_FIRST or op in _RULES or op in ALIKE
