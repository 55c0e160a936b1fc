"""Capturing PyTorch models."""

import json

import numpy as np
import pytest
import torch
from small_models import Everything, convolutions, decides_by_value, everything
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import roost
from roost.core.graph import PHASES
from roost.errors import InputError, UnknownName, UnsupportedOp
from roost.frontends.torch import Torch, capture, step_of
from support.numerics import compare_with_eager

MODELS = {"everything": everything, "convolutions": convolutions}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_gives_the_numbers_of_the_model(name, train):
    model, inputs = MODELS[name]()
    inputs = inputs if train else inputs[:1]
    differences = compare_with_eager(model, inputs, train=train)
    # nn.LSTM itself runs a fused kernel in eager mode; everything else is the same kernels, to the
    # last bit.
    close = 1e-5 if name == "everything" else 0
    assert all(difference <= close for difference in differences.values()), differences
    if train:
        assert any(name.endswith("running_mean") for name in differences)
        assert sum(name.startswith("gradient of") for name in differences) == len(
            list(model.parameters())
        )


def test_tied_weights_are_one_parameter():
    graph = capture(*everything(), train=True)
    assert "embed.weight" in graph.op_names
    assert "head.weight" not in graph.op_names
    users = {graph.kinds[op] for op in graph.consumers_of(graph.index_of("embed.weight"))}
    assert {"embedding", "mm", "sgd"} <= users


def test_every_parameter_buffer_and_constant_is_resident_once():
    model, inputs = everything()
    graph = capture(model, inputs, train=True)
    resident = {
        graph.op_names[op]: int(graph.output_bytes[op]) for op in np.flatnonzero(graph.is_parameter)
    }
    expected = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    expected |= {name: b.numel() * b.element_size() for name, b in model.named_buffers()}
    expected["constant"] = 12
    assert resident == expected


def test_views_are_no_ops():
    kinds = set(capture(*everything(), train=True).kinds)
    assert not kinds & {
        "view",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "detach",
        "select",
        "expand",
        "_unsafe_view",
    }


def test_attention_is_one_op_and_one_backward_op():
    graph = capture(*everything(), train=True)
    assert graph.kinds.count("attention") == 1
    assert graph.kinds.count("attention_backward") == 1
    op = graph.kinds.index("attention")
    assert graph.flop[op] == 2 * 2 * 4 * 10 * 10 * (8 + 8)


def test_every_op_knows_its_phase_and_nearly_all_their_module():
    graph = capture(*convolutions(), train=True)
    phases = {PHASES[phase] for phase in graph.phase}
    assert phases == set(PHASES)
    for op in range(graph.num_ops):
        if graph.kinds[op].startswith("convolution"):
            assert graph.modules[op] in ("first", "second")
        if graph.kinds[op] == "convolution_backward":
            assert PHASES[graph.phase[op]] == "backward"


def test_an_op_with_several_outputs_sends_each_where_it_is_needed():
    graph = capture(*convolutions(), train=True)
    op = next(
        i
        for i in range(graph.num_ops)
        if graph.kinds[i] == "convolution_backward" and graph.modules[i] == "second"
    )
    outputs = [consumer for consumer in graph.consumers_of(op) if graph.kinds[consumer] == "output"]
    assert graph.output_bytes[op] == 0
    assert len(outputs) == 3  # with regard to the input, the weight and the bias
    assert {graph.group[op], *graph.group[outputs]} == {graph.group[op]}
    assert graph.group[op] >= 0
    assert graph.output_bytes[outputs].sum() == graph.workspace_bytes[op]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_one_update_for_each_parameter_with_its_states(optimizer):
    model, inputs = convolutions()
    graph = capture(model, inputs, train=True, optimizer=optimizer)
    updates = [op for op in range(graph.num_ops) if graph.kinds[op] == optimizer]
    assert len(updates) == len(list(model.parameters()))
    states = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}[optimizer]
    for op in updates:
        read = [source for source in graph.inputs_of(op) if graph.is_parameter[source]]
        assert len(read) == 1 + states
        assert len(graph.inputs_of(op)) == 2 + states


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_flop_are_those_that_pytorch_counts(name, train):
    model, inputs = MODELS[name]()
    inputs = inputs if train else inputs[:1]
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        result = model(*inputs)
        if train:
            result.backward()
    graph = capture(model, inputs, train=train)
    counted = ("mm", "addmm", "bmm", "convolution", "convolution_backward")
    flop = sum(flop for kind, flop in zip(graph.kinds, graph.flop, strict=True) if kind in counted)
    assert flop == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_backward_of_a_grouped_convolution_is_twice_its_forward():
    # PyTorch's own counter forgets the groups here, and counts nine times the forward.
    model = nn.Conv2d(16, 16, 3, groups=8)
    graph = capture(
        model, torch.randn(2, 16, 9, 9, requires_grad=True), train=True, loss=lambda y: y.sum()
    )
    forward = graph.flop[graph.kinds.index("convolution")]
    assert forward == 2 * 2 * 7 * 7 * 16 * 2 * 9
    # The input needs no gradient: only the weight's is wanted.
    assert graph.flop[graph.kinds.index("convolution_backward")] == forward


