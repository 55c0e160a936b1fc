"""ONNX models, made in the test, to graphs; FLOP and bytes are worked out by hand."""

import logging
import subprocess
import sys
import warnings

import numpy as np
import pytest

import roost
from roost.errors import InputError, MissingExtra, UnknownName
from roost.frontends.onnx import Onnx

onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def tensor(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def weight(name, *shape, dtype=np.float32):
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def numbers(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


@pytest.fixture
def save(tmp_path):
    def saved(nodes, inputs, outputs, initializers=(), opset=18, domains=(), **settings):
        graph = helper.make_graph(nodes, "main", inputs, outputs, list(initializers), **settings)
        imports = [
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(domain, 1) for domain in domains),
        ]
        path = tmp_path / "model.onnx"
        path.write_bytes(
            helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
        )
        return path

    return saved


def op(graph, name):
    """The figures of one op, for comparison."""
    i = graph.index_of(name)
    return {
        "kind": graph.kinds[i],
        "inputs": [graph.op_names[j] for j in graph.inputs_of(i)],
        "flop": graph.flop[i],
        "read": graph.bytes_read[i],
        "written": graph.bytes_written[i],
        "output": graph.output_bytes[i],
    }


def conv_net(batch):
    """Conv, Relu, Flatten, Gemm: [batch, 3, 8, 8] to [batch, 10]."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="/features/conv1/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="/features/relu/Relu"),
        node("Flatten", ["r"], ["f"], name="/Flatten"),
        node("Gemm", ["f", "fc.weight", "fc.bias"], ["y"], name="/fc/Gemm", transB=1),
    ]
    weights = [
        weight("w", 4, 3, 3, 3),
        weight("b", 4),
        weight("fc.weight", 10, 256),
        weight("fc.bias", 10),
    ]
    return nodes, [tensor("x", [batch, 3, 8, 8])], [tensor("y", [batch, 10])], weights


def test_figures_of_a_conv_net(save):
    graph = Onnx().read(save(*conv_net(2)))
    assert graph.name == "model"
    names = [
        "x",
        "w",
        "b",
        "fc.weight",
        "fc.bias",
        "/features/conv1/Conv",
        "/features/relu/Relu",
        "/fc/Gemm",
    ]
    assert list(graph.op_names) == names  # a flatten is a view
    assert op(graph, "/features/conv1/Conv") == {
        "kind": "conv",
        "inputs": ["x", "w", "b"],
        "flop": 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3),
        "read": 4 * (2 * 3 * 64 + 4 * 27 + 4),
        "written": 4 * 2 * 4 * 64,
        "output": 4 * 2 * 4 * 64,
    }
    assert op(graph, "/features/relu/Relu")["flop"] == 2 * 4 * 64
    gemm = op(graph, "/fc/Gemm")
    assert gemm["inputs"] == ["/features/relu/Relu", "fc.weight", "fc.bias"]
    assert gemm["flop"] == 2 * 2 * 256 * 10
    assert graph.output_bytes[graph.is_parameter].tolist() == [4 * 108, 16, 4 * 2560, 40]
    assert graph.modules[3:] == ("fc", "fc", "features.conv1", "features.relu", "fc")
    assert set(graph.dtypes) == {"float32"}


def test_a_graph_that_was_read_simulates(save):
    graph = Onnx().read(save(*conv_net(2)))
    problem = roost.estimate(graph, roost.cluster("k80x2"))
    alone = roost.simulate(problem, roost.Placement(np.full(graph.num_ops, 1)))
    split = roost.simulate(problem, roost.Placement(np.array([1, 1, 1, 2, 2, 1, 1, 2])))
    assert alone.feasible
    assert split.num_transfers == 1  # what the relu makes
    assert split.step_time > alone.step_time


def test_reading_twice_gives_the_same_graph(save):
    path = save(*conv_net(2))
    assert Onnx().read(path).digest == Onnx().read(str(path)).digest
    assert Onnx().read(path, name="net").name == "net"


def test_open_shapes_must_be_given(save):
    nodes, _, outputs, weights = conv_net("batch")
    path = save(nodes, [tensor("x", ["batch", 3, None, 8])], outputs, weights)
    with pytest.raises(
        InputError, match=r"model.onnx: .*not fixed: x \[batch, 3, \?, 8\]; .*--input x=1,3,1,8"
    ):
        Onnx().read(path)
    graph = Onnx().read(path, inputs={"x": (5, 3, 8, 8)})
    assert graph.flop[graph.index_of("/fc/Gemm")] == 2 * 5 * 256 * 10


def test_shapes_that_the_file_declares_for_another_batch_are_not_believed(save):
    nodes, inputs, _, weights = conv_net("batch")
    path = save(
        nodes, inputs, [tensor("y", [1, 10])], weights, value_info=[tensor("c", [1, 4, 8, 8])]
    )
    graph = Onnx().read(path, inputs={"x": (5, 3, 8, 8)})
    assert op(graph, "/features/conv1/Conv")["output"] == 4 * 5 * 4 * 64


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": (5, 3, 8)}, r"input 'x' is declared \[batch, 3, 8, 8\]; \[5, 3, 8\] does not fit"),
        ({"x": (5, 4, 8, 8)}, r"\[5, 4, 8, 8\] does not fit"),
        ({"x": (-1, 3, 8, 8)}, "none below 0"),
        ({"x": "5,3"}, "list of whole numbers"),
        ({"x": 5}, "list of whole numbers"),
        ({"X": (5, 3, 8, 8)}, "no input of .*model.onnx called 'X'"),
        ({"xs": (5, 3, 8, 8)}, "did you mean 'x'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(save, inputs, message):
    with pytest.raises(InputError, match=message):
        Onnx().read(save(*conv_net("batch")), inputs=inputs)


def test_a_named_dimension_is_given_once(save):
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    path = save(nodes, [tensor("a", ["n", 4]), tensor("b", ["n", 1])], [tensor("y", ["n", 4])])
    graph = Onnx().read(path, inputs={"a": (3, 4)})
    assert graph.output_bytes.tolist() == [48, 12, 48]
    with pytest.raises(InputError, match="dimension 'n' is 3 in one input and 2 in 'b'"):
        Onnx().read(path, inputs={"a": (3, 4), "b": (2, 1)})


def test_an_initializer_used_twice_is_one_parameter(save):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    # An initializer may be listed among the inputs too.
    inputs = [tensor("x", [2, 4]), tensor("w", [4, 4])]
    graph = Onnx().read(
        save(nodes, inputs, [tensor("y", [2, 4])], [weight("w", 4, 4), weight("unused", 9)])
    )
    # Nodes without a name are called after what they make.
    assert graph.op_names == ("x", "w", "h", "y")
    assert graph.consumers_of(1).tolist() == [2, 3]
    assert graph.flop.tolist() == [0, 0, 64, 64]


def test_external_data_is_never_opened(save, tmp_path):
    outside = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[1024, 1024])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="nowhere.bin")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    bfloat16 = TensorProto.BFLOAT16
    graph = Onnx().read(
        save(
            nodes, [tensor("x", [1, 1024], bfloat16)], [tensor("y", [1, 1024], bfloat16)], [outside]
        )
    )
    assert graph.output_bytes.tolist() == [2048, 2 * 2**20, 2048]
    assert graph.dtypes[2] == "bfloat16"
    assert not (tmp_path / "nowhere.bin").exists()


def test_a_shape_in_external_data_is_asked_for(save):
    outside = TensorProto(
        name="shape", data_type=TensorProto.INT64, dims=[2], data_location=TensorProto.EXTERNAL
    )
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    path = save(nodes, [tensor("x", [6])], [tensor("y", None)], [outside])
    with pytest.raises(
        InputError, match=r"shape of 'r', made by node 'r' .Reshape., is in 'shape'.*--input r="
    ):
        Onnx().read(path)
    assert Onnx().read(path, inputs={"r": (2, 3)}).flop.tolist() == [0, 6]


def test_an_lstm_multiplies_by_all_its_weights_at_every_step(save):
    node = helper.make_node(
        "LSTM",
        ["x", "w", "r"],
        ["y", "h", ""],
        name="lstm",
        hidden_size=5,
        direction="bidirectional",
    )
    path = save(
        [node],
        [tensor("x", [7, 2, 3])],
        [tensor("h", [2, 2, 5])],
        [weight("w", 2, 20, 3), weight("r", 2, 20, 5)],
    )
    graph = Onnx().read(path)
    assert op(graph, "lstm") == {
        "kind": "lstm",
        "inputs": ["x", "w", "r"],
        "flop": 2 * (7 * 2) * 2 * 20 * (3 + 5),
        "read": 4 * (42 + 120 + 200),
        "written": 4 * 20,  # nobody reads y
        "output": 4 * 20,
    }


def test_consumers_are_sent_only_the_outputs_they_use(save):
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["a", "b", "c"], name="split", axis=1),
        helper.make_node("Relu", ["a"], ["ra"]),
        helper.make_node("Relu", ["b"], ["rb"]),
    ]
    outputs = [tensor("ra", [2, 1]), tensor("rb", [2, 2])]
    graph = Onnx(fold=True).read(
        save(nodes, [tensor("x", [2, 6])], outputs, [numbers("sizes", 1, 2, 3)])
    )
    assert graph.op_names == ("x", "split", "split/0", "split/1", "ra", "rb")
    assert graph.output_bytes.tolist() == [48, 0, 8, 16, 8, 16]
    assert graph.workspace_bytes[1] == 8 + 16  # nobody reads c
    assert graph.group.tolist() == [-1, 0, 0, 0, -1, -1]
    assert [graph.op_names[i] for i in (*graph.inputs_of(4), *graph.inputs_of(5))] == [
        "split/0",
        "split/1",
    ]

    problem = roost.estimate(graph, roost.cluster("k80x2"))
    assert (problem.costs.op_time[2:4] == 0).all()
    timeline = roost.simulate(problem, roost.Placement(np.array([1, 1, 1, 1, 1, 2])), full=True)
    assert timeline.num_transfers == 1


def test_shape_computations_are_followed(save):
    """Halves the second dimension by way of Shape, Gather, Div and Concat, as exporters write
    it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["d"], axis=0),
        helper.make_node("Div", ["d", "two"], ["h"]),
        helper.make_node("Concat", ["minus", "h"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["r"]),
        helper.make_node("Relu", ["r"], ["y"]),
        helper.make_node("Expand", ["h", "four"], ["e"]),
        helper.make_node("Slice", ["y", "zero", "h", "one"], ["z"]),
    ]
    constants = [
        numbers(name, value)
        for name, value in (("zero", 0), ("one", 1), ("two", 2), ("four", 4), ("minus", -1))
    ]
    path = save(
        nodes,
        [tensor("x", ["n", 6])],
        [tensor("z", None), tensor("e", None, TensorProto.INT64)],
        constants,
    )
    kept = Onnx(fold=False).read(path, inputs={"x": (2, 6)})
    assert op(kept, "s") == {
        "kind": "shape",
        "inputs": [],
        "flop": 0,
        "read": 0,
        "written": 16,
        "output": 16,
    }
    assert "t" not in kept.op_names  # only a view needed it
    assert op(kept, "z")["inputs"] == ["y", "zero", "h", "one"]
    folded = Onnx().read(path, inputs={"x": (2, 6)})
    assert folded.op_names == ("x", "y", "e", "z")
    assert op(folded, "z") == {
        "kind": "slice", "inputs": ["y"], "flop": 0, "read": 48 + 24, "written": 48, "output": 48,
    }  # fmt: skip


