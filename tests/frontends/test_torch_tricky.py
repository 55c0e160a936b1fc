"""What a model does to its gradients, buffers and inputs is captured as it is, or refused: never
dropped."""

import numpy as np
import pytest
import torch
import tricky_models as tricky
from torch import nn

import roost
from roost.errors import InputError, UnsupportedOp
from roost.frontends import read
from roost.frontends.torch import capture, step_of
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.unplaced import residents_of
from support.numerics import compare_with_eager
from support.runs import virtual_problem

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("model", tricky.RIGHT)
def test_the_numbers_are_those_of_the_model(model, train):
    torch.manual_seed(0)
    differences = compare_with_eager(model(), (X.clone(),), train=train)
    # nn.TransformerEncoderLayer runs a fused kernel of its own in inference.
    assert max(differences.values()) <= (1e-6 if issubclass(model, tricky.Encoder) else 0), (
        differences
    )


def test_a_weight_and_a_buffer_that_change_each_get_their_own_new_value():
    program = trace(tricky.ChangesItsWeight().eval(), (X,))
    assert list(program.new_values) == ["layer.weight", "count"]
    shapes = [tuple(node.meta["val"].shape) for node in program.new_values.values()]
    assert shapes == [(8, 8), ()]
    assert len(program.results) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            tricky.Checkpoint,
            r"CheckpointFunction at .*tricky_models.py:\d+ .* is a torch.autograd.Function",
        ),
        (tricky.UnseenWeight, r"Unseen at .*:\d+ .* reads a tensor that it is not given"),
        (tricky.ChangesWhatItIsGiven, r"InPlace at .*:\d+ .* changes its input"),
        (tricky.TensorHook, "a hook on a gradient"),
        (tricky.PicksRows, "decides by the values of a tensor"),
    ],
)
def test_what_would_be_wrong_is_refused(model, message):
    with pytest.raises(UnsupportedOp, match=message):
        capture(model(), X, train=True)


def test_a_backward_hook_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedOp, match="module '0' has a backward hook"):
        capture(model, X, train=True, loss=lambda y: y.sum())
    assert capture(model, X).num_ops > 0


def test_refusing_leaves_pytorch_as_it_was():
    with pytest.raises(UnsupportedOp):
        capture(tricky.Checkpoint(), X, train=True)
    y = torch.ones(2, requires_grad=True)
    tricky.Sevenfold.apply(y).sum().backward()
    assert y.grad.tolist() == [7, 7]
    assert capture(tricky.OwnDerivative(), X).num_ops > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capture(lambda x: x, X), "a torch.nn.Module is needed, not function"),
        (lambda: capture(nn.Linear, X), "a torch.nn.Module is needed, not Linear"),
        (lambda: capture(None, X), "a torch.nn.Module is needed, not NoneType"),
        (lambda: capture(nn.LazyLinear(4), X), "has no shape yet"),
        (lambda: capture(nn.Linear(8, 8).half(), X), "mixes float16 and float32"),
        (lambda: capture(nn.Linear(8, 8), ()), "do not fit the model's forward"),
        (lambda: capture(nn.Linear(8, 8), {"y": X}), "do not fit the model's forward"),
        (lambda: capture(nn.Linear(8, 8), X, train=True, loss=nn.CrossEntropyLoss()), "loss cannot be called"),
        (lambda: capture(nn.Linear(8, 8), X, optimizer=torch.optim.SGD), "give its name"),
        (lambda: capture(nn.Linear(8, 8), X, name=3), "name is 3"),
        (lambda: capture(nn.Embedding(9, 4, sparse=True), torch.zeros(3, dtype=torch.int64), train=True,
                         loss=lambda y: y.sum()), "cannot be captured"),
        (lambda: capture(torch.jit.script(nn.Linear(8, 8)), X), "scripted"),
        (lambda: roost.estimate("graph", "k80x2"), "takes a graph and a cluster"),
        (lambda: roost.simulate(capture(nn.Linear(8, 8), X), roost.Placement([0])), "a problem is needed"),
        (lambda: roost.simulate(roost.estimate(capture(nn.Linear(8, 8), X), "cpu"), [0] * 4), "a roost.Placement is"),
        (lambda: read("model.onnx", train=True), "training is for PyTorch models"),
        (lambda: read("no_such_module:model"), "cannot load"),
    ],
)  # fmt: skip
def test_mistakes_of_newcomers(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_callable_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(
        "import sys\ndef fails(): raise KeyError('x')\ndef stops(): sys.exit(5)\ndef needs(a): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fails", "stops", "needs"):
        with pytest.raises(InputError, match=f"cannot load 'failing:{name}'"):
            read(f"failing:{name}")


@pytest.mark.filterwarnings("ignore")
def test_a_program_exported_with_dynamic_shapes_is_refused(tmp_path):
    path = tmp_path / "model.pt2"
    batch = torch.export.Dim("batch")
    torch.export.save(
        torch.export.export(nn.Linear(8, 8), (X,), dynamic_shapes={"input": {0: batch}}), str(path)
    )
    with pytest.raises(InputError, match=r"has the dynamic shape .* fixed shapes"):
        read(str(path), trust=True)


def test_a_preset_may_be_named_in_estimate():
    assert roost.estimate(capture(nn.Linear(8, 8), X), "k80x2").cluster.name == "k80x2"


def test_inputs_that_are_no_tensors_are_none_of_the_step():
    """A flag decides when the step is traced; it takes no time, and nothing has to be given for
    it."""

    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, twice=False, scale=1.0, other=None):
            x = self.layer(x) * scale
            return self.layer(x) if twice else x

    model, x = Flagged().eval(), torch.ones(2, 4)
    given = {"twice": True, "x": x, "scale": 2.0, "other": None}
    step = step_of(model, given)
    assert step.program.inputs == ("x",)
    assert [kind for kind in step.graph.kinds if kind == "input"] == ["input"]
    assert list(step.graph.kinds).count("addmm") == 2
    problem = virtual_problem(step)
    assert (
        roost.profile(step, roost.probe(virtual=2), cache=False, seconds_each=1e-4).op_time.shape[0]
        == step.graph.num_ops
    )
    with torch.no_grad():
        expected = model(**given)
    with GraphRuntime(
        step, problem, problem.placement(np.zeros(step.graph.num_ops, int)), residents_of(model)
    ) as run:
        assert torch.equal(run.step(**given)[0], expected)
        assert torch.equal(run.step(given)[0], expected)
        assert torch.equal(run.step(x)[0], expected)


