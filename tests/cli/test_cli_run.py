"""`roost run`: a placement on real devices."""

import json

import numpy as np
import pytest

import roost as library
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
    where = (
        "--on",
        folder / "threads.toml",
        "--placement",
        folder / "placement.json",
        "--set",
        "batch=2",
    )
    return ("run", "cifar10_cnn", "--train", "--optimizer", "adam", *where, *more)


def test_it_runs_and_learns(roost, folder):
    result = roost(*args(folder, "--steps", "3", "--json"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == 3
    assert 0 < found["shortest"] <= found["step_time"] <= found["longest"]
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]
    # Of which CPUs have none.
    again = json.loads(roost(*args(folder, "--steps", "3", "--json", "--graphs")).stdout)
    assert again["losses"] == found["losses"]


def test_people_read_a_line(roost, folder):
    result = roost(*args(folder, "--steps", "1"), columns=200)
    assert "a step, median of 1" in result.stdout
    assert "loss: " in result.stdout


def test_costs_are_a_file(roost, folder):
    result = roost(*args(folder, "--costs", "profiled"), columns=200)
    assert result.exit_code == 2
    assert "roost profile MODEL" in result.output


def test_what_ran_when_is_written(roost, folder):
    files = {"--timeline": folder / "measured.json.gz", "--trace": folder / "trace.json.gz"}
    result = roost(
        *args(folder, "--steps", "1", *(word for pair in files.items() for word in pair)),
        columns=200,
    )
    assert result.exit_code == 0, result.output
    assert "cpu:0 computes for" in result.stdout
    found = library.load(files["--timeline"])
    assert found.source == "measured"
    assert 0 < found.busy.max() <= found.step_time
    assert files["--trace"].exists()
    bad = roost(*args(folder, "--trace", folder / "nowhere" / "trace.json"))
    assert bad.exit_code == 2
    assert "nowhere" in bad.output


@pytest.fixture
def placed(roost, folder):
    """A folder as `roost place -o` writes it, with costs that no roofline has."""
    graph = zoo.build("cifar10_cnn", train=True, optimizer="adam", batch=2)
    cluster = library.cluster(folder / "threads.toml")
    costs = library.Costs(np.where(graph.is_parameter, 0.0, 0.5)[:, None].repeat(2, 1), "profiled")
    library.Problem(graph, cluster, costs).save(folder / "profiled.json")
    found = roost(
        "place",
        folder / "profiled.json",
        "--trials",
        20,
        "--placer",
        "single",
        "-o",
        folder / "out",
    )
    assert found.exit_code == 0, found.output
    return folder / "out"


def test_a_folder_of_place_brings_cluster_and_costs(roost, placed):
    own = (
        "run",
        "cifar10_cnn",
        "--train",
        "--optimizer",
        "adam",
        "--set",
        "batch=2",
        "--steps",
        "1",
    )
    expected = library.load(placed / "timeline.json.gz").step_time
    for more in (
        ("--placement", placed),
        ("--placement", placed / "placement.json"),
        ("--placement", placed, "--costs", placed.parent / "profiled.json"),
    ):
        result = roost(*own, *more, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["estimated"], found["costs"]) == (expected, "profiled")
    assert "expected, costs: profiled\n" in roost(*own, "--placement", placed, columns=200).stdout
    named = json.loads(
        roost(*own, "--placement", placed, "--on", placed.parent / "threads.toml", "--json").stdout
    )
    assert (named["cluster"], named["costs"]) == ("threads", "roofline")
    verified = roost("verify", *own[1:-2], "--placement", placed)
    assert verified.exit_code == 0, verified.output


def test_a_problem_of_another_model_is_refused_with_both(roost, placed, folder):
    other = (
        "run",
        "cifar10_cnn",
        "--train",
        "--set",
        "batch=2",
        "--steps",
        "1",
        "--placement",
        placed,
    )
    said = roost(*other).stderr
    assert "problem.json.gz: is a problem of graph 'cifar10_cnn', " in said
    assert "cifar10_cnn as given here is " in said
    both = roost(*other, "--costs", folder / "profiled.json", "--on", "here")
    assert both.exit_code == 2
    assert "leave out --on" in both.stderr
    placement = roost(*other, "--costs", folder / "placement.json")
    assert placement.exit_code == 2
    assert "is a placement file" in placement.stderr


def test_what_is_refused(roost, folder):
    for more, said in (
        (("--steps", "0"), "--steps is 0"),
        (("--on", "k80x4"), "k80x4"),
        (("--placement", folder / "none.json"), "none.json"),
    ):
        result = roost(*args(folder, *more))
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_placement_that_is_not_there_is_told_before_a_cluster_is_missed(roost, tmp_path):
    for where, said in (
        (tmp_path / "none", "no such file or folder"),
        (tmp_path, "has no placement.json; name a"),
    ):
        for verb in (("run",), ("verify",), ("export", "--format", "device_map")):
            result = roost(*verb, "cifar10_cnn", "--placement", where, columns=400)
            assert result.exit_code == 2
            assert f"{where}: {said}" in result.stderr
