"""Control flow, sequences and given values of ONNX models, made in the test."""

import logging

import numpy as np
import pytest

from roost.errors import InputError, UnsupportedOp
from roost.frontends import _onnx_unroll
from roost.frontends.onnx import Onnx

onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

node = helper.make_node
BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64


def tensor(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def numbers(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def number(name, value, dtype=np.int64):
    return numpy_helper.from_array(np.array(value, dtype), name)


def body(nodes, inputs, outputs, weights=()):
    return helper.make_graph(nodes, "body", inputs, outputs, list(weights))


@pytest.fixture
def save(tmp_path):
    def saved(nodes, inputs, outputs, weights=(), opset=18):
        graph = helper.make_graph(nodes, "main", inputs, outputs, list(weights))
        imports = [helper.make_opsetid("", opset)]
        path = tmp_path / "model.onnx"
        path.write_bytes(
            helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
        )
        return path

    return saved


@pytest.mark.parametrize("placeholder", ["?", "-1", "unk__0", "unknown", "None", "*"])
def test_dimensions_without_a_true_name_may_differ(save, placeholder):
    nodes = [node("MatMul", ["a", "b"], ["y"])]
    inputs = [tensor("a", [placeholder, placeholder]), tensor("b", [placeholder, placeholder])]
    path = save(nodes, inputs, [tensor("y", None)])
    graph = Onnx().read(path, inputs={"a": (2, 3), "b": (3, 4)})
    assert graph.flop.tolist() == [0, 0, 48]
    with pytest.raises(InputError, match=r"not fixed: b \[\?, \?\]"):
        Onnx().read(path, inputs={"a": (3, 3)})


def choice(condition="c", **extra):
    """An `If` of a product with a weight of its own, or of a Relu and a Neg."""
    product = body(
        [node("MatMul", ["x", "w"], ["p"])],
        [],
        [tensor("p", [2, 2])],
        [numpy_helper.from_array(np.zeros((2, 2), np.float32), "w")],
    )
    chain = body([node("Relu", ["x"], ["r"]), node("Neg", ["r"], ["p"])], [], [tensor("p", [2, 2])])
    return node(
        "If", [condition], ["o"], name="choose", then_branch=product, else_branch=chain, **extra
    )


def test_an_if_with_a_constant_condition_is_its_branch(save):
    after = node("Sigmoid", ["o"], ["y"])
    for value, kinds in (
        (True, ("input", "parameter", "matmul", "sigmoid")),
        (False, ("input", "relu", "neg", "sigmoid")),
    ):
        path = save(
            [choice(), after], [tensor("x", [2, 2])], [tensor("y", [2, 2])],
            [number("c", value, bool)],
        )  # fmt: skip
        assert Onnx().read(path).kinds == kinds


def test_an_if_that_follows_from_a_shape_is_its_branch(save):
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["d"]),
        node("Equal", ["d", "two"], ["c"]),
        choice(),
    ]
    path = save(
        nodes, [tensor("x", ["n", 2])], [tensor("o", None)], [number("zero", 0), number("two", 2)]
    )
    assert Onnx().read(path, inputs={"x": (2, 2)}).kinds[-1] == "matmul"
    assert Onnx().read(path, inputs={"x": (3, 2)}).kinds[-1] == "neg"


def test_an_if_that_depends_on_an_input_takes_its_value(save, caplog):
    nodes = [node("Equal", ["rate", "expected"], ["c"]), choice()]
    inputs = [tensor("x", [2, 2]), tensor("rate", [], INT64)]
    path = save(nodes, inputs, [tensor("o", None)], [number("expected", 16000)])
    assert Onnx().read(path, inputs={"rate": np.array(16000)}).kinds[-1] == "matmul"
    assert Onnx().read(path, inputs={"rate": np.array(8000)}).kinds[-1] == "neg"
    assert Onnx().read(path, inputs={"c": np.array(True)}).kinds[-1] == "matmul"
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        assert Onnx().read(path).kinds[-1] == "neg"
    assert "node 'choose' (If) depends on data; Roost takes its else_branch" in caplog.text
    assert "--input c==true" in caplog.text


