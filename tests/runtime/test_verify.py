"""Verification: the placed step has the numbers of the unplaced one; a runtime that is wrong is
found out, by op."""

import numpy as np
import pytest
import torch
from torch import nn

import roost
from roost import catalog, zoo
from roost.core.cluster import Cluster, Device, Link
from roost.errors import InputError, VerificationFailed
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops import device_calls, transfers
from roost.runtime.ops import verify as verification
from roost.runtime.ops.device_code import _DeviceWriter
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.ops.verify import check_devices, verify
from roost.runtime.step.differences import apart
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from support.runs import any_placement, virtual_problem


class Small(nn.Module):
    """Tied weights, a buffer that changes, and dropout where it is wanted."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words, labels):
        hidden = self.norm(self.embed(words).flatten(0, 1))
        left, right = self.dropout(torch.relu(self.inner(hidden))).chunk(2, dim=1)
        hidden = torch.cat([left * right, left + right], dim=1) + hidden
        return nn.functional.cross_entropy(self.out(hidden), labels.flatten())


def made(optimizer="adam", dropout=0.0):
    torch.manual_seed(0)
    model = Small(dropout).train()
    inputs = (torch.randint(11, (3, 4)), torch.randint(11, (3, 4)))
    step = captured_step(trace(model, inputs, train=True), "small", optimizer)
    return step, virtual_problem(step), model, inputs


def random_placement(problem, seed=1):
    return any_placement(problem, np.random.default_rng(seed))


def wholly_on(problem, device):
    return problem.placement(np.full(problem.graph.num_ops, device))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_a_placed_step_is_the_same_to_the_last_bit(optimizer):
    step, problem, model, inputs = made(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = verify(step, problem, random_placement(problem), model, inputs, steps=3)
    assert found.same
    assert found.bitwise
    assert found.check() is found
    assert (found.first_op, found.device, found.note) == ("", "", "")
    names = {"loss", "gradient of embed.weight", "embed.weight", "norm.running_mean", "inner.bias"}
    assert names | {"out.weight (tied to embed.weight)"} <= set(found.differences)
    states = {"sgd": (), "momentum": ("momentum_buffer",)}.get(optimizer, ("exp_avg", "exp_avg_sq"))
    kept = {name for name in found.differences if name.startswith("inner.bias:")}
    assert kept == {f"inner.bias:{state}" for state in states}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "to the last bit" in str(found)
    assert "tied weight" in str(found)


def test_a_step_that_draws_is_compared_with_the_captured_program():
    step, problem, model, inputs = made(dropout=0.5)
    found = verify(step, problem, random_placement(problem), model, inputs, steps=2)
    assert found.bitwise
    assert "draws at random" in found.note
    assert "loss (captured)" in found.differences
    assert "loss" not in found.differences


def test_inference_is_verified_too():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (torch.randn(4, 5),)
    step = captured_step(trace(model, inputs), "net")
    problem = virtual_problem(step)
    found = verify(step, problem, random_placement(problem), model, inputs)
    assert found.bitwise
    assert {"output", "output (captured)", "0.weight"} <= set(found.differences)


def test_tensors_that_are_plain_attributes():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Linear(4, 4), torch.full((4,), 3.0)

        def forward(self, x):
            return (self.inner(x) * self.scale).sum()

    torch.manual_seed(0)
    model, inputs = Loose(), torch.randn(2, 4)
    step = captured_step(trace(model, (inputs,), train=True), "loose", "momentum")
    problem = virtual_problem(step)
    assert verify(step, problem, random_placement(problem), model, inputs, steps=2).bitwise


# Those of thousands of ops are held against eager PyTorch in tests/zoo, and placed against unplaced
# there too.
@pytest.mark.parametrize(
    "name", [name for name in zoo.names() if name not in ("inception_v3", "nasnet")]
)
def test_models_of_the_zoo(name):
    settings = catalog.find("zoo", name).small()
    torch.manual_seed(0)
    model, inputs = settings.model(), settings.inputs(True)
    step = captured_step(trace(model, inputs, train=True), name, "adam")
    problem = virtual_problem(step)
    found = verify(step, problem, random_placement(problem), model, inputs)
    assert found.same, str(found)


def test_a_loss_of_the_users_own_and_named_inputs():
    class Net(nn.Linear):
        def forward(self, left, right):
            return super().forward(left - right)

    torch.manual_seed(0)
    model, inputs = Net(4, 4), {"left": torch.randn(2, 4), "right": torch.randn(2, 4)}
    step = captured_step(trace(model, (), inputs, train=True, loss=torch.sum), "net", "sgd")
    problem = virtual_problem(step)
    swapped = dict(reversed(inputs.items()))
    assert verify(step, problem, random_placement(problem), model, swapped, loss=torch.sum).bitwise
    assert not verify(
        step, problem, random_placement(problem), model, swapped, loss=lambda y: 2 * y.sum()
    ).same


def test_a_watch_sees_every_op_once_in_a_step():
    step, problem, model, inputs = made("adam")
    seen = []
    with GraphRuntime(
        step,
        problem,
        random_placement(problem),
        residents_of(model),
        watch=lambda op, value: seen.append((op, value)),
    ) as run:
        run.step(*inputs)
    assert sorted(op for op, _ in seen) == np.flatnonzero(~step.graph.is_parameter).tolist()
    by_op = dict(seen)
    assert isinstance(by_op[step.graph.index_of("relu")], torch.Tensor)
    new, gradient, mean, square = by_op[step.graph.index_of("inner.weight:update")]
    assert new.shape == gradient.shape == mean.shape == square.shape == (6, 6)
    with pytest.raises(InputError, match="cannot be watched"):
        GraphRuntime(
            step, problem, wholly_on(problem, 0), residents_of(model), graphs=True, watch=print
        )


def test_a_wrong_optimizer_is_found_at_the_first_update(monkeypatch):
    step, problem, model, inputs = made("adam")
    right = Optimizer._adam

    def wrong(self, step, parameter, gradient, mean, square):
        right(self, step, parameter, gradient, mean, square)
        parameter.mul_(1.01)

    monkeypatch.setattr(Optimizer, "_adam", wrong)
    found = verify(step, problem, random_placement(problem), model, inputs)
    assert not found.same
    assert not found.differences["embed.weight"].same
    assert not found.differences["out.weight (tied to embed.weight)"].same
    assert found.differences["gradient of embed.weight"].same
    assert found.first_op == next(iter(step.updates))
    with pytest.raises(VerificationFailed, match="not the same numbers") as failure:
        found.check()
    assert failure.value.op == found.first_op
    assert failure.value.device == found.device


def test_a_wrong_transfer_is_found_at_the_op_that_reads_it(monkeypatch):
    step, problem, model, inputs = made("sgd")
    placement = wholly_on(problem, 0).moved(step.graph.index_of("relu"), 1)
    right = transfers.copied_on_cpu

    def wrong(tensor, after=(), into=None):
        sent = right(tensor, after, into)
        sent.tensor.add_(0.5)
        return sent

    monkeypatch.setattr(transfers, "copied_on_cpu", wrong)
    found = verify(step, problem, placement, model, inputs)
    assert not found.same
    # What goes there is changed on its way already, so that the op itself has another output.
    assert (found.first_op, found.device) == ("relu", "cpu:1")


def test_settings_of_pytorch_are_as_before():
    def now():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = now()
    seen = []
    with verification._without_tf32():
        seen.append(now())
    assert seen == [(False, False)]
    assert now() == before


def test_a_wrong_kernel_on_one_device_is_named(monkeypatch):
    step, problem, model, inputs = made("sgd", dropout=0.0)
    right = _DeviceWriter._define

    def wrong(self, op, node, call, args, kwargs=None):
        if self.device == 1 and call is torch.ops.aten.relu.default:
            call = torch.ops.aten.sigmoid.default
        return right(self, op, node, call, args, kwargs)

    monkeypatch.setattr(_DeviceWriter, "_define", wrong)
    assert verify(step, problem, wholly_on(problem, 0), model, inputs).bitwise
    found = verify(step, problem, wholly_on(problem, 1), model, inputs)
    assert not found.same
    assert not found.differences["loss"].same
    assert (found.first_op, found.device) == ("relu", "cpu:1")
    assert "'relu' on cpu:1" in str(found)


def test_a_value_that_does_not_come_home_is_found(monkeypatch):
    step, problem, model, inputs = made("sgd")
    update = step.graph.index_of("inner.weight:update")
    placement = wholly_on(problem, 0).moved(update, 1)
    right = GraphRuntime.sending_home

    def wrong(self, parameter, source, reads):
        send = right(self, parameter, source, reads)
        return lambda tensor: send(torch.zeros_like(tensor))

    monkeypatch.setattr(GraphRuntime, "sending_home", wrong)
    found = verify(step, problem, placement, model, inputs)
    assert [name for name, each in found.differences.items() if not each.same] == ["inner.weight"]
    assert found.first_op == "inner.weight:update"


def test_a_buffer_that_is_not_updated_is_found(monkeypatch):
    step, problem, model, inputs = made("sgd")
    monkeypatch.setattr(device_calls, "_copy", lambda step, buffer, value: None)
    found = verify(step, problem, random_placement(problem), model, inputs)
    wrong = {name for name, each in found.differences.items() if not each.same}
    assert "norm.running_mean" in wrong
    assert "loss" not in wrong
    assert found.first_op.startswith("norm.")


def test_the_first_op_is_found_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(verification, "_PROBED_BYTES", 100)
    test_a_wrong_kernel_on_one_device_is_named(monkeypatch)


def test_a_difference_in_a_later_step_is_found(monkeypatch):
    step, problem, model, inputs = made("momentum")
    right = Optimizer._momentum

    def wrong(self, step, parameter, gradient, velocity):
        right(self, step, parameter, gradient, velocity)
        if step == 2:
            velocity.add_(1.0)

    monkeypatch.setattr(Optimizer, "_momentum", wrong)
    assert verify(step, problem, random_placement(problem), model, inputs, steps=1).bitwise
    found = verify(step, problem, random_placement(problem), model, inputs, steps=2)
    assert found.differences["inner.bias:momentum_buffer"].step == 2
    assert found.differences["inner.bias"].same
    assert found.first_op in step.updates


def test_tolerances():
    one = torch.tensor([100.0, 1.0])
    assert apart(one, one) == (0.0, 0.0)
    assert apart(one + torch.tensor([0.0, 0.5]), one) == (0.5, 0.005)
    assert apart(torch.tensor([0.25]), torch.tensor([0.0]))[1] == float("inf")
    assert apart(torch.tensor([0.25]), torch.tensor([0.0]), floor=1.0) == (0.25, 0.25)
    nan = torch.tensor([float("nan"), 1.0])
    assert apart(nan, nan) == (0.0, 0.0)
    assert apart(one, nan)[0] == float("inf")
    assert apart(one, one.double())[0] == float("inf")
    assert apart(torch.tensor([3]), torch.tensor([2])) == (1.0, 0.5)
    assert apart(torch.tensor([2**60 + 1]), torch.tensor([2**60]))[0] == 1.0
    assert apart(torch.tensor([True]), torch.tensor([False]))[0] == 1.0


def test_a_tolerance_can_be_given(monkeypatch):
    step, problem, model, inputs = made("sgd")
    right = Optimizer._sgd
    monkeypatch.setattr(
        Optimizer, "_sgd", lambda self, s, p, g: right(self, s, p, g) or p.mul_(1 + 1e-4)
    )
    assert not verify(step, problem, random_placement(problem), model, inputs).same
    found = verify(step, problem, random_placement(problem), model, inputs, tolerance=1e-3)
    assert found.same
    assert not found.bitwise
    assert "to the last bit" not in found.verdict


def test_what_cannot_be_verified_is_refused():
    step, problem, model, inputs = made("sgd")
    with pytest.raises(InputError, match="was made for graph"):
        verify(step, problem, wholly_on(made("adam")[1], 0), model, inputs)
    with pytest.raises(InputError, match="steps is 0"):
        verify(step, problem, wholly_on(problem, 0), model, inputs, steps=0)
    with pytest.raises(
        InputError,
        match=r"another model: it has 'embed\.weight', \[11, 6\] .*; this model has none",
    ):
        verify(step, problem, wholly_on(problem, 0), nn.Linear(6, 6), inputs)
    wide = Small()
    wide.inner = nn.Linear(6, 7)
    with pytest.raises(
        InputError, match=r"'inner\.weight', \[6, 6\] of torch\.float32; this model has \[7, 6\]"
    ):
        verify(step, problem, wholly_on(problem, 0), wide, inputs)
    with torch.device("meta"):
        empty = Small()
    with pytest.raises(InputError, match=r"'embed\.weight' is on the meta device"):
        verify(step, problem, wholly_on(problem, 0), empty, inputs)


def test_a_placement_for_another_model_names_both():
    step, problem, model, inputs = made("sgd")
    placement = roost.Placement(np.zeros(step.graph.num_ops, int), graph="0123456789abcdef")
    with pytest.raises(
        InputError, match=rf"made for graph 0123456789abcdef; graph 'small' is {step.graph.digest}"
    ):
        verify(step, problem, placement, model, inputs)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (Device("cuda:63", "cuda", 1), "cluster 'mine': device 'cuda:63' is not on this machine"),
        (Device("tpu:0", "tpu", 1), "device 'tpu:0' is not on this machine"),
        (Device("cpu:0", "cuda", 1), "of kind 'cuda'; only cpu, cpu:N and cuda:N"),
        (Device("fast", "cpu", 1), "device 'fast'"),
    ],
)
def test_devices_must_be_here(device, message):
    with pytest.raises(InputError, match=message):
        check_devices(Cluster("mine", (device,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_cpu_and_a_gpu(dropout):
    step, virtual, model, inputs = made("adam", dropout)
    devices = (Device("cpu", "cpu", 2**33), Device("cuda:0", "cuda", 2**33))
    problem = roost.Problem(
        step.graph, Cluster("both", devices, (Link("*", "*", 1e10),)), virtual.costs
    )
    for seed in range(5):
        found = verify(step, problem, random_placement(problem, seed), model, inputs, steps=2)
        assert found.same, str(found)


def test_a_model_that_fails_unplaced_is_told():
    step, problem, model, inputs = made("sgd")
    model.forward = lambda *args: torch.ones(2) @ torch.ones(3)
    with pytest.raises(InputError, match="the model itself fails, unplaced: RuntimeError"):
        verify(step, problem, wholly_on(problem, 0), model, inputs)


def test_autocast_is_of_the_model_and_not_of_the_captured_program():
    """The types that it chooses are in a program that was captured under it; they are not chosen
    once more."""
    with torch.autocast("cpu", torch.bfloat16):
        step, problem, model, inputs = made()
        assert verify(step, problem, random_placement(problem), model, inputs).same
    step, problem, model, inputs = made()
    with torch.autocast("cpu", torch.bfloat16):
        found = verify(step, problem, random_placement(problem), model, inputs)
    assert {each.same for each in found.differences.values() if each.against != "PyTorch"} == {True}
    assert not found.same