def test_a_shape_that_depends_on_data_is_asked_for(save):
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"], name="find"),
        helper.make_node("Transpose", ["n"], ["y"]),
    ]
    path = save(nodes, [tensor("x", [4, 4])], [tensor("y", None, TensorProto.INT64)])
    with pytest.raises(
        InputError,
        match=r"shape of 'n', made by node 'find' \(NonZero\), does not follow.*--input n=",
    ):
        Onnx().read(path)
    graph = Onnx().read(path, inputs={"n": (2, 7)})
    assert graph.output_bytes.tolist() == [64, 112, 112]
    assert graph.dtypes == ("float32", "int64", "int64")


def test_an_embedding_reads_only_the_rows_it_takes(save):
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    inputs, outputs = [tensor("ids", [3], TensorProto.INT64)], [tensor("y", [3, 8])]
    graph = Onnx().read(save(nodes, inputs, outputs, [weight("table", 1000, 8)]))
    assert op(graph, "y")["read"] == 3 * 8 * 4 + 3 * 8


def single(save, op_type, shapes, outputs=1, domain="", opset=23, dtypes=None, **attributes):
    """The graph of one node whose inputs are all inputs of the model."""
    names = [f"i{n}" if shape is not None else "" for n, shape in enumerate(shapes)]
    dtypes = dtypes or [TensorProto.FLOAT] * len(shapes)
    inputs = [tensor(name, s, d) for name, s, d in zip(names, shapes, dtypes, strict=True) if name]
    made = [f"o{n}" for n in range(outputs)]
    node = helper.make_node(op_type, names, made, name="node", domain=domain, **attributes)
    domains = [domain] if domain else []
    return save([node], inputs, [tensor(name, None) for name in made], opset=opset, domains=domains)


