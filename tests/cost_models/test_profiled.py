"""Profiled costs: every op is timed, once, where it runs; what cannot be is taken from the roofline
and counted."""

import json
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roost
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import INPUT
from roost.cost_models.profiled import Profiled, alone_on
from roost.cost_models.roofline import Roofline
from roost.cost_models.timing import timed_ops, timers, updates, whole_step
from roost.cost_models.timing.overwrites import overwrites
from roost.cost_models.timing.profiler import launched
from roost.cost_models.timing.progress_log import ProgressLog
from roost.errors import InputError
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.presets import machine, measurement_cache
from roost.runtime.ops.device_code import StepCode, _DeviceWriter
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from support.runs import virtual_problem

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
import small_models

SHORT = {"seconds_each": 1e-4}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def device(name):
    kind = name.partition(":")[0]
    return Device(
        name, kind, 2**33, peak={"float32": 1e11}, memory_bandwidth=1e10, launch_overhead=1e-6
    )


def cluster(*names):
    return Cluster(
        "test", tuple(map(device, names)), (Link("*", "*", 1e10, 1e-5),) if len(names) > 1 else ()
    )


def captured(make=small_models.everything, optimizer="adam", **settings):
    model, inputs = make(**settings)
    return captured_step(trace(model, inputs, train=True), "small", optimizer)


def takes_time(step):
    """Neither a parameter, nor an input, nor one output of several."""
    kinds = np.array(step.graph.kinds)
    return ~step.graph.is_parameter & (kinds != "input") & (kinds != "output")


@pytest.mark.parametrize("make", [small_models.everything, small_models.convolutions])
def test_every_op_that_computes_has_a_time_on_every_device(make):
    step = captured(make)
    devices = cluster("cpu:0", "cpu:1")
    found = Profiled(step, **SHORT).profile(step.graph, devices)
    assert found.fallen_back == ()
    assert found.costs.source == "profiled"
    times = found.costs.op_time
    assert times.shape == (step.graph.num_ops, 2)
    assert (times[takes_time(step)] > 0).all()
    assert (times[~takes_time(step)] == 0).all()
    assert np.array_equal(times[:, 0], times[:, 1])  # devices that are alike are timed once
    assert 0 < found.num_timed == found.num_signatures < 2 * takes_time(step).sum()
    roost.Problem(step.graph, devices, found.costs)


def test_a_device_that_the_cluster_calls_half_as_fast_takes_twice_as_long():
    step = captured()
    fast, slow = cluster("cpu:0", "cpu:1").devices
    slow = replace(slow, peak={"float32": fast.peak["float32"] / 2})
    link = Link("*", "*", 1e10, 1e-5)
    times = Profiled(step, **SHORT).profile(step.graph, Cluster("test", (fast, slow), (link,)))
    op_time = times.costs.op_time
    assert (op_time[takes_time(step)] > 0).all()
    assert np.array_equal(op_time[:, 1], 2 * op_time[:, 0])


def test_dropout_is_timed_too():
    step = captured(dropout=0.5)
    found = Profiled(step, **SHORT).profile(step.graph, cluster("cpu"))
    assert found.fallen_back == ()


def test_what_was_timed_is_not_timed_again(monkeypatch):
    step, devices = captured(), cluster("cpu")
    told = []
    first = roost.profile(step, devices, progress=lambda *count: told.append(count), **SHORT)
    assert told[-1][0] == told[-1][1] == len(told)

    def never(self, work):
        raise AssertionError("timed again")

    monkeypatch.setattr(timers.Timer, "time", never)
    assert roost.profile(step, devices) == first
    again = Profiled(step, refresh=True).profile(step.graph, devices)
    assert sum(each.num_ops for each in again.fallen_back) == takes_time(step).sum()
    assert roost.profile(step, devices, cache=False) != first


def test_what_was_timed_before_ctrl_c_is_kept():
    step, devices = captured(small_models.convolutions), cluster("cpu")

    def press(done, total):
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roost.profile(step, devices, progress=press, **SHORT)
    found = Profiled(step, **SHORT).profile(step.graph, devices)
    assert found.num_timed == found.num_signatures - 10