def test_a_value_has_the_shape_of_its_tensor(save):
    path = save([choice()], [tensor("x", [2, 2]), tensor("c", [], BOOL)], [tensor("o", None)])
    with pytest.raises(InputError, match=r"input 'c' is declared \[\]; \[2\] does not fit"):
        Onnx().read(path, inputs={"c": np.array([True, False])})
    bfloat16 = TensorProto.BFLOAT16
    path = save([node("Relu", ["x"], ["y"])], [tensor("x", [2], bfloat16)], [tensor("y", [2])])
    with pytest.raises(InputError, match=r"value of 'x' cannot be given.*bfloat16"):
        Onnx().read(path, inputs={"x": np.array([1.0, 2.0])})


def test_two_ifs_with_the_same_names_inside(save):
    second = node(
        "If", ["c"], ["y"], name="second",
        then_branch=body([node("Exp", ["o"], ["p"])], [], [tensor("p", None)]),
        else_branch=body([node("Neg", ["o"], ["p"])], [], [tensor("p", None)]),
    )  # fmt: skip
    path = save(
        [choice(), second], [tensor("x", [2, 2])], [tensor("y", None)], [number("c", False, bool)]
    )
    graph = Onnx().read(path)
    assert graph.op_names == ("x", "r", "p", "p@1")
    assert graph.kinds == ("input", "relu", "neg", "neg")


def loop_body(condition="going"):
    """Doubles the state, and gives each of them out."""
    return body(
        [
            node("Identity", [condition], ["still"]),
            node("Add", ["state", "state"], ["next"]),
            node("Neg", ["next"], ["row"]),
        ],
        [tensor("step", [], INT64), tensor("going", [], BOOL), tensor("state", [3])],
        [tensor("still", [], BOOL), tensor("next", [3]), tensor("row", [3])],
    )


def test_a_loop_of_known_length_is_written_out(save):
    loop = node("Loop", ["times", ""], ["last", "rows"], name="loop", body=loop_body())
    loop.input.append("x")
    path = save([loop], [tensor("x", [3])], [tensor("last", [3]), tensor("rows", None)],
                [number("times", 4)])  # fmt: skip
    graph = Onnx().read(path)
    assert graph.kinds.count("add") == 4
    assert graph.kinds.count("neg") == 4
    assert graph.output_bytes[graph.index_of("rows")] == 4 * 4 * 3


def test_a_loop_whose_length_depends_on_data_asks_for_it(save):
    loop = node("Loop", ["times", "", "x"], ["last", "rows"], name="loop", body=loop_body())
    inputs = [tensor("x", [3]), tensor("times", [], INT64)]
    path = save([loop], inputs, [tensor("last", [3])])
    with pytest.raises(UnsupportedOp, match=r"'loop' \(Loop\) depends on data.*--input times=="):
        Onnx().read(path)
    assert Onnx().read(path, inputs={"times": np.array(2)}).kinds.count("add") == 2


def test_a_loop_without_end_is_refused(save, monkeypatch):
    monkeypatch.setattr(_onnx_unroll, "MOST_PARTS", 300)
    loop = node("Loop", ["", "", "x"], ["last", "rows"], name="loop", body=loop_body())
    path = save([loop], [tensor("x", [3])], [tensor("last", [3])])
    with pytest.raises(UnsupportedOp, match=r"'loop' \(Loop\) makes more than 300 nodes"):
        Onnx().read(path)


def test_a_scan_is_written_out(save):
    step = body(
        [node("Add", ["sum", "x_t"], ["new"]), node("Identity", ["new"], ["y_t"])],
        [tensor("sum", [2]), tensor("x_t", [2])],
        [tensor("new", [2]), tensor("y_t", [2])],
    )
    scan = node("Scan", ["start", "x"], ["end", "y"], num_scan_inputs=1, body=step)
    outputs = [tensor("end", None), tensor("y", None)]
    graph = Onnx().read(save([scan], [tensor("start", [2]), tensor("x", [5, 2])], outputs))
    assert graph.kinds.count("add") == 5
    assert graph.flop.sum() == 5 * 2
    assert graph.output_bytes[graph.index_of("y")] == 4 * 10