MICROSOFT = {"domain": "com.microsoft"}
I8, U8 = TensorProto.INT8, TensorProto.UINT8
F32 = TensorProto.FLOAT
SCALAR = []


@pytest.mark.parametrize(
    ("op_type", "shapes", "settings", "flop"),
    [
        ("MatMul", [[3, 4, 5], [5, 6]], {}, 2 * 3 * 4 * 5 * 6),
        ("MatMul", [[5], [5]], {}, 2 * 5),
        ("Gemm", [[5, 4], [5, 6]], {"transA": 1}, 2 * 4 * 5 * 6),
        ("Conv", [[1, 4, 9], [6, 2, 3]], {"group": 2}, 2 * 6 * 7 * 2 * 3),
        ("Conv", [[1, 4, 9, 9], [6, 4, 3, 3]], {"strides": [2, 2]}, 2 * 6 * 16 * 4 * 9),
        ("ConvTranspose", [[1, 4, 5, 5], [4, 6, 2, 2]], {"strides": [2, 2]}, 2 * 4 * 25 * 6 * 4),
        ("GRU", [[7, 2, 3], [1, 15, 3], [1, 15, 5]], {"hidden_size": 5}, 2 * 14 * 15 * 8),
        ("RNN", [[7, 2, 3], [1, 5, 3], [1, 5, 5]], {"hidden_size": 5}, 2 * 14 * 5 * 8),
        ("Einsum", [[2, 3, 4], [2, 4, 5]], {"equation": "bij, bjk -> bik"}, 2 * 2 * 3 * 4 * 5),
        ("Einsum", [[7, 2, 3], [3, 5]], {"equation": "...ij,jk"}, 2 * 7 * 2 * 3 * 5),
        ("Einsum", [[2], [3]], {"equation": "i,j->ij"}, 6),
        ("Einsum", [[2, 3]], {"equation": "ij->ji"}, 0),
        ("Attention", [[2, 4, 6, 8], [2, 4, 7, 8], [2, 4, 7, 9]], {}, 2 * 2 * 4 * 6 * 7 * (8 + 9)),
        (
            "Attention",
            [[2, 6, 32], [2, 7, 16], [2, 7, 20]],
            {"q_num_heads": 4, "kv_num_heads": 2},
            2 * 2 * 4 * 6 * 7 * (8 + 10),
        ),
        (
            "LinearAttention",
            [[2, 6, 32], [2, 6, 16], [2, 6, 20], None, [2, 6, 2], [2, 6, 2]],
            {"q_num_heads": 4, "kv_num_heads": 2, "opset": 27, "outputs": 2},
            2 * 2 * 6 * (8 * 10) * (4 + 2 * 2),
        ),
        (
            "CausalConvWithState",
            [[2, 6, 9], [6, 1, 4]],
            {"opset": 27, "outputs": 2},
            2 * 2 * 6 * 9 * 4,
        ),
        ("DFT", [[3, 16, 1]], {"opset": 20}, 2.5 * 3 * 16 * 4),
        ("DFT", [[3, 16, 2]], {"opset": 20}, 5 * 3 * 16 * 4),
        ("GridSample", [[1, 2, 8, 8], [1, 4, 4, 2]], {}, 2 * 32 * 4),
        ("GridSample", [[1, 2, 8, 8], [1, 4, 4, 2]], {"mode": "nearest"}, 2 * 32),
        ("MaxPool", [[1, 2, 8, 8]], {"kernel_shape": [2, 2], "strides": [2, 2]}, 2 * 16 * 4),
        ("GlobalAveragePool", [[1, 2, 8, 8]], {}, 128),
        ("Softmax", [[2, 10]], {}, 5 * 20),
        ("ReduceMean", [[2, 10]], {}, 20),
        ("LayerNormalization", [[2, 10], [10]], {}, 8 * 20),
        ("GroupNormalization", [[2, 4, 3], [4], [4]], {"num_groups": 2}, 8 * 24),
        ("Add", [[2, 1], [1, 3]], {}, 6),
        ("Transpose", [[2, 3]], {}, 0),
        ("MatMulInteger", [[2, 3], [3, 4]], {"dtypes": [U8, I8]}, 48),
        (
            "QLinearMatMul",
            [[2, 3], SCALAR, SCALAR, [3, 4], SCALAR, SCALAR, SCALAR, SCALAR],
            {"dtypes": [U8, F32, U8, I8, F32, I8, F32, U8]},
            48,
        ),
        (
            "QLinearConv",
            [[1, 4, 9], SCALAR, SCALAR, [6, 4, 3], SCALAR, SCALAR, SCALAR, SCALAR],
            {"dtypes": [U8, F32, U8, I8, F32, I8, F32, U8]},
            2 * 6 * 7 * 12,
        ),
        (
            "Attention",
            [[2, 6, 32], [32, 96], [96]],
            {"num_heads": 4, **MICROSOFT},
            2 * 12 * 32 * (96 + 2 * 6),
        ),
        (
            "MultiHeadAttention",
            [[2, 6, 32], [2, 7, 32], [2, 7, 40]],
            {"num_heads": 4, **MICROSOFT},
            2 * 12 * 7 * 72,
        ),
        (
            "GroupQueryAttention",
            [[2, 6, 32], [2, 6, 16], [2, 6, 16], [2, 2, 5, 8], [2, 2, 5, 8]],
            {"num_heads": 4, "kv_num_heads": 2, "outputs": 3, **MICROSOFT},
            4 * 2 * 6 * 11 * 32,
        ),
        (
            "MatMulNBits",
            [[2, 6, 64], [48, 2, 16], [96]],
            {"K": 64, "N": 48, "bits": 4, "block_size": 32, "dtypes": [F32, U8, F32], **MICROSOFT},
            2 * 12 * 64 * 48,
        ),
        (
            "DynamicQuantizeLSTM",
            [[7, 2, 3], [2, 3, 20], [2, 5, 20]],
            {
                "hidden_size": 5,
                "direction": "bidirectional",
                "outputs": 3,
                "dtypes": [F32, I8, I8],
                **MICROSOFT,
            },
            2 * 14 * 2 * 20 * 8,
        ),
        (
            "FusedMatMul",
            [[2, 5, 4], [2, 6, 5]],
            {"transA": 1, "transB": 1, **MICROSOFT},
            2 * 2 * 4 * 5 * 6,
        ),
        (
            "FusedConv",
            [[1, 4, 9], [6, 4, 3], [6], [1, 6, 7]],
            {"activation": "Relu", **MICROSOFT},
            2 * 6 * 7 * 12,
        ),
        ("SkipLayerNormalization", [[2, 6, 32], [2, 6, 32], [32]], {**MICROSOFT}, 9 * 384),
        ("BiasGelu", [[2, 32], [32]], {**MICROSOFT}, 64),
    ],
)
def test_flop_by_hand(save, op_type, shapes, settings, flop):
    path = single(save, op_type, shapes, **settings)
    graph = Onnx().read(path)
    assert graph.flop[graph.index_of("node")] == flop
    assert Onnx().coverage(path).unknown_kinds == ()