def test_without_a_cache_nothing_is_kept(tmp_path):
    step = captured(small_models.convolutions)
    roost.profile(step, cluster("cpu"), cache=False, **SHORT)
    assert list(tmp_path.iterdir()) == []


def test_another_shape_is_timed_by_itself():
    step = captured(small_models.convolutions)
    first = Profiled(step, **SHORT).profile(step.graph, cluster("cpu"))
    model, (images, labels) = small_models.convolutions()
    larger = captured_step(trace(model, (images[:2], labels[:2]), train=True), "small", "adam")
    second = Profiled(larger, **SHORT).profile(larger.graph, cluster("cpu"))
    assert 0 < second.num_timed < first.num_timed  # updates have no batch


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"key": {}, "found": {}}', "pairs"])
def test_a_damaged_file_is_as_none(damage):
    step, devices = captured(small_models.convolutions), cluster("cpu")
    first = Profiled(step, **SHORT).profile(step.graph, devices)
    [path] = measurement_cache.folder().glob("profile-*.json")
    if damage == "pairs":
        kept = json.loads(path.read_text())
        wrong = [
            None,
            [1.0],
            [-1.0, 0.0],
            ["a", 1.0],
            [float("nan"), 0.0],
            [1e9, 0.0],
            [0.0, 0.0],
            [True, 1.0],
        ]
        names = list(kept["found"])
        kept["found"] |= {name: wrong[number % len(wrong)] for number, name in enumerate(names)}
        damage = json.dumps(kept)
    path.write_text(damage)
    again = Profiled(step, **SHORT).profile(step.graph, devices)
    assert again.num_timed == first.num_timed
    assert again.fallen_back == ()
    assert Profiled(step).profile(step.graph, devices).num_timed == 0


def test_what_cannot_run_falls_back_to_the_roofline_and_is_counted(monkeypatch):
    step, devices = captured(), cluster("cpu:0", "cpu:1")
    time = timers.Timer.time

    def fails(self, work):
        if work.signature.startswith(("aten.tanh.default", "aten.tanh_.default")):
            raise RuntimeError("no such kernel\nat all")
        return time(self, work)

    monkeypatch.setattr(timers.Timer, "time", fails)
    found = Profiled(step, **SHORT).profile(step.graph, devices)
    rough = Roofline().estimate(step.graph, devices).op_time
    kinds = np.array(step.graph.kinds)
    count = int((kinds == "tanh").sum())
    assert count > 0
    assert np.array_equal(found.costs.op_time[kinds == "tanh"], rough[kinds == "tanh"])
    assert [(each.kind, each.device, each.num_ops, each.why) for each in found.fallen_back] == [
        ("tanh", name, count, "RuntimeError: no such kernel") for name in devices.device_names
    ]
    assert found.costs.source == f"profiled; {2 * count} of {2 * step.graph.num_ops} by roofline"
    monkeypatch.undo()


def test_an_op_that_raises_is_left_to_the_roofline(monkeypatch):
    step = captured(small_models.convolutions, "sgd")
    monkeypatch.setitem(updates.UPDATES, "sgd", lambda *tensors: 1 / 0)
    found = Profiled(step, **SHORT).profile(step.graph, cluster("cpu"))
    assert {(each.kind, each.why) for each in found.fallen_back} == {
        ("sgd", "ZeroDivisionError: division by zero")
    }


def test_what_would_take_too_long_is_not_tried():
    step = captured(small_models.convolutions)
    slow = Cluster(
        "slow", (Device("cpu", "cpu", 2**33, peak={"float32": 1e3}, memory_bandwidth=1e3),)
    )
    found = Profiled(step, most_seconds=1.0, **SHORT).profile(step.graph, slow)
    kept = {each.kind for each in found.fallen_back}
    assert "convolution" in kept
    assert all("by the roofline" in each.why for each in found.fallen_back)
    assert found.costs.op_time[step.graph.kinds.index("convolution")].max() > 1.0


