"""The lines of several devices in one order."""

import threading

import numpy as np
import pytest
from test_graph_runtime import made

import roost
from roost.core.cluster import Cluster, Device, Link
from roost.runtime.ops.device_code import StepCode, _DeviceWriter
from roost.runtime.ops.lines import Line
from roost.runtime.ops.merged import has_time, merged
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.ops.transfers import launchers
from roost.runtime.step.devices import CpuDevice
from roost.runtime.step.unplaced import residents_of
from roost.simulator.compiled import simulate
from support.late import late_place
from support.runs import any_placement, mixed_problem, streamed


def line(op, gives=(), needs=()):
    return Line(op, print, (), gives=gives, needs=needs)


START, FINISH = np.array([0.0, 0.0, 1.0, 2.0, 3.0]), np.array([2.0, 1.0, 2.0, 3.0, 4.0])


def test_before_an_op_of_the_cpu_the_gpu_is_told_what_it_begins_meanwhile():
    cpu, gpu = [line(0)], [line(1), line(2), line(3), line(4)]
    assert [each.op for each in merged({0: cpu, 1: gpu}, [1], START, FINISH)] == [1, 2, 0, 3, 4]


def test_what_waits_for_an_op_of_the_cpu_comes_after_it():
    cpu = [line(0, gives=(("value", 0, 1),))]
    gpu = [line(1), line(2, needs=((("value", 0, 1), 1),)), line(3)]
    assert [each.op for each in merged({0: cpu, 1: gpu}, [1], START, FINISH)] == [1, 0, 2, 3]


def test_a_line_waits_for_all_who_read():
    read = ("read", 7, -1)
    cpu = [line(0, needs=((read, 2),))]
    gpu = [line(1, gives=(read,)), line(3), line(4, gives=(read,))]
    assert [each.op for each in merged({0: cpu, 1: gpu}, [1], START, FINISH)] == [1, 3, 4, 0]


@pytest.mark.parametrize("kinds", ["cg", "gc", "gg", "cgg"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_line_comes_before_what_it_needs_and_each_device_keeps_its_order(kinds, optimizer):
    model, _, step = made(optimizer)
    problem = mixed_problem(
        step, *(f"{'cpu' if kind == 'c' else 'cuda'}:{n}" for n, kind in enumerate(kinds))
    )
    rng, crossed = np.random.default_rng(9), 0
    for make in [any_placement, streamed] * 3:
        placement = make(problem, rng)
        devices = [CpuDevice() if kind == "c" else late_place() for kind in kinds]
        with GraphRuntime(step, problem, placement, residents_of(model), devices=devices) as run:
            code = StepCode(step, problem, placement, run)
            rows = {device: _DeviceWriter(code, device).written() for device in range(len(kinds))}
        timeline = simulate(problem, placement, full=True)
        told = [device for device, kind in enumerate(kinds) if kind == "g"]
        lines = merged(rows, told, timeline.start, timeline.finish)
        number = {id(each): place for place, each in enumerate(lines)}
        assert len(number) == sum(map(len, rows.values()))
        for row in rows.values():
            places_of = [number[id(each)] for each in row]
            assert places_of == sorted(places_of)
        given = []
        for each in lines:
            for key, count in each.needs:
                assert given.count(key) >= count
                crossed += 1
            given += each.gives
    assert crossed > 0


def test_one_cpu_may_share_a_thread_with_the_gpus_and_several_do_not():
    cpu, gpu = CpuDevice(), late_place()
    assert launchers([cpu, gpu, gpu], True) == [[0, 1, 2]]
    assert launchers([cpu, gpu, gpu]) == [[0], [1], [2]]
    assert launchers([gpu, gpu], True) == [[0, 1]]
    assert launchers([cpu, gpu, cpu, gpu], True) == [[0], [1], [2], [3]]
    assert launchers([cpu, cpu], True) == [[0], [1]]


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, True), (0.8, False), (1.0, False)])
def test_a_cpu_that_is_busy_most_of_the_time_has_no_time_for_the_gpu(seconds, expected):
    builder = roost.GraphBuilder("two")
    builder.add("a", "op", output_bytes=1)
    builder.add("b", "op", output_bytes=1)
    cluster = Cluster(
        "c", (Device("cpu", "cpu", 10), Device("cuda:0", "cuda", 10)), (Link("*", "*", 1.0),)
    )
    problem = roost.Problem(builder.freeze(), cluster, np.array([[seconds, 9.0], [9.0, 1.0]]))
    assert has_time(simulate(problem, problem.placement([0, 1]), full=True), [1]) == expected


@pytest.mark.parametrize("one_thread", [True, False])
def test_a_step_starts_no_thread(one_thread):
    """It would stay, and hold all that the run has, where the run is closed meanwhile after a
    failure elsewhere."""
    model, inputs, step = made("adam")
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(2)
    for _ in range(3):
        devices = [CpuDevice(), late_place()]
        settings = {"devices": devices, "one_thread": one_thread}
        with GraphRuntime(
            step, problem, any_placement(problem, rng), residents_of(model), **settings
        ) as run:
            before = set(threading.enumerate())
            run.step(*inputs)
            assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("one_thread", "expected"), [(True, [[0, 1]]), (False, [[0], [1]])])
def test_whoever_runs_it_may_say_whether_one_thread_has_both(one_thread, expected):
    model, inputs, step = made()
    problem = mixed_problem(step, "cpu", "cuda:0")
    placement = any_placement(problem, np.random.default_rng(1))
    devices = [CpuDevice(), late_place()]
    with GraphRuntime(
        step, problem, placement, residents_of(model), devices=devices, one_thread=one_thread
    ) as run:
        assert run.launchers == expected
        run.step(*inputs)
