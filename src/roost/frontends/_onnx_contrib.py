"""Shapes of what ops outside the ONNX standard make: those that ONNX Runtime's optimizer and
quantizer put in files.

(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from roost.frontends._onnx_flop import Call
from roost.frontends.tracing.tensors import Shape, Tensor, words

# Makes a tensor like the first it takes. The last two are of the standard, which has no shape
# inference for them.
_LIKE_FIRST = words(
    """biasadd biasgelu biassplitgelu fastgelu gelu quickgelu rotaryembedding qlinearleakyrelu
    qlinearsigmoid
    simplifiedlayernormalization groupnormalization meanvariancenormalization"""
)

# The standard op that makes the same shapes.
ALIKE = {"fusedconv": "Conv", "fusedgemm": "Gemm"}


def outputs_of(call: Call) -> list[Tensor | None]:
    """What an op makes, output by output; what follows the end of the list, or is None there, is
    not known."""
    if call.op in _LIKE_FIRST:
        return [call.taken(0)]
    return _RULES[call.op](call) if call.op in _RULES else []


def _skip_normalization(call: Call) -> list[Tensor | None]:
    return [call.taken(0), None, None, call.taken(0)]  # the sum that was normalised is the fourth


def _fused_matmul(call: Call) -> list[Tensor | None]:
    first, second = (
        _transposed(call, index, f"trans{letter}") for index, letter in ((0, "A"), (1, "B"))
    )
    return [Tensor(call.taken(0).dtype, _product(first, second))]


def _transposed(call: Call, index: int, attribute: str) -> Shape:
    shape = call.taken(index).shape
    return (
        (*shape[:-2], shape[-1], shape[-2])
        if call.attributes.get(attribute) and len(shape) > 1
        else shape
    )


def _product(first: Shape, second: Shape) -> Shape:
    return (*np.broadcast_shapes(first[:-2], second[:-2]), first[-2], second[-1])


def _float_matmul(call: Call) -> list[Tensor | None]:
    """Takes integers or floats and makes floats, of the type of the scale."""
    scale = call.taken(2)
    return [Tensor(scale.dtype, (*call.taken(0).shape[:-1], call.taken(1).shape[-1]))]


def _matmul_n_bits(call: Call) -> list[Tensor | None]:
    taken = call.taken(0)
    return [Tensor(taken.dtype, (*taken.shape[:-1], int(call.attributes["N"])))]


def _quantised_binary(call: Call) -> list[Tensor | None]:
    first, second = call.taken(0), call.taken(3)
    return [Tensor(first.dtype, tuple(np.broadcast_shapes(first.shape, second.shape)))]


def _quantised_gemm(call: Call) -> list[Tensor | None]:
    rows = _transposed(call, 0, "transA")[0]
    columns = _transposed(call, 3, "transB")[1]
    dtype = call.taken(8).dtype if call.has(8) else call.taken(1).dtype
    return [Tensor(dtype, (rows, columns))]


def _quantised_lstm(call: Call) -> list[Tensor | None]:
    steps, batch, _ = call.taken(0).shape
    directions, hidden = call.taken(1).shape[0], int(call.attributes["hidden_size"])
    last = Tensor(call.taken(0).dtype, (directions, batch, hidden))
    return [Tensor(last.dtype, (steps, *last.shape)), last, last]


def _attention(past_index: int, scale_index: int | None) -> Callable[[Call], list[Tensor | None]]:
    def outputs(call: Call) -> list[Tensor | None]:
        batch, steps, _ = call.taken(0).shape
        widths = call.attributes.get("qkv_hidden_sizes")
        width = int(widths[2]) if widths else call.taken(1).shape[1] // 3
        dtype = call.taken(0 if scale_index is None else scale_index).dtype
        heads = int(call.attributes["num_heads"])
        past = call.taken(past_index).shape[3] if call.has(past_index) else 0
        present = Tensor(dtype, (2, batch, heads, steps + past, width // heads))
        return [Tensor(dtype, (batch, steps, width)), present]

    return outputs


def _multi_head_attention(call: Call) -> list[Tensor | None]:
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


def _group_query_attention(call: Call) -> list[Tensor | None]:
    query = call.taken(0)
    batch, steps, width = query.shape
    heads, kept_heads = int(call.attributes["num_heads"]), int(call.attributes["kv_num_heads"])
    # Without a key, the query holds key and value too.
    size = width // heads if call.has(1) else width // (heads + 2 * kept_heads)
    past = call.taken(3).shape[2] if call.has(3) else 0
    present = Tensor(query.dtype, (batch, kept_heads, steps + past, size))
    return [Tensor(query.dtype, (batch, steps, heads * size)), present, present]


_RULES: dict[str, Callable[[Call], list[Tensor | None]]] = {
    "skiplayernormalization": _skip_normalization,
    "skipsimplifiedlayernormalization": _skip_normalization,
    "fusedmatmul": _fused_matmul,
    "matmulintegertofloat": _float_matmul,
    "dynamicquantizematmul": _float_matmul,
    "matmulnbits": _matmul_n_bits,
    "qlinearadd": _quantised_binary,
    "qlinearmul": _quantised_binary,
    "qgemm": _quantised_gemm,
    "dynamicquantizelstm": _quantised_lstm,
    "packedattention": _attention(4, None),
    "qattention": _attention(8, 3),
    "multiheadattention": _multi_head_attention,
    "groupqueryattention": _group_query_attention,
}


def knows(op: str) -> bool:
    """Whether there is a rule for an op."""
    return op in _LIKE_FIRST or op in _RULES or op in ALIKE
