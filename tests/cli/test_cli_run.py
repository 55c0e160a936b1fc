"""`roost run`: a placement on real devices."""

import json

import numpy as np
import pytest

from roost import zoo
from roost.core.cluster import Cluster, Device, Link
from roost.cost_models import estimate


@pytest.fixture
def folder(tmp_path):
    """Two threads as devices, and a placement of a training step over them."""
    figures = {"peak": {"float32": 1e11}, "memory_bandwidth": 1e10}
    devices = tuple(Device(f"cpu:{number}", "cpu", 2**34, **figures) for number in range(2))
    cluster = Cluster("threads", devices, (Link("*", "*", 1e10),))
    cluster.save(tmp_path / "threads.toml")
    problem = estimate(zoo.build("cifar10_cnn", train=True, optimizer="adam", batch=2), cluster)
    problem.placement(np.arange(problem.graph.num_ops) // 40 % 2).save(tmp_path / "placement.json")
    return tmp_path


def args(folder, *more):
    where = ("--on", folder / "threads.toml", "--placement", folder / "placement.json", "--set", "batch=2")
    return ("run", "cifar10_cnn", "--train", "--optimizer", "adam", *where, *more)


def test_it_runs_and_learns(roost, folder):
    result = roost(*args(folder, "--steps", "3", "--json"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == 3
    assert 0 < found["shortest"] <= found["step_time"] <= found["longest"]
    assert len(found["losses"]) == 5
    assert found["losses"][-1] < found["losses"][0]
    again = json.loads(roost(*args(folder, "--steps", "3", "--json")).stdout)
    assert again["losses"] == found["losses"]


def test_people_read_a_line(roost, folder):
    result = roost(*args(folder, "--steps", "1"), columns=200)
    assert "a step, median of 1" in result.stdout
    assert "loss: " in result.stdout


def test_what_is_refused(roost, folder):
    for more, said in (
        (("--steps", "0"), "--steps is 0"),
        (("--on", "k80x4"), "k80x4"),
        (("--placement", folder / "none.json"), "none.json"),
    ):
        result = roost(*args(folder, *more))
        assert result.exit_code == 2
        assert said in result.stderr