@pytest.mark.parametrize("opset", [11, 18])
def test_sequences_are_lists_of_tensors(save, opset):
    nodes = [
        node("SplitToSequence", ["x", "two"], ["pieces"], axis=0),
        node("SequenceAt", ["pieces", "last"], ["piece"]),
        node("Exp", ["piece"], ["e"]),
        node("SequenceInsert", ["pieces", "e"], ["more"]),
        node("SequenceErase", ["more", "zero"], ["fewer"]),
        node("SequenceLength", ["fewer"], ["length"]),
        node("ConcatFromSequence", ["fewer"], ["y"], axis=0),
    ]
    path = save(
        nodes, [tensor("x", [5, 3])], [tensor("y", None), tensor("length", [], INT64)],
        [number("two", 2), number("last", -1), number("zero", 0)], opset,
    )  # fmt: skip
    graph = Onnx().read(path)
    assert graph.output_bytes[graph.index_of("y")] == 4 * (2 + 1 + 1) * 3
    assert {"split", "exp", "concat"} <= set(graph.kinds)


def test_a_sequence_may_be_the_output(save):
    nodes = [node("Relu", ["x"], ["r"]), node("SequenceConstruct", ["x", "r"], ["s"])]
    output = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [4])
    assert Onnx().read(save(nodes, [tensor("x", [4])], [output])).kinds == ("input", "relu")


def test_an_input_that_is_a_sequence_is_refused(save):
    taken = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [4])
    nodes = [node("SequenceLength", ["s"], ["y"])]
    with pytest.raises(UnsupportedOp, match=r"input 's' is not a tensor but a sequence"):
        Onnx().read(save(nodes, [taken], [tensor("y", [], INT64)]))


def test_an_optional_input_counts_as_present(save):
    tensor_type = helper.make_tensor_type_proto(TensorProto.FLOAT, [4])
    taken = helper.make_value_info("x", helper.make_optional_type_proto(tensor_type))
    nodes = [
        node("OptionalHasElement", ["x"], ["c"]),
        node("OptionalGetElement", ["x"], ["t"]),
        node("Relu", ["t"], ["y"]),
    ]
    path = save(nodes, [taken], [tensor("y", [4]), tensor("c", [], BOOL)])
    assert Onnx().read(path).kinds[:2] == ("input", "parameter")


@pytest.mark.parametrize(
    "broken",
    [
        node("Loop", ["x"], ["y"]),
        node("If", ["x"], ["y"]),
        node("Scan", ["x"], ["y"], num_scan_inputs=3),
        node("SequenceAt", ["x", "x"], ["y"]),
        node("SplitToSequence", ["x"], ["y"], axis=7),
        node("ConcatFromSequence", [], ["y"]),
        node("SequenceMap", ["x"], ["y"]),
    ],
    ids=lambda broken: broken.op_type,
)
def test_damaged_control_flow_is_refused(save, broken):
    with pytest.raises(InputError, match=r"model\.onnx: node 'y'"):
        Onnx().read(save([broken], [tensor("x", [2])], [tensor("y", None)]))


@pytest.mark.parametrize("word", [b"Relu", b"inner", b"outer", b"doc", b"axes"])
def test_text_that_is_not_utf8_is_refused_or_unread(save, word):
    nodes = [
        node("Relu", ["x"], ["inner"], name="outer", doc_string="doc"),
        node("ReduceSum", ["inner", "axes"], ["y"]),
    ]
    path = save(nodes, [tensor("x", [4])], [tensor("y", None)], [numbers("axes", 0)])
    path.write_bytes(path.read_bytes().replace(word, b"\xff\xfe" + word[2:]))
    if word == b"doc":  # nothing reads it
        assert Onnx().read(path).kinds[1] == "relu"
    else:
        with pytest.raises(InputError, match=r"model\.onnx: .*(not UTF-8|not an ONNX model)"):
            Onnx().read(path)
