"""FLOP and bytes of a TensorFlow op, from the shapes of what it takes and makes.

Counted as for ONNX: a multiplication and an addition are two FLOP, what only moves data has none,
and what works on each element has one for each that it makes, or a few for each that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.frontends.tracing.tensors import Shape, Tensor, einsum_flop, words


@dataclass(frozen=True)
class Call:
    """An op with what it takes and makes; what nobody reads is None. A resource is the variable it
    stands for."""

    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]

    @property
    def made(self) -> Tensor:
        """The first output that is read."""
        return next(tensor for tensor in self.outputs if tensor is not None)


# Move or make data without computing.
_MOVES = words(
    """BatchToSpaceND BroadcastTo Bitcast Cast Concat ConcatV2 ConjugateTranspose Copy DepthToSpace
    DynamicStitch
        DynamicPartition Empty Fill Gather GatherNd GatherV2 InvertPermutation LinSpace
    MatrixBandPart MatrixDiagV3
        MirrorPad MirrorPadGrad OneHot OnesLike Pack ParallelConcat Pad PadV2 RandomStandardNormal
    RandomUniform
        RandomUniformInt Range Rank ReadVariableOp ResourceGather ResourceGatherNd Reverse
    ReverseSequence ReverseV2 Roll
        ScatterNd Select SelectV2 Shape ShapeN Size Slice SpaceToBatchND SpaceToDepth SparseToDense
    Split SplitV
        StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomNormalV2
    StatelessRandomUniformV2
        StatelessRandomUniformFullIntV2 StatelessTruncatedNormalV2 StridedSlice StridedSliceGrad
    TensorScatterUpdate
    TensorStridedSliceUpdate Tile Transpose TruncatedNormal Unpack VariableShape Where ZerosLike
    AssignVariableOp BroadcastArgs BroadcastGradientArgs ConcatOffset""".lower()
)

# Read as much of their first input as they make.
_GATHERS = words(
    "Gather GatherNd GatherV2 ResourceGather ResourceGatherNd Slice StridedSlice".lower()
)

# Look at the shape of what they take, not at what is in it.
SHAPE_ONLY = words("OnesLike Rank Shape ShapeN Size VariableShape ZerosLike".lower())

_ELEMENTWISE = words(
    """Abs AccumulateNV2 Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh
    AssignAddVariableOp
        AssignSubVariableOp Atan Atan2 Atanh BiasAdd BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil
    CheckNumerics
        ClipByValue Complex Cos Cosh Cross Dequantize Digamma Div DivNoNan Elu EluGrad Equal Erf
    Erfc Erfinv Exp Expm1
        FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel Floor
    FloorDiv FloorMod Greater
        GreaterEqual InTopKV2 Inv IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual Lgamma
    Log Log1p LogicalAnd
        LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NextAfter NotEqual Pow QuantizeV2
    RealDiv Reciprocal
        ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad ResizeBilinear ResizeBilinearGrad
    ResizeNearestNeighbor
        ResizeNearestNeighborGrad ResizeBicubic RightShift LeftShift Rint Round Rsqrt RsqrtGrad Selu
    SeluGrad Sigmoid
        SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square
    SquaredDifference Sub
        Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlogy Xlog1py ResourceScatterAdd
    ResourceScatterSub
    ResourceScatterUpdate TensorScatterAdd TensorScatterSub""".lower()
)

# FLOP for each element of the first input.
_PER_INPUT = {
    "all": 1, "any": 1, "argmax": 1, "argmin": 1, "biasaddgrad": 1, "bincount": 1, "cumprod": 1,
    "cumsum": 1,
    "densebincount": 1, "euclideannorm": 2, "fusedbatchnormgrad": 10, "fusedbatchnormgradv2": 10,
    "fusedbatchnormgradv3": 10, "l2loss": 2, "logsoftmax": 5, "lrn": 12, "max": 1, "mean": 1, "min":
    1, "prod": 1,
    "segmentsum": 1, "softmax": 5, "softmaxcrossentropywithlogits": 8,
    "sparsesoftmaxcrossentropywithlogits": 8,
    "sum": 1, "topkv2": 4, "unsortedsegmentmax": 1, "unsortedsegmentprod": 1, "unsortedsegmentsum":
    1,
    "unsortedsegmentmin": 1, "maxpoolgrad": 1, "maxpoolgradv2": 1, "maxpoolgradwithargmax": 1,
}  # fmt: skip

# FLOP of an optimizer for each element of the variable, which is its first input.
_UPDATES = {
    "resourceapplyadadelta": 12, "resourceapplyadagrad": 5, "resourceapplyadagradv2": 5,
    "resourceapplyadam": 12,
    "resourceapplyadamax": 10, "resourceapplyadamwithamsgrad": 13, "resourceapplycenteredrmsprop":
    12,
    "resourceapplyftrl": 14, "resourceapplyftrlv2": 14, "resourceapplygradientdescent": 2,
    "resourceapplykerasmomentum": 4, "resourceapplymomentum": 4, "resourceapplyrmsprop": 9,
}  # fmt: skip


def flop_of(call: Call) -> tuple[float, str]:
    """FLOP of an op, and whether they come from a formula, from counting elements, or are unknown
    and counted too."""
    op = call.op.lower()
    if op in _FORMULAS:
        return float(_FORMULAS[op](call)), "formula"
    if op in _MOVES:
        return 0.0, "formula"
    if op in _UPDATES and call.inputs:
        return float(_UPDATES[op] * call.inputs[0].elements), "elements"
    if op in _PER_INPUT and call.inputs:
        return float(_PER_INPUT[op] * call.inputs[0].elements), "elements"
    made = [tensor.elements for tensor in call.outputs if tensor is not None]
    count = sum(made) if made else max((tensor.elements for tensor in call.inputs), default=0)
    return float(count), "elements" if op in _ELEMENTWISE else "unknown"


def bytes_of(call: Call) -> tuple[int, int]:
    """Bytes an op reads and writes, but for variables that it changes."""
    op = call.op.lower()
    written = sum(tensor.bytes for tensor in call.outputs if tensor is not None)
    if op in SHAPE_ONLY:
        return 0, written
    read = [tensor.bytes for tensor in call.inputs]
    if op in _GATHERS and read:
        read[0] = min(read[0], written)
    return sum(read), written


def _matmul(call: Call) -> float:
    transposed = call.attributes.get("transpose_a") or call.attributes.get("adj_x")
    return 2.0 * call.made.elements * call.inputs[0].shape[-2 if transposed else -1]


def _per_place(shape: Shape) -> int:
    """What one element made costs: filters are [*kernel, channels taken / groups, channels
    made]."""
    return math.prod(shape[:-1])


def _conv(call: Call) -> float:
    return 2.0 * call.made.elements * _per_place(call.inputs[1].shape)


def _conv_to_input(call: Call) -> float:
    """Takes the sizes of what is made, the filter, and the gradient of what the convolution
    made."""
    return 2.0 * call.inputs[2].elements * _per_place(call.inputs[1].shape)


def _conv_to_filter(call: Call) -> float:
    return 2.0 * call.inputs[2].elements * _per_place(call.made.shape)


def _depthwise(
    filter_of: Callable[[Call], Tensor], made_of: Callable[[Call], Tensor]
) -> Callable[[Call], float]:
    # A filter is [height, width, channels taken, times each]: one channel taken for each made.
    return lambda call: 2.0 * made_of(call).elements * math.prod(filter_of(call).shape[:2])


def _pool(call: Call) -> float:
    return float(call.made.elements * math.prod(call.attributes["ksize"]))


def _average_pool_grad(call: Call) -> float:
    return float(call.inputs[1].elements * math.prod(call.attributes["ksize"]))


def _batch_norm(call: Call) -> float:
    """Scale and shift; in training also mean and variance."""
    return float((8 if call.attributes.get("is_training", True) else 2) * call.inputs[0].elements)


def _einsum(call: Call) -> float:
    return einsum_flop(call.attributes["equation"], [tensor.shape for tensor in call.inputs])


def _cudnn_rnn(backward: float) -> Callable[[Call], float]:
    # input [steps, batch, size], input_h, input_c, params: every step multiplies by all of them.
    return lambda call: (
        backward * 2.0 * math.prod(call.inputs[0].shape[:2]) * call.inputs[3].elements
    )


_FORMULAS: dict[str, Callable[[Call], float]] = {
    "matmul": _matmul,
    "batchmatmul": _matmul,
    "batchmatmulv2": _matmul,
    "batchmatmulv3": _matmul,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv2dbackpropinput": _conv_to_input,
    "conv3dbackpropinputv2": _conv_to_input,
    "conv2dbackpropfilter": _conv_to_filter,
    "conv3dbackpropfilterv2": _conv_to_filter,
    "depthwiseconv2dnative": _depthwise(lambda call: call.inputs[1], lambda call: call.made),
    "depthwiseconv2dnativebackpropinput": _depthwise(
        lambda call: call.inputs[1], lambda call: call.inputs[2]
    ),
    "depthwiseconv2dnativebackpropfilter": _depthwise(
        lambda call: call.made, lambda call: call.inputs[2]
    ),
    "maxpool": _pool,
    "avgpool": _pool,
    "maxpool3d": _pool,
    "avgpool3d": _pool,
    "avgpoolgrad": _average_pool_grad,
    "fusedbatchnorm": _batch_norm,
    "fusedbatchnormv2": _batch_norm,
    "fusedbatchnormv3": _batch_norm,
    "einsum": _einsum,
    "cudnnrnn": _cudnn_rnn(1),
    "cudnnrnnv2": _cudnn_rnn(1),
    "cudnnrnnv3": _cudnn_rnn(1),
    "cudnnrnnbackprop": _cudnn_rnn(2),
    "cudnnrnnbackpropv2": _cudnn_rnn(2),
    "cudnnrnnbackpropv3": _cudnn_rnn(2),
}