def test_quantised_products_compute_in_eight_bits(save):
    graph = Onnx().read(single(save, "MatMulInteger", [[2, 3], [3, 4]], dtypes=[U8, I8]))
    assert graph.dtypes == ("uint8", "int8", "int8")
    assert graph.output_bytes.tolist() == [6, 12, 4 * 8]


def test_four_bits_take_half_a_byte(save):
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    packed = TensorProto(name="w", data_type=TensorProto.INT4, dims=[3, 5], raw_data=bytes(8))
    graph = Onnx().read(
        save(
            nodes, [tensor("x", [1, 3])], [tensor("y", [1, 5])], [packed, weight("scale")], opset=21
        )
    )
    assert graph.output_bytes[graph.index_of("w")] == 8


def test_an_unknown_op_is_counted_and_named(save, caplog):
    nodes = [
        helper.make_node("Mystery", ["x"], ["m"], name="odd", domain="my.ops"),
        helper.make_node("MatMul", ["m", "w"], ["y"]),
    ]
    inputs, outputs, weights = [tensor("x", ["n", 4])], [tensor("y", ["n", 8])], [weight("w", 4, 8)]
    path = save(
        nodes, inputs, outputs, weights, domains=["my.ops"], value_info=[tensor("m", ["n", 4])]
    )
    with caplog.at_level(logging.INFO):
        graph = Onnx().read(path, inputs={"x": (2, 4)})
    assert "costs are guessed for my.ops.mystery" in caplog.text
    assert op(graph, "odd")["kind"] == "my.ops.mystery"
    assert op(graph, "odd")["flop"] == 8
    coverage = Onnx().coverage(path, inputs={"x": (2, 4)})
    assert coverage.unknown_kinds == ("my.ops.mystery",)
    assert coverage.flop_by_formula == 128 / 136
    assert coverage.ops_by_formula == 0.5
    assert coverage.bytes_by_formula == 224 / 288


