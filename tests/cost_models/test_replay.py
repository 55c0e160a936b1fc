"""A step replayed op by op: what it runs is what the runtime runs on one device, and what it finds
is used."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roost import zoo
from roost.core.cluster import Cluster, Device, Link
from roost.cost_models.profiled import Profiled
from roost.cost_models.timing import whole_step
from roost.cost_models.timing.whole_step import _Writer, replayed
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.unplaced import residents_of
from support.runs import virtual_problem

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
import small_models


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Calls(TorchDispatchMode):
    """Which ops ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def captured(make, train=True):
    model, inputs = make()
    return (
        model,
        inputs,
        captured_step(trace(model, inputs, train=train), "small", "adam" if train else None),
    )


@pytest.mark.parametrize("make", [small_models.everything, small_models.convolutions])
@pytest.mark.parametrize("train", [True, False])
def test_a_replay_calls_what_the_runtime_calls(make, train):
    model, inputs, step = (
        captured(make, train) if train else captured(lambda: (make()[0].eval(), make()[1]), train)
    )
    problem = virtual_problem(step, 1)
    ours, theirs = Calls(), Calls()
    run = GraphRuntime(
        step, problem, problem.placement(np.zeros(step.graph.num_ops)), residents_of(model)
    )
    with theirs:
        run._inputs, run.random_ops.step = list(inputs), 1
        with torch.no_grad():
            run._running[0].function()
    run.close()
    writer = _Writer(step)
    function = writer.compiled()
    with ours, torch.no_grad():
        function(*writer.given, [0.0] * (1 + step.graph.num_ops), lambda: 0.0)
    # One is of handing over the result, which the runtime does.
    assert Counter(ours.names) == Counter(theirs.names) - Counter(["aten.detach.default"])


@pytest.mark.parametrize("name", ["cifar10_cnn", "gpt2", "rnnlm", "moe", "t5"])
def test_every_op_that_computes_gets_a_time(name):
    settings = zoo.settings(name).small()
    model, inputs = settings.model().train(), settings.inputs(True)
    step = captured_step(trace(model, inputs, train=True), name, "sgd")
    with torch.no_grad():
        times = replayed(step, 0.0, least=1)
    kinds = np.array(step.graph.kinds)
    computes = ~step.graph.is_parameter & (kinds != "input") & (kinds != "output")
    assert len(times) == step.graph.num_ops
    assert (np.array(times)[computes] > 0).all()


def cluster():
    devices = tuple(
        Device(f"cpu:{n}", "cpu", 2**33, peak={"float32": 1e11}, memory_bandwidth=1e10)
        for n in range(2)
    )
    return Cluster("test", devices, (Link("*", "*", 1e10, 1e-5),))


def test_what_an_op_takes_in_a_step_is_what_counts_and_is_kept(monkeypatch):
    *_, step = captured(small_models.everything)
    asked = []

    def in_step(step, seconds, least, device):
        asked.append(seconds)
        return [0.25] * step.graph.num_ops

    monkeypatch.setattr(whole_step, "replayed", in_step)
    costs = [
        Profiled(step, seconds_each=1e-4, in_step=True).estimate(step.graph, cluster())
        for _ in range(2)
    ]
    assert len(asked) == 1
    assert costs[0] == costs[1]
    assert set(np.unique(costs[0].op_time)) == {0.0, 0.25}
    assert (
        Profiled(step, seconds_each=1e-4, in_step=False)
        .estimate(step.graph, cluster())
        .op_time.max()
        < 0.25
    )


def test_where_a_step_cannot_be_replayed_each_op_counts_by_itself(monkeypatch):
    *_, step = captured(small_models.everything)

    def fails(step, seconds, least, device):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(whole_step, "replayed", fails)
    once = Profiled(step, seconds_each=1e-4, in_step=True).estimate(step.graph, cluster())
    assert once == Profiled(step, seconds_each=1e-4, in_step=False).estimate(step.graph, cluster())
