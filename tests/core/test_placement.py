"""A placement belongs to a problem, or the error says why not."""

from dataclasses import replace

import numpy as np
import pytest

import roost
from roost.errors import InputError, UnknownName
from roost.simulator import compiled, reference

BAD = {
    "wrong length": ({"device": np.array([0, 1])}, "has 2 entries; graph 'small' has 5 ops"),
    "unknown number": (
        {"device": np.array([0, 1, 1, 1, 3])},
        "op 'u' is on device 3; devices are 0 to 2",
    ),
    "negative": ({"device": np.array([0, 1, 1, 1, -1])}, "op 'u' is on device -1"),
    "split group": (
        {"device": np.array([0, 1, 2, 1, 1])},
        "'a' and 'b' share the group 'g'.*'cuda:1' and 'cuda:0'",
    ),
    "forbidden kind": (
        {"device": np.array([0, 0, 0, 0, 0])},
        "op 'b' may only run on cuda; .* 'cpu:0', a cpu",
    ),
    "other graph": ({"graph": "0123"}, "was made for graph 0123"),
    "windows": ({"prefetch_bytes": np.array([1, 2])}, "one entry for each of 3 devices"),
    "unknown device": (
        {"devices": ("cpu:0", "cuda:0", "cuda:7")},
        "no device of cluster 'k80x2' called 'cuda:7'; did you mean",
    ),
}


@pytest.mark.parametrize("simulate", [reference.simulate, compiled.simulate])
@pytest.mark.parametrize("case", BAD)
def test_a_placement_that_does_not_belong_is_refused(problem, placement, case, simulate):
    change, message = BAD[case]
    with pytest.raises(InputError, match=message):
        simulate(problem, replace(placement, **change))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": np.array([0.5])}, "device has 0.5; it must be whole"),
        ({"device": np.array([[0]])}, "whole numbers"),
        ({"device": np.array([0]), "order": "fast"}, "order 'fast' must be one of program"),
        ({"device": np.array([0]), "order": "priority"}, "has priorities exactly when"),
        (
            {"device": np.array([0]), "order": "priority", "priority": np.array([np.nan])},
            "priority of op 0",
        ),
        (
            {"device": np.array([0]), "order": "priority", "priority": np.array([1.0, 2.0])},
            "priority must have shape",
        ),
        ({"device": np.array([0]), "prefetch_bytes": -1}, "prefetch_bytes must be bytes"),
        ({"device": np.array([0]), "prefetch_bytes": 2**62}, "more than"),
        ({"device": np.array([0]), "prefetch_bytes": 2**63}, "must be whole"),
        ({"device": np.array([2**32])}, "must be whole"),
        ({"device": [[0], [1, 2]]}, "device"),
        ({"device": ["a"]}, "must be numbers"),
        ({"device": np.array([0]), "devices": ("a", "a")}, "repeat a name"),
    ],
)
def test_a_placement_that_is_none(settings, message):
    with pytest.raises(InputError, match=message):
        roost.Placement(**settings)


def test_devices_are_found_by_name(problem, placement):
    names = ("cuda:1", "cuda:0", "cpu:0")
    window = np.array([0, 64, 0])
    same = roost.Placement(np.array([2, 1, 1, 1, 1]), devices=names, prefetch_bytes=window)
    checked = problem.check(same)
    assert checked.device.tolist() == placement.device.tolist()
    assert np.asarray(checked.prefetch_bytes).tolist() == [0, 64, 0]


def test_moved_makes_a_new_placement(placement):
    moved = placement.moved([2, 3], 2)
    assert moved.device.tolist() == [0, 1, 2, 2, 1]
    assert placement.device.tolist() == [0, 1, 1, 1, 1]
    assert moved != placement
    assert moved.moved([2, 3], 1) == placement


def test_nouns_are_frozen(graph, placement, problem):
    for array in (
        graph.flop,
        placement.device,
        problem.op_time,
        problem.cluster.latency,
        problem.cluster.bus,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_batches_and_neighbours_are_checked_too(problem, placement):
    simulator = roost.Simulator(problem)
    good = np.array([placement.device, placement.device])
    for op, device, message in (
        (4, 3, "devices are 0 to 2"),
        (2, 2, "share the group"),
        (4, -1, "device -1"),
    ):
        bad = good.copy()
        bad[1, op] = device
        with pytest.raises(InputError, match=message):
            simulator.evaluate(bad)
        with pytest.raises(InputError, match=message):
            simulator.neighbours(placement, np.array([0, 0, 1]), np.array([op]), np.array([device]))
    with pytest.raises(InputError, match="may only run on cuda"):
        simulator.neighbours(placement, np.array([0, 2]), np.array([2, 3]), np.array([0, 0]))
    with pytest.raises(InputError, match="share the group"):  # only the first of a group moves
        simulator.neighbours(placement, np.array([0, 1]), np.array([2]), np.array([2]))
    with pytest.raises(InputError, match="moves op 9"):
        simulator.neighbours(placement, np.array([0, 1]), np.array([9]), np.array([0]))
    with pytest.raises(InputError, match="move_start"):
        simulator.neighbours(placement, np.array([0, 2]), np.array([4]), np.array([0]))
    with pytest.raises(InputError, match=r"must be \[batch, 5\]"):
        simulator.evaluate(np.zeros((2, 4), int))
    with pytest.raises(InputError, match="order 'priority'"):
        simulator.evaluate(good, order="priority")


def test_problem_refuses_what_does_not_fit_together(graph, cluster, problem):
    with pytest.raises(InputError, match=r"op_time is \[5, 2\].* must be \[5, 3\]"):
        roost.Problem(graph, cluster, np.zeros((5, 2)))
    with pytest.raises(InputError, match="op_time of parameter 'w' must be 0"):
        roost.Problem(graph, cluster, np.ones((5, 3)))
    with pytest.raises(InputError, match="op 'b' may only run on cuda; cluster 'cpu' has cpu"):
        roost.estimate(graph, roost.cluster("cpu"))
    with pytest.raises(UnknownName, match="did you mean 'roofline'"):
        roost.estimate(graph, cluster, model="roofine")


def test_a_problem_makes_placements_that_say_what_they_are_for(problem):
    made = problem.placement([0, 1, 1, 1, 1], "rank", prefetch_bytes=5)
    assert (made.graph, made.devices) == (problem.graph.digest, problem.cluster.device_names)
    assert (made.order, made.prefetch_bytes) == ("rank", 5)
    assert problem.check(made) is made
    with pytest.raises(InputError, match="priorities exactly when"):
        problem.placement([0] * 5, "priority")


def test_a_trial_and_a_result_are_a_line_each(problem):
    result = roost.solve(problem, "single", trials=20)
    for noun in (result, result.best):
        assert str(noun) == repr(noun)
        assert " a step, fits, by single)" in str(noun)
        assert len(str(noun)) < 200
        assert "\n" not in str(noun)
    assert "'small' on 'k80x2'" in str(result)
    lacking = replace(result.best, feasible=False, missing_bytes=2048)
    assert "lacks 2.0 KiB" in str(lacking)