def test_an_unknown_op_of_unknown_shape_is_asked_for(save):
    path = single(save, "Mystery", [[2]], domain="my.ops")
    with pytest.raises(InputError, match=r"shape of 'o0', made by node 'node' .Mystery."):
        Onnx().read(path)
    assert Onnx().read(path, inputs={"o0": (3,)}).output_bytes.tolist() == [8, 12]


def test_functions_of_the_model_are_inlined(tmp_path):
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m"]), helper.make_node("Relu", ["m"], ["c"])]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my.ops", 1)]
    function = helper.make_function("my.ops", "Layer", ["a", "b"], ["c"], nodes, imports)
    call = helper.make_node("Layer", ["x", "w"], ["y"], domain="my.ops")
    graph = helper.make_graph(
        [call], "main", [tensor("x", [2, 3])], [tensor("y", [2, 4])], [weight("w", 3, 4)]
    )
    path = tmp_path / "functions.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=imports, functions=[function]).SerializeToString()
    )
    assert Onnx().read(path).kinds == ("input", "parameter", "matmul", "relu")


def test_dropout_outside_training_is_no_op(save):
    nodes = [helper.make_node("Dropout", ["x"], ["d"]), helper.make_node("Relu", ["d"], ["y"])]
    assert Onnx().read(save(nodes, [tensor("x", [4])], [tensor("y", [4])])).op_names == ("x", "y")