def test_what_has_no_room_is_not_tried(monkeypatch):
    step = captured(small_models.convolutions)
    monkeypatch.setattr(timers.machine, "available_memory", lambda: 2000)
    found = Profiled(step, **SHORT).profile(step.graph, cluster("cpu"))
    assert found.fallen_back
    assert all(each.why.startswith("MemoryError: needs") for each in found.fallen_back)


def test_devices_that_are_not_here_are_refused():
    step = captured(small_models.convolutions)
    with pytest.raises(InputError, match="'cuda:77' of cluster 'test' is not on this machine"):
        roost.profile(step, cluster("cpu", "cuda:77"))
    with pytest.raises(InputError, match="'tpu:0'"):
        roost.profile(step, cluster("tpu:0"))


def test_a_graph_alone_cannot_be_profiled():
    step, other = captured(small_models.convolutions), captured()
    with pytest.raises(InputError, match="captured step"):
        roost.estimate(step.graph, cluster("cpu"), "profiled")
    with pytest.raises(InputError, match="captured step is"):
        Profiled(step).estimate(other.graph, cluster("cpu"))


def test_indices_are_spread_over_what_they_look_into():
    step = captured()
    works = {task.call.signature: task.call for task in timed_ops.timed_ops(step)}
    [lookup] = [work for name, work in works.items() if name.startswith("aten.embedding.default")]
    (_, indices), _ = timed_ops._made(lookup.args, torch.device("cpu"))
    assert indices.dtype == torch.int64
    assert 0 <= indices.min() < indices.max() < 50
    [loss] = [work for name, work in works.items() if name.startswith("aten.nll_loss_forward")]
    assert 0 < timed_ops._made(loss.args, torch.device("cpu"))[0][1].max() < 50


def test_tensors_are_made_in_their_layout():
    whole = torch.empty(4, 6, 5)
    for tensor in (
        whole,
        whole.transpose(0, 2),
        whole[1:3, ::2],
        whole[:, :1].expand(4, 7, 5),
        whole[:0],
    ):
        made = timed_ops.TensorSpec.of(tensor).tensor(torch.device("cpu"))
        assert (made.shape, made.stride(), made.dtype) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
    large = timed_ops.TensorSpec((3_000_000,), (1,), torch.bfloat16).tensor(torch.device("cpu"))
    assert large.dtype == torch.bfloat16
    assert large.float().std() > 0.1


def test_views_count_once_where_they_look_into_what_was_made_and_each_time_where_into_a_weight():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            turned = (x + 1).t()
            return turned.exp() + turned.sin() + self.weight.t().cos() + self.weight.t().tanh()

    step = captured_step(trace(Views(), (torch.ones(4, 4),)), "views")
    views = {step.graph.kinds[task.op]: len(task.views) for task in timed_ops.timed_ops(step)}
    assert views["exp"] == 1
    assert views["sin"] == 0
    assert views["cos"] == views["tanh"] == 1


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.ops.append(call)
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw", "keep"])
def test_an_update_is_timed_by_the_ops_that_the_runtime_runs(kind):
    def ops(call):
        with Recorded() as recorded:
            call()
        return recorded.ops

    tensors = [torch.ones(3) for _ in range({"sgd": 2, "momentum": 3}.get(kind, 4))]
    ran = ops(lambda: Optimizer().update(kind)(1, *tensors))
    assert ops(lambda: updates.UPDATES[kind](*tensors)) == ran
    assert ran


def test_ops_are_timed_in_place_where_the_runtime_runs_them_in_place():
    model, _ = small_models.everything()
    step = captured()
    problem = virtual_problem(step, 1)
    with GraphRuntime(
        step, problem, problem.placement(np.zeros(step.graph.num_ops, int)), residents_of(model)
    ) as run:
        lines = _DeviceWriter(StepCode(step, problem, run.placement, run), 0).written()
    changed = {
        line.node: line.call
        for line in lines
        if getattr(getattr(line.call, "_schema", None), "is_mutable", 0)
    }
    assert changed
    assert {node: call for node, (call, _) in overwrites(step).items()} == changed
    timed = {task.call.call for task in timed_ops.timed_ops(step)}
    assert set(changed.values()) <= timed


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(2))
        )

    def forward(self, x):
        return self.layers(x)


