"""The table of FLOP formulas for TensorFlow ops; `_tensorflow_graph` asks it for costs."""

from __future__ import annotations

import math
from collections.abc import Callable

from roost.frontends.tracing.op_costs import Formula, OpCall, OpCosts
from roost.frontends.tracing.tensors import Shape, Tensor, by_name, einsum_flop, words

_MOVES = words(
    """
    BatchToSpaceND BroadcastTo Bitcast Cast Concat ConcatV2 ConjugateTranspose Copy
    DepthToSpace DynamicStitch DynamicPartition Empty Fill Gather GatherNd GatherV2
    InvertPermutation LinSpace MatrixBandPart MatrixDiagV3 MirrorPad MirrorPadGrad OneHot
    OnesLike Pack ParallelConcat Pad PadV2 RandomStandardNormal RandomUniform RandomUniformInt
    Range Rank ReadVariableOp ResourceGather ResourceGatherNd Reverse ReverseSequence ReverseV2
    Roll ScatterNd Select SelectV2 Shape ShapeN Size Slice SpaceToBatchND SpaceToDepth
    SparseToDense Split SplitV StatelessRandomGetAlg StatelessRandomGetKeyCounter
    StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessRandomUniformFullIntV2
    StatelessTruncatedNormalV2 StridedSlice StridedSliceGrad TensorScatterUpdate
    TensorStridedSliceUpdate Tile Transpose TruncatedNormal Unpack VariableShape Where
    ZerosLike AssignVariableOp BroadcastArgs BroadcastGradientArgs ConcatOffset
    """.lower()
)

_GATHERS = words(
    """
    Gather GatherNd GatherV2 ResourceGather ResourceGatherNd Slice StridedSlice
    """.lower()
)

SHAPE_ONLY = words(
    """
    OnesLike Rank Shape ShapeN Size VariableShape ZerosLike
    """.lower()
)

_ELEMENTWISE = words(
    """
    Abs AccumulateNV2 Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh
    AssignAddVariableOp AssignSubVariableOp Atan Atan2 Atanh BiasAdd BitwiseAnd BitwiseOr
    BitwiseXor Bucketize Ceil CheckNumerics ClipByValue Complex Cos Cosh Cross Dequantize
    Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel Floor FloorDiv FloorMod Greater
    GreaterEqual InTopKV2 Inv IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual
    Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg
    NextAfter NotEqual Pow QuantizeV2 RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad
    ResizeBicubic RightShift LeftShift Rint Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square
    SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlogy Xlog1py
    ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate TensorScatterAdd
    TensorScatterSub
    """.lower()
)

# The first input of an optimizer is its variable.
_PER_INPUT = by_name(
    {
        1: """
            all any argmax argmin biasaddgrad bincount cumprod cumsum densebincount max mean min
            prod segmentsum sum unsortedsegmentmax unsortedsegmentprod unsortedsegmentsum
            unsortedsegmentmin maxpoolgrad maxpoolgradv2 maxpoolgradwithargmax
        """,
        2: "euclideannorm l2loss resourceapplygradientdescent",
        4: "topkv2 resourceapplykerasmomentum resourceapplymomentum",
        5: "logsoftmax softmax resourceapplyadagrad resourceapplyadagradv2",
        8: "softmaxcrossentropywithlogits sparsesoftmaxcrossentropywithlogits",
        9: "resourceapplyrmsprop",
        10: "fusedbatchnormgrad fusedbatchnormgradv2 fusedbatchnormgradv3 resourceapplyadamax",
        12: "lrn resourceapplyadadelta resourceapplyadam resourceapplycenteredrmsprop",
        13: "resourceapplyadamwithamsgrad",
        14: "resourceapplyftrl resourceapplyftrlv2",
    }
)


def _matmul(call: OpCall) -> float:
    """A product that sums over one dimension of the first input."""
    transposed = call.attributes.get("transpose_a") or call.attributes.get("adj_x")
    return 2.0 * call.made.elements * call.taken(0).shape[-2 if transposed else -1]


def _per_place(shape: Shape) -> int:
    """Products for one element made, by a filter [*kernel, channels taken / groups, made]."""
    return math.prod(shape[:-1])


def _conv(call: OpCall) -> float:
    """A convolution with the filter as second input."""
    return 2.0 * call.made.elements * _per_place(call.taken(1).shape)


def _conv_to_input(call: OpCall) -> float:
    """The gradient of a convolution's input, from its shape, the filter, and the gradient."""
    return 2.0 * call.taken(2).elements * _per_place(call.taken(1).shape)


def _conv_to_filter(call: OpCall) -> float:
    """The gradient of a convolution's filter."""
    return 2.0 * call.taken(2).elements * _per_place(call.made.shape)


def _depthwise(
    filter_of: Callable[[OpCall], Tensor], made_of: Callable[[OpCall], Tensor]
) -> Formula:
    """A convolution per channel; its filter is [height, width, channels taken, times each]."""
    return lambda call: 2.0 * made_of(call).elements * math.prod(filter_of(call).shape[:2])


def _pool(call: OpCall) -> float:
    """One FLOP for each place of the kernel."""
    return float(call.made.elements * math.prod(call.attributes["ksize"]))


def _average_pool_grad(call: OpCall) -> float:
    """One FLOP for each place of the kernel, for each element of the gradient."""
    return float(call.taken(1).elements * math.prod(call.attributes["ksize"]))


def _batch_norm(call: OpCall) -> float:
    """Scale and shift; in training also mean and variance."""
    return float((8 if call.attributes.get("is_training", True) else 2) * call.taken(0).elements)


def _einsum(call: OpCall) -> float:
    """A product over all combinations of indices."""
    return einsum_flop(
        call.attributes["equation"], [call.taken(index).shape for index in range(len(call.inputs))]
    )


def _cudnn_rnn(backward: float) -> Formula:
    """Each step of the input [steps, batch, size] times all weights, the fourth input."""
    return lambda call: backward * 2.0 * math.prod(call.taken(0).shape[:2]) * call.taken(3).elements


_FORMULAS: dict[str, Formula] = by_name(
    {
        _matmul: "matmul batchmatmul batchmatmulv2 batchmatmulv3",
        _conv: "conv2d conv3d",
        _conv_to_input: "conv2dbackpropinput conv3dbackpropinputv2",
        _conv_to_filter: "conv2dbackpropfilter conv3dbackpropfilterv2",
        _depthwise(lambda call: call.taken(1), lambda call: call.made): "depthwiseconv2dnative",
        _depthwise(lambda call: call.taken(1), lambda call: call.taken(2)): """
            depthwiseconv2dnativebackpropinput
        """,
        _depthwise(lambda call: call.made, lambda call: call.taken(2)): """
            depthwiseconv2dnativebackpropfilter
        """,
        _pool: "maxpool avgpool maxpool3d avgpool3d",
        _average_pool_grad: "avgpoolgrad",
        _batch_norm: "fusedbatchnorm fusedbatchnormv2 fusedbatchnormv3",
        _einsum: "einsum",
        _cudnn_rnn(1): "cudnnrnn cudnnrnnv2 cudnnrnnv3",
        _cudnn_rnn(2): "cudnnrnnbackprop cudnnrnnbackpropv2 cudnnrnnbackpropv3",
    }
)

COSTS = OpCosts(_FORMULAS, _MOVES, _GATHERS, SHAPE_ONLY, _ELEMENTWISE, _PER_INPUT)