def test_names_that_repeat_are_numbered(save):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="x"),
        helper.make_node("Relu", ["a"], ["y"], name="x"),
    ]
    assert Onnx().read(save(nodes, [tensor("x", [4])], [tensor("y", [4])])).op_names == (
        "x",
        "x#2",
        "x#3",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is not a model, only text\n", "is not an ONNX model, or not a whole one"),
        (b"", "is not an ONNX model, or not a whole one"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer.*git lfs pull",
        ),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, content, message):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"model.onnx: {message}"):
        Onnx().read(path)


def test_a_file_cut_short_anywhere_is_refused(save):
    path = save(*conv_net(2))
    whole = path.read_bytes()
    for length in (*range(1, len(whole) - 1, 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"model\.onnx: "):
            Onnx().read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Onnx().read(tmp_path / "missing.onnx")
    with pytest.raises(InputError, match="is a directory"):
        Onnx().read(tmp_path)


def test_an_opset_of_the_future_is_refused(save):
    path = save(*conv_net(2), opset=999)
    with pytest.raises(
        InputError, match=r"opset 999; the onnx installed here reads 1 to .*pip install -U onnx"
    ):
        Onnx().read(path)


def test_an_op_that_the_opset_lacks_is_refused(save):
    with pytest.raises(
        InputError, match=r"opset 13 has no op called 'Mish' \(node 'node' \(Mish\)\)"
    ):
        Onnx().read(single(save, "Mish", [[2]], opset=13))


def test_shapes_that_do_not_fit_an_op_are_refused(save):
    with pytest.raises(
        InputError,
        match=r"node 'node' \(MatMul\) does not fit its inputs \(i0 \[2, 3\], i1 \[4, 5\]\)",
    ):
        Onnx().read(single(save, "MatMul", [[2, 3], [4, 5]]))
    with pytest.raises(
        InputError, match=r"node 'node' \(MatMulNBits\) does not fit its inputs: KeyError"
    ):
        Onnx().read(single(save, "MatMulNBits", [[2, 3], [4, 5]], **MICROSOFT))


def test_a_tensor_that_nothing_makes_is_refused(save):
    nodes = [helper.make_node("Relu", ["ghost"], ["y"])]
    with pytest.raises(
        InputError, match=r"node 'y' \(Relu\) takes 'ghost', which no node before it makes"
    ):
        Onnx().read(save(nodes, [tensor("x", [4])], [tensor("y", [4])]))


def test_without_onnx_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"pip install 'roost\[onnx\]'"):
        Onnx().read(tmp_path / "model.onnx")