def test_ops_that_read_big_weights_are_told():
    step = captured_step(trace(Weights(), (torch.ones(1, 1024, dtype=torch.bfloat16),)), "weights")
    assert [task.call.weight_bytes for task in timed_ops.timed_ops(step)] == [2 * 2**20] * 2
    found = Profiled(step, **SHORT).profile(step.graph, cluster("cpu"))  # no GPU, no copies
    assert np.array_equal(found.alone, found.beside)


class NoCopies:
    """In place of copies to a GPU, where there is none."""

    def __init__(self, device, both_ways):
        assert not both_ways  # nothing is updated

    def __enter__(self):
        NoCopies.running = True

    def __exit__(self, *details):
        NoCopies.running = False


def test_with_a_gpu_big_weights_are_read_twice_and_a_launch_takes_its_time(monkeypatch):
    step = captured_step(trace(Weights(), (torch.ones(1, 1024, dtype=torch.bfloat16),)), "weights")
    cpu, gpu = (
        timers.TimedDevice(torch.device("cpu"), "cpu*1", 1),
        timers.TimedDevice(torch.device("cuda", 0), "a GPU"),
    )
    timed = []

    def time(self, work):
        beside = getattr(NoCopies, "running", False)
        timed.append((self.timed.hardware, work.signature.partition("(")[0], beside))
        return (3e-6, 5e-6) if self.timed is gpu else (2e-3 if beside else 1e-3, 0.0)

    monkeypatch.setattr(timers, "timed_devices", lambda cluster: [cpu, gpu])
    monkeypatch.setattr(timers, "CopiesBeside", NoCopies)
    monkeypatch.setattr(timers.Timer, "time", time)
    monkeypatch.setattr(machine, "gpu_memory", lambda number: 0)  # no room for a whole step
    found = Profiled(step, in_step=False).profile(step.graph, cluster("cpu", "cuda:0"))
    assert timed == [
        ("cpu*1", "aten.mm.default", False),
        ("cpu*1", "aten.t.default", False),
        ("a GPU", "aten.mm.default", False),
        ("a GPU", "aten.t.default", False),
        ("a GPU", "input", False),
        ("cpu*1", "aten.mm.default", True),
    ]
    products = np.array(step.graph.kinds) == "mm"
    # The product, and the view it looks through.
    assert found.alone[products, 0] == pytest.approx(2e-3)
    assert found.beside[products, 0] == pytest.approx(3e-3)
    assert np.array_equal(found.costs.op_time, found.beside)
    # The input is there after 8 us. With the view: launched after 15 and 25 us, and 6 us on the GPU
    # each.
    given = step.graph.phase == INPUT
    assert found.costs.op_time[given].tolist() == [[0.0, pytest.approx(8e-6)]]
    assert found.costs.op_time[products, 1] == pytest.approx([13e-6, 10e-6])
    alone = Profiled(step, False, False, in_step=False).estimate(
        step.graph, cluster("cpu", "cuda:0")
    )
    assert alone.op_time[products, 0] == pytest.approx(2e-3)
    assert alone.op_time[products, 1] == pytest.approx(6e-6)
    assert len(timed) == 6