def test_other_flags_or_names_than_were_captured_are_refused():
    class Flagged(nn.Module):
        def forward(self, batch, scale, minus):
            return (batch["x"] - batch["y"]) * scale - minus

    x, y, model = torch.ones(2), torch.zeros(2), Flagged()
    step = step_of(model, {"batch": {"x": x, "y": y}, "scale": 3, "minus": x})
    problem = virtual_problem(step)
    with GraphRuntime(
        step, problem, problem.placement(np.zeros(step.graph.num_ops, int)), {}
    ) as run:
        assert run.step({"batch": {"y": y, "x": x}, "minus": x, "scale": 3})[0].tolist() == [
            2.0,
            2.0,
        ]
        for wrong in (({"x": x, "y": y}, 4, x), ({"batch": {"x": x, "y": y}, "scale": 4},)):
            with pytest.raises(
                InputError, match="input 'scale' is 4; it was captured with 3: capture the"
            ):
                run.step(*wrong)
        with pytest.raises(
            InputError, match="takes batch_x, batch_y, minus; the inputs lack minus"
        ):
            run.step({"batch": {"x": x, "y": y}, "minsu": x})
        with pytest.raises(InputError, match=r"by name \(scale\); give all in one way"):
            run.step({"x": x, "y": y}, x, scale=3)


class Checked(nn.Module):
    """Reads a value to check it, and computes nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        torch._check(count <= x.numel())
        return self.linear(x).sum()


@pytest.mark.parametrize("train", [False, True])
def test_a_check_of_a_value_decides_nothing(train):
    kinds = capture(Checked(), X, train=train).kinds
    assert "sum" in kinds
    assert not any("item" in kind or "scalar" in kind or "assert" in kind for kind in kinds)


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(x.sum().item())
        return nn.functional.interpolate(x[None, None], size=(size, size)).sum()


def test_a_refusal_is_not_buried_under_a_graph(capfd):
    with pytest.raises(InputError, match="decides by the values of a tensor"):
        capture(Deciding(), X)
    assert capfd.readouterr() == ("", "")


class NamedAs(nn.Module):
    """A module with a part, a weight and a buffer under the names of attributes of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.code = nn.Parameter(torch.ones(8))
        self.register_buffer("meta", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.graph(x) * self.code + self.meta).sum()


@pytest.mark.parametrize("train", [False, True])
def test_a_module_may_be_called_graph(train):
    step = step_of(NamedAs(), X, train=train)
    assert {"graph.0.weight", "code", "meta"} <= set(step.program.residents)
    assert ("graph.1.running_mean" in step.program.new_values) == train
    assert ("graph.0.weight" in step.program.gradients) == train
    assert any(module.startswith("graph.0") for module in step.graph.modules)
