"""Pipelines, data parallelism and mixtures on steps whose times are known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from layered_step import layered_step, machine, step_problem, unrolled

import roost
from roost.errors import InputError
from roost.placers._microbatches.copied_step import (
    BACKWARD_WORK,
    FORWARD_WORK,
    ONCE,
    WEIGHT_WORK,
    CopiedStep,
)
from roost.placers._microbatches.layouts import CopyLayout, balanced, replicated, whole
from roost.placers._microbatches.realised import devices_of, realised
from roost.placers._microbatches.task_schedule import SCHEDULES, scheduled
from roost.placers.pipeline import Pipeline
from roost.transforms.microbatch import SHARED

FORWARD, BACKWARD = 1.0, 2.0  # seconds of a layer and microbatch


def base_step(num_devices=4, **more):
    return CopiedStep.of(step_problem(layered_step(**more), machine(num_devices)))


def of_bases(step):
    """Name of each base op -> its element and kind of work."""
    names = [step.problem.graph.op_names[op].partition("#")[0] for op in step.first]
    return dict(zip(names, zip(step.element, step.kind, strict=True), strict=True))


def pipeline_layout(step, devices, count, chunks=1):
    return CopyLayout((balanced(step, list(devices) * chunks),), (0,) * count)


def test_gradients_of_weights_are_told_from_those_of_inputs():
    step = base_step()
    graph = step.problem.graph
    kind = {graph.op_names[op]: step.kind[base] for base, op in enumerate(step.first)}
    assert kind["y2"] == FORWARD_WORK
    assert kind["gx2"] == BACKWARD_WORK
    assert kind["gw2"] == WEIGHT_WORK
    assert kind["w2"] == kind["w2:update"] == ONCE


def test_an_unrolled_step_has_the_chain_of_its_microbatch():
    one = base_step()
    many = CopiedStep.of(unrolled(3))
    assert many.count == 3
    assert of_bases(many) == of_bases(one)
    assert np.allclose(many.work, one.work)
    assert many.is_sum.sum() == 4 * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [4, 8])
def test_a_pipeline_of_equal_stages_idles_as_published(name, count):
    # Idle for (D - 1) / (M + D - 1) of the step.
    step = base_step()
    schedule = scheduled(step, pipeline_layout(step, range(4), count), name)
    assert schedule.seconds == pytest.approx((count + 3) * (FORWARD + BACKWARD), rel=1e-6)


def test_chunks_divide_the_idle_time_of_a_pipeline():
    step = base_step(num_layers=8)
    whole_stages = scheduled(step, pipeline_layout(step, range(4), 8), "1f1b").seconds
    two_chunks = scheduled(step, pipeline_layout(step, range(4), 8, chunks=2), "1f1b").seconds
    busy = 8 * 2 * (FORWARD + BACKWARD)
    # Half of it as published; ours warms up by a simpler rule.
    assert two_chunks - busy <= 0.65 * (whole_stages - busy)


def test_gradients_of_weights_fill_the_gaps_of_a_pipeline():
    step = base_step()
    layout = pipeline_layout(step, range(4), 8)
    usual, filled = (scheduled(step, layout, name).seconds for name in ("1f1b", "zero_bubble"))
    busy = 8 * (FORWARD + BACKWARD)
    assert filled - busy <= 0.7 * (usual - busy)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tasks_wait_for_their_inputs_and_devices_do_one_at_a_time(name):
    step = base_step(num_layers=8)
    layout = pipeline_layout(step, range(2), 4, chunks=2)
    start = scheduled(step, layout, name).start
    seconds = np.array([2.0, 2.0, 2.0] if name == "zero_bubble" else [2.0, 4.0, 0.0])
    assert (start[:, 1:, 0] >= start[:, :-1, 0] + seconds[0]).all()
    assert (start[:, :-1, 1] >= start[:, 1:, 1] + seconds[1]).all()
    assert (start[:, :, 1] >= start[:, :, 0] + seconds[0]).all()
    kinds = 3 if name == "zero_bubble" else 2
    for chunks in ([0, 2], [1, 3]):
        begun = start[:, chunks, :kinds].ravel()
        order = np.argsort(begun)
        ends = begun + np.broadcast_to(seconds[:kinds], (4, 2, kinds)).ravel()
        assert (begun[order][1:] >= ends[order][:-1] - 1e-9).all()


def test_early_backward_passes_hold_fewer_activations():
    problem = unrolled(8, activation=10_000)
    step = CopiedStep.of(problem)
    layout = pipeline_layout(step, range(4), 8)
    peaks = {
        name: roost.simulate(problem, realised(step, scheduled(step, layout, name))).peak_memory[0]
        for name in ("gpipe", "1f1b")
    }
    assert peaks["1f1b"] < 0.8 * peaks["gpipe"]


def test_unlike_devices_get_unlike_stages_and_shares():
    problem = step_problem(layered_step(8), machine(2), (3.0, 1.0))
    step = CopiedStep.of(problem)
    replica = balanced(step, [0, 1])
    first = step.work[:, : replica.ends[0], 0].sum() * 3.0
    assert first == pytest.approx(6 * (FORWARD + BACKWARD))  # six layers of eight
    layout = replicated(step, [whole(step, 0), whole(step, 1)], 8)
    assert [len(copies) for copies in layout.copies] == [6, 2]


def test_whole_copies_are_on_one_device_each_and_state_is_spread():
    problem = unrolled(4)
    best = roost.solve(problem, "data_parallel", trials=50).best
    step = CopiedStep.of(problem)
    device = best.placement.device
    for copy in range(4):
        assert len(set(device[step.copy == copy].tolist())) == 1
    assert len(set(device[problem.graph.is_parameter].tolist())) == 4
    single = roost.solve(problem, "single", trials=10).best
    assert best.step_time < 0.3 * single.step_time


def test_sums_are_made_where_their_copies_are_or_at_home():
    problem = unrolled(4, num_devices=2)
    step = CopiedStep.of(problem)
    layout = replicated(step, [whole(step, 0), whole(step, 1)], 4)
    device = devices_of(step, layout)
    graph = problem.graph
    for op in np.flatnonzero(step.is_sum).tolist():
        places = {int(device[source]) for source in graph.inputs_of(op).tolist()}
        home = device[graph.index_of(graph.op_names[op].partition("#")[0].replace("g", "", 1))]
        assert device[op] == (places.pop() if len(places) == 1 else home)


def test_a_mixture_has_pipelines_side_by_side():
    problem = unrolled(8)
    best = roost.solve(problem, "hybrid", trials=100).best
    step = CopiedStep.of(problem)
    used = [set(best.placement.device[step.copy == copy].tolist()) for copy in range(8)]
    assert all(len(devices) == 2 for devices in used)
    assert len(set(map(frozenset, used))) == 2


def test_auto_is_no_worse_than_any_of_them():
    problem = unrolled(4)
    best = roost.solve(problem, "auto", trials=2000)
    for name in ("pipeline", "data_parallel", "hybrid"):
        assert best.baselines[name].step_time >= best.best.step_time


def test_an_unknown_schedule_is_refused():
    with pytest.raises(InputError, match="one of any, 1f1b"):
        Pipeline("2f2b")


def test_ops_that_exist_once_have_no_copy():
    step = CopiedStep.of(unrolled(2))
    once = step.copy == SHARED
    assert (step.problem.graph.is_parameter <= once).all()
