"""Costs held against whole steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import roost
from roost.core.cluster import Device, Link
from roost.core.problem import Problem
from roost.frontends.torch import step_of
from roost.runtime.ops import calibrate
from roost.runtime.ops.calibrate import Crossings, calibrated, with_crossings
from roost.runtime.step.unplaced import residents_of
from support.runs import any_placement, virtual_problem


@pytest.fixture
def case():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.randn(3, 16),
    )
    step = step_of(model, x)
    return model, x, step, virtual_problem(step)


def test_all_on_one_device_takes_what_was_measured(case, monkeypatch, caplog):
    model, x, step, problem = case
    taken = iter((0.5, 0.02))
    monkeypatch.setattr(calibrate, "_step_time", lambda run, inputs, seconds: next(taken))
    monkeypatch.setattr(calibrate, "_PIECES", ())
    whole = calibrated(step, problem, residents_of(model), x)
    found, slower = whole.problem, whole.slower
    assert found.cluster is problem.cluster
    for number, seconds in enumerate((0.5, 0.02)):
        alone = problem.placement(np.full(problem.graph.num_ops, number))
        assert roost.simulate(found, alone).step_time == pytest.approx(seconds)
        before = roost.simulate(problem, alone).step_time
        assert slower[f"cpu:{number}"] == pytest.approx(seconds / before)
    assert found.costs.source.endswith("held against whole steps on cpu:0 and cpu:1")
    assert found.graph is problem.graph
    assert "a whole step on cpu:0 takes 1.2e+02 times what its ops take" in caplog.text


def test_a_device_that_it_does_not_fit_on_keeps_its_costs(case):
    model, x, step, problem = case
    small = (problem.cluster.devices[0], Device("cpu:1", "cpu", 64))
    tight = Problem(
        problem.graph, roost.Cluster("tight", small, problem.cluster.links), problem.costs
    )
    whole = calibrated(step, tight, residents_of(model), (x,), seconds=0.01)
    found, slower = whole.problem, whole.slower
    assert set(slower) == {"cpu:0"}
    assert slower["cpu:0"] > 0
    assert (found.op_time[:, 1] == problem.op_time[:, 1]).all()
    assert found.op_time[:, 0].sum() == pytest.approx(problem.op_time[:, 0].sum() * slower["cpu:0"])


def test_a_step_that_fails_is_told_and_left(case, caplog):
    model, _, step, problem = case
    # Other inputs than captured.
    whole = calibrated(step, problem, residents_of(model), torch.ones(2, 2))
    found, slower = whole.problem, whole.slower
    assert slower == {}
    assert (found.op_time == problem.op_time).all()
    assert found.costs.source == problem.costs.source
    assert "the whole step could not be run on cpu:0: input " in caplog.text


def test_steps_do_not_change_the_weights(case):
    model, x, step, problem = case
    before = {name: value.clone() for name, value in residents_of(model).items()}
    calibrated(step, problem, residents_of(model), {step.program.inputs[0]: x}, seconds=0.01)
    assert all(torch.equal(value, before[name]) for name, value in residents_of(model).items())


@pytest.fixture(scope="module")
def recurrent():
    torch.manual_seed(0)
    model, inputs = roost.zoo.model("rnnlm", layers=1, hidden=8, vocab=20, length=3, batch=2)
    step = step_of(model, inputs, train=True, optimizer="adam")
    return SimpleNamespace(model=model, inputs=inputs, step=step, problem=virtual_problem(step))


def linked(problem, **figures):
    """The problem with links that cost something."""
    link = Link("*", "*", 1e9, 2e-5, **figures)
    cluster = roost.Cluster("linked", problem.cluster.devices, (link,))
    return Problem(problem.graph, cluster, problem.costs)


@pytest.mark.parametrize(
    ("figures", "truth"),
    [
        ({"sender_busy": 1e-3, "receiver_busy": 4e-3}, Crossings(0.5, 0.0)),
        ({"sender_busy": 1e-5, "receiver_busy": 1e-4}, Crossings(3.0, 1e-4)),
        ({}, Crossings(1.0, 1e-4)),  # links that keep no device busy have a longer way instead
        ({"sender_busy": 1e-3, "receiver_busy": 4e-3}, Crossings()),
    ],
)
def test_what_crossings_cost_is_found_from_steps_in_pieces(recurrent, monkeypatch, figures, truth):
    """A machine that is as simulated, but for its crossings: they are found, and other placements
    predicted."""
    problem = linked(recurrent.problem, **figures)
    problem = Problem(problem.graph, problem.cluster, problem.op_time * 1e-2)
    real = Problem(problem.graph, with_crossings(problem.cluster, truth), problem.costs)
    monkeypatch.setattr(
        calibrate, "_step_time", lambda run, *_: roost.simulate(real, run.placement).step_time
    )
    whole = calibrated(recurrent.step, problem, residents_of(recurrent.model), recurrent.inputs)
    assert whole.crossings == truth
    rng = np.random.default_rng(0)
    for _ in range(5):
        placement = any_placement(problem, rng)
        expected = roost.simulate(real, placement).step_time
        assert roost.simulate(whole.problem, placement).step_time == pytest.approx(expected)


def test_groups_stay_together_in_pieces_and_all_of_it_is_run(recurrent):
    for placement in calibrate._in_pieces(recurrent.problem, ["cpu:0", "cpu:1"]):
        recurrent.problem.check(placement)
        assert set(placement.device.tolist()) == {0, 1}
    given = residents_of(recurrent.model), recurrent.inputs
    whole = calibrated(recurrent.step, recurrent.problem, *given, seconds=0.01)
    assert set(whole.slower) == {"cpu:0", "cpu:1"}
    assert whole.crossings.times > 0