def test_the_same_call_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        capture(*everything(), train=True).save(tmp_path / f"{name}.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_model_on_the_meta_device_gives_the_same_graph():
    real = capture(*everything(), train=True)
    with torch.device("meta"):
        model = Everything()
        inputs = (torch.zeros(2, 10, dtype=torch.int64), torch.zeros(2, 10, dtype=torch.int64))
    assert capture(model, inputs, train=True).digest == real.digest


def test_capture_changes_nothing_in_the_model():
    model, inputs = convolutions()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, inputs, train=True)
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_are_not_updated():
    model, inputs = convolutions()
    model.first.weight.requires_grad_(False)
    graph = capture(model, inputs, train=True)
    assert "first.weight:update" not in graph.op_names
    assert "second.weight:update" in graph.op_names


def test_a_loss_given_apart():
    model, (images, _) = convolutions()
    graph = capture(model, images, train=True, loss=lambda scores: scores.square().mean())
    assert "head.weight:update" in graph.op_names


def test_dropout_is_an_op_with_its_mask():
    graph = capture(*everything(dropout=0.5), train=True)
    assert "native_dropout" in graph.kinds
    assert "native_dropout" not in capture(*everything(dropout=0.5), train=False).kinds


def test_a_captured_graph_can_be_placed_and_simulated():
    problem = roost.estimate(capture(*convolutions(), train=True), roost.cluster("k80x2"))
    timeline = roost.simulate(problem, roost.Placement(np.full(problem.graph.num_ops, 1)))
    assert timeline.feasible
    assert timeline.step_time > 0


def test_coverage_says_what_is_counted_by_formula():
    coverage = step_of(*convolutions(), train=True).coverage
    assert 0.5 < coverage.flop_by_formula < 1
    assert 0 < coverage.ops_by_formula < 1


# What cannot be captured
# ------------------------------------------------------------------------------------------


def test_a_model_that_decides_by_values_is_refused_with_the_line():
    with pytest.raises(UnsupportedOp, match=r"small_models.py:\d+ \(if y.sum\(\) > 0:") as caught:
        capture(*decides_by_value())
    assert "torch.where" in str(caught.value)


def test_inputs_that_do_not_fit():
    model, (images, _) = convolutions()
    with pytest.raises(InputError, match=r"do not fit|cannot be captured"):
        capture(model, (images, images, images))
    with pytest.raises(InputError, match=r"cannot be captured at .*small_models\.py"):
        capture(model, (torch.randn(4, 5, 16, 16),))


def test_training_needs_a_loss():
    model, (images, _) = convolutions()
    with pytest.raises(
        InputError, match=r"returns its loss, one number; this one returned \[4, 10\]"
    ):
        capture(model, images, train=True)


def test_an_unknown_optimizer_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'adam'"):
        capture(*convolutions(), train=True, optimizer="adan")


# Files and names
# --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_pt2_file(tmp_path):
    model, (images, _) = convolutions()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model.eval(), (images,)), str(path))
    graph = Torch().read(path, trust=True)
    assert graph.name == "model"
    assert graph.flop.sum() == capture(model, images).flop.sum()


def test_a_bad_pt2_file(tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"not a zip")
    with pytest.raises(
        InputError, match=r"model\.pt2: is not a program saved by torch\.export\.save"
    ):
        Torch().read(path, trust=True)
    with pytest.raises(InputError, match="no such file"):
        Torch().read(tmp_path / "none.pt2")


def test_a_callable_by_name():
    assert Torch().read("small_models:convolutions", train=True).num_ops > 50
    for source, message in [
        ("small_models:nothing", "cannot load"),
        ("no_such_module:x", "cannot load"),
        ("small_models", "is not package.module:callable"),
        ("small_models:not_a_model", "gave int; it must return"),
    ]:
        with pytest.raises(InputError, match=message):
            Torch().read(source)


def test_the_graph_is_json_that_others_can_read(tmp_path):
    capture(*convolutions()).save(tmp_path / "graph.json")
    content = json.loads((tmp_path / "graph.json").read_text())
    assert content["ops"][0]["phase"] == "parameter"


def test_a_lightly_nested_module_has_its_path():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    graph = capture(model, torch.randn(3, 4))
    assert [graph.modules[op] for op in range(graph.num_ops) if graph.kinds[op] == "addmm"] == [
        "0.0",
        "1",
    ]


def test_the_calls_of_a_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            return self.cell(self.cell(x).relu()).sum()

    graph = capture(Twice(), torch.randn(2, 4), train=True)
    forward = [graph.modules[op] for op in range(graph.num_ops) if graph.kinds[op] == "addmm"]
    assert forward == ["cell", "cell@1"]
    backward = {
        graph.modules[op] for op in range(graph.num_ops) if PHASES[graph.phase[op]] == "backward"
    }
    assert {"cell", "cell@1"} <= backward
