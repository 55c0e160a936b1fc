"""Costs held against whole steps."""

import numpy as np
import pytest
import torch
from torch import nn

import roost
from roost.core.cluster import Device
from roost.core.problem import Problem
from roost.frontends.torch import step_of
from roost.runtime import calibrate
from roost.runtime.calibrate import calibrated
from roost.testing.runs import residents_of, virtual_problem


@pytest.fixture
def case():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(3, 16)
    step = step_of(model, x)
    return model, x, step, virtual_problem(step)


def test_all_on_one_device_takes_what_was_measured(case, monkeypatch, caplog):
    model, x, step, problem = case
    taken = iter((0.5, 0.02))
    monkeypatch.setattr(calibrate, "_step_time", lambda run, inputs, seconds: next(taken))
    found, slower = calibrated(step, problem, residents_of(model), x)
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
    tight = Problem(problem.graph, roost.Cluster("tight", small, problem.cluster.links), problem.costs)
    found, slower = calibrated(step, tight, residents_of(model), (x,), seconds=0.01)
    assert set(slower) == {"cpu:0"}
    assert slower["cpu:0"] > 0
    assert (found.op_time[:, 1] == problem.op_time[:, 1]).all()
    assert found.op_time[:, 0].sum() == pytest.approx(problem.op_time[:, 0].sum() * slower["cpu:0"])


def test_a_step_that_fails_is_told_and_left(case, caplog):
    model, _, step, problem = case
    found, slower = calibrated(step, problem, residents_of(model), torch.ones(2, 2))  # other inputs than captured
    assert slower == {}
    assert (found.op_time == problem.op_time).all()
    assert found.costs.source == problem.costs.source
    assert "the whole step could not be run on cpu:0: input " in caplog.text


def test_steps_do_not_change_the_weights(case):
    model, x, step, problem = case
    before = {name: value.clone() for name, value in residents_of(model).items()}
    calibrated(step, problem, residents_of(model), {step.program.inputs[0]: x}, seconds=0.01)
    assert all(torch.equal(value, before[name]) for name, value in residents_of(model).items())