def test_importing_the_front_end_does_not_import_onnx():
    code = "import sys, roost.frontends.onnx; assert 'onnx' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def exported(model, inputs, path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, path, dynamo=True, verbose=False)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(*inputs)
    return Onnx().read(path), counter.get_total_flops()


def test_linear_layers_exported_by_torch_have_its_flop(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)
    ).eval()
    graph, flop = exported(model, (torch.zeros(4, 256),), tmp_path / "linear.onnx")
    assert graph.flop.sum() == pytest.approx(flop, rel=0.01)
    assert graph.output_bytes[graph.is_parameter].sum() == 4 * (256 * 512 + 512 + 512 * 128 + 128)
    assert set(graph.modules) >= {"0", "1", "2"}


def test_a_conv_net_exported_by_torch_has_its_flop(tmp_path):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    layers = (
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
    )
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    graph, flop = exported(model, (torch.zeros(2, 3, 32, 32),), tmp_path / "conv.onnx")
    products = np.isin(graph.kinds, ("conv", "gemm", "matmul"))
    assert graph.flop[products].sum() == flop
    # relu, pools: counted here, and not there
    assert graph.flop.sum() == pytest.approx(flop, rel=0.02)


def test_unknown_names_are_of_their_own_type(save):
    with pytest.raises(UnknownName):
        Onnx().read(save(*conv_net(2)), inputs={"y_hat": (1,)})