def test_launches_in_a_step_count_on_a_gpu(monkeypatch):
    step = captured_step(trace(Weights(), (torch.ones(1, 1024, dtype=torch.bfloat16),)), "weights")
    cpu, gpu = (
        timers.TimedDevice(torch.device("cpu"), "cpu*1", 1),
        timers.TimedDevice(torch.device("cuda", 0), "a GPU"),
    )
    seconds = {cpu.hardware: (1e-3, 0.0), gpu.hardware: (3e-6, 5e-6)}
    monkeypatch.setattr(timers, "timed_devices", lambda cluster: [cpu, gpu])
    monkeypatch.setattr(timers, "CopiesBeside", lambda device, both_ways: nullcontext())
    monkeypatch.setattr(timers.Timer, "time", lambda self, work: seconds[self.timed.hardware])
    monkeypatch.setattr(machine, "gpu_memory", lambda number: 2**33)
    launch = {"cpu": 4e-3, "cuda": 50e-6}
    row = [float(kind == "mm") for kind in step.graph.kinds]
    monkeypatch.setattr(
        whole_step,
        "replayed",
        lambda step, seconds, least, device: [launch[device.type] * each for each in row],
    )
    found = Profiled(step, in_step=True).estimate(step.graph, cluster("cpu", "cuda:0"))
    products = np.array(step.graph.kinds) == "mm"
    assert found.op_time[products, 0] == pytest.approx([4e-3, 4e-3])
    # The input: launched after 5 us, 3 us to come.
    assert found.op_time[products, 1] == pytest.approx([53e-6, 50e-6])
    launches_alone = Profiled(step, in_step=False).estimate(step.graph, cluster("cpu", "cuda:0"))
    # The product and its view.
    assert launches_alone.op_time[products, 0] == pytest.approx([2e-3, 2e-3])
    assert np.array_equal(launches_alone.op_time[:, 1], found.op_time[:, 1])


def test_a_host_that_is_ahead_costs_nothing():
    one_long = launched(np.array([100.0, 1.0, 1.0, 1.0]), np.array([5.0, 5.0, 5.0, 5.0]))
    assert one_long.tolist() == [105.0, 1.0, 1.0, 1.0]
    all_short = launched(np.array([1.0, 0.0, 1.0, 1.0]), np.array([5.0, 0.0, 5.0, 5.0]))
    assert all_short.tolist() == [6.0, 0.0, 5.0, 5.0]  # and a parameter, which is not launched


@pytest.mark.gpu
def test_a_step_on_cpu_and_gpu():
    for make in (small_models.everything, small_models.convolutions):
        step = captured(make)
        found = Profiled(step, **SHORT).profile(step.graph, cluster("cpu", "cuda:0"))
        assert found.fallen_back == ()
        assert (found.costs.op_time[takes_time(step)] > 0).all()
        graphs = Profiled(step, launches=False).profile(step.graph, cluster("cpu", "cuda:0"))
        assert graphs.num_timed == 0
        assert (graphs.costs.op_time <= found.costs.op_time + 1e-12).all()
        assert graphs.costs.op_time[:, 1].sum() < found.costs.op_time[:, 1].sum()


@pytest.mark.gpu
def test_big_weights_are_read_alone_and_beside_copies():
    step = captured_step(trace(Weights(), (torch.ones(1, 1024, dtype=torch.bfloat16),)), "weights")
    found = Profiled(step).profile(step.graph, cluster("cpu", "cuda:0"))
    [key] = [
        json.loads(path.read_text())["found"]
        for path in measurement_cache.folder().glob("profile-*.json")
    ]
    beside = [name for name in key if name.startswith("beside copies: cpu")]
    assert len(beside) == 1
    assert (found.alone[takes_time(step)] > 0).all()
    assert (found.beside[takes_time(step)] > 0).all()
    assert not np.array_equal(found.alone[:, 0], found.beside[:, 0])
    assert np.array_equal(found.alone[:, 1], found.beside[:, 1])
    assert np.array_equal(found.costs.op_time, found.beside)
    alone = Profiled(step, beside_copies=False).profile(step.graph, cluster("cpu", "cuda:0"))
    assert np.array_equal(alone.costs.op_time, found.alone)


def test_without_a_way_to_be_told_progress_is_logged(caplog, monkeypatch):
    """Of the first and the last, and now and then between them."""
    caplog.set_level("INFO")
    now = iter([0.0, 1.0, 2.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr("roost.cost_models.timing.progress_log.time.monotonic", lambda: next(now))
    told = ProgressLog()
    for done in range(1, 7):
        told(done, 6)
    assert caplog.messages == [f"timing ops: {done} of 6" for done in (1, 4, 6)]


def test_a_cpu_device_calls_in_a_thread_of_its_own():
    """It has the threads and cores of the device, which ops are timed with."""
    here = threading.current_thread()
    found, there = alone_on(cluster("cpu"), 0, lambda device: (device, threading.current_thread()))
    assert found == torch.device("cpu")
    assert there is not here
