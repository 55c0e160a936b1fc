"""Parameters that do not fit on the fastest device move to where there is room."""

from dataclasses import replace

import numpy as np

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.placers._starts.offload import offloaded
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating


def wide_at_the_start(memory):
    """A chain whose first tensors are large, and its last weights."""
    builder = GraphBuilder("wide at the start")
    last = [builder.add("image", "input", [], phase="input", output_bytes=10)]
    for number, (weight, made) in enumerate(
        [(5, 400), (0, 400), (0, 40), (90, 40), (90, 40), (90, 10)]
    ):
        inputs = [*([builder.parameter(f"weight{number}", weight)] if weight else []), *last]
        last = [builder.add(f"op{number}", "conv", inputs, flop=1.0, output_bytes=made)]
    graph = builder.freeze()
    devices = (Device("cpu", "cpu", 10_000), Device("cuda:0", "cuda", memory))
    cluster = Cluster("small", devices, (Link("*", "*", 1e4),))
    return Problem(graph, cluster, Costs(np.where(graph.is_parameter[:, None], 0.0, [[1.0, 0.01]])))


def moved(problem):
    """The best way to make room on the GPU, and the ops that run elsewhere then."""
    evaluate = Evaluation(Search(problem, Simulating(problem, 1), Budget(1000)), "test")
    everything = problem.placement(np.full(problem.graph.num_ops, 1))
    best = offloaded(problem, evaluate, everything)[0]
    away = np.flatnonzero((best.placement.device == 0) & ~problem.graph.is_parameter)
    return best, {problem.graph.op_names[op] for op in away}


def test_weights_leave_first():
    best, away = moved(wide_at_the_start(950))
    assert best.feasible
    assert away == set()
    assert (best.placement.device == 0).any()


def test_where_that_is_too_little_ops_with_large_activations_leave_too():
    """Its second op reads and makes 400 bytes each, which a device of 600 cannot hold."""
    best, away = moved(wide_at_the_start(600))
    assert best.feasible
    assert "op1" in away
    assert away.isdisjoint({"op3", "op4", "op5"})


def test_what_an_op_holds_for_itself_counts():
    """Its last op needs 500 bytes for itself: it leaves, and nothing that does not have to."""
    problem = wide_at_the_start(600)
    graph = problem.graph
    space = np.where(np.array(graph.op_names) == "op5", 500, 0)
    best, away = moved(
        Problem(replace(graph, workspace_bytes=space), problem.cluster, problem.costs)
    )
    assert best.feasible
    assert away == {"op1", "op5"}


def test_weights_go_where_they_come_from_fastest_and_with_ops_that_leave():
    """Memory from which a CPU cannot read, as plans have it: weights lie there for the GPU, and
    with the CPU for it."""
    problem = wide_at_the_start(400)
    graph, devices = problem.graph, problem.cluster.devices
    names = ("cpu", "cuda:0", "memory")
    rates = {("memory", "cuda:0"): 1e4, ("cpu", "cuda:0"): 1e3, ("cuda:0", "cpu"): 1e4}
    links = [
        Link(a, b, rates.get((a, b), 1e-3), both_ways=False) for a in names for b in names if a != b
    ]
    cluster = Cluster("store", (*devices, Device("memory", "memory", 10_000)), tuple(links))
    long = np.where(graph.is_parameter, 0.0, 1e6)[:, None]
    best, away = moved(Problem(graph, cluster, Costs(np.hstack([problem.op_time, long]))))
    assert best.feasible
    assert best.step_time < 10
    home = dict(zip(graph.op_names, best.placement.device.tolist(), strict=True))
    assert "op0" in away
    assert home["weight0"] == 0
    assert {home[f"weight{number}"] for number in (3, 4, 5)} <= {1, 2}


def test_what_no_device_has_room_for_stays():
    problem = wide_at_the_start(600)
    poor = (Device("cpu", "cpu", 300), problem.cluster.devices[1])
    best, _ = moved(
        Problem(problem.graph, Cluster("poor", poor, problem.cluster.links), problem.costs)
    )
    assert not best.feasible
