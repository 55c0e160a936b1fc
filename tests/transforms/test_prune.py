"""What is pruned, what is not, and that nothing is lost by it."""

import numpy as np
import pytest
from tangled import anywhere, tangled

from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.simulator import reference
from roost.transforms.prune import Prune
from support.nasty import nasty


def pruned(builder, **settings):
    done = Prune(**settings).apply(builder.freeze())
    stands_for = {
        name: done.graph.op_names[new]
        for name, new in zip(done.original.op_names, done.new_op, strict=True)
    }
    return done.graph, stands_for


def inputs(graph, name):
    return [graph.op_names[op] for op in graph.inputs_of(graph.index_of(name))]


def test_a_view_becomes_one_with_what_it_looks_at():
    builder = GraphBuilder()
    builder.add("conv", flop=5, output_bytes=40)
    builder.add("view", inputs=["conv"], output_bytes=40)
    builder.add("again", inputs=["view"], output_bytes=40)
    builder.add("relu", inputs=["again", "conv"], flop=1, output_bytes=40)
    graph, stands_for = pruned(builder)
    assert graph.op_names == ("conv", "relu")
    assert inputs(graph, "relu") == ["conv"]
    assert stands_for == {"conv": "conv", "view": "conv", "again": "conv", "relu": "relu"}


@pytest.mark.parametrize(
    "change", [{"output_bytes": 20}, {"bytes_read": 1}, {"flop": 1}, {"workspace_bytes": 1}]
)
def test_a_slice_or_an_op_that_does_something_is_kept(change):
    builder = GraphBuilder()
    builder.add("conv", flop=5, output_bytes=40)
    builder.add("part", inputs=["conv"], **{"output_bytes": 40, **change})
    builder.add("relu", inputs=["part"], flop=1, output_bytes=20)
    graph, _ = pruned(builder)
    assert graph.num_ops == 3


def test_a_view_of_a_parameter_goes_with_its_first_consumer():
    builder = GraphBuilder()
    builder.parameter("weight", 40)
    builder.add("transposed", inputs=["weight"], output_bytes=40)
    builder.add("viewed", inputs=["transposed"], output_bytes=40)
    builder.add("forward", inputs=["viewed"], flop=1, output_bytes=8)
    builder.add(
        "backward", inputs=["forward", "transposed"], flop=1, output_bytes=8, phase="backward"
    )
    graph, stands_for = pruned(builder)
    assert graph.op_names == ("weight", "forward", "backward")
    assert inputs(graph, "backward") == ["forward", "weight"]
    assert stands_for["transposed"] == stands_for["viewed"] == "forward"


def test_a_view_of_a_parameter_that_an_update_reads_is_kept():
    builder = GraphBuilder()
    builder.parameter("weight", 40)
    builder.add("view", inputs=["weight"], output_bytes=40)
    builder.add("step", inputs=["view"], flop=1, output_bytes=40, phase="update")
    graph, _ = pruned(builder)
    assert graph.num_ops == 3


def test_dead_ops_go_and_take_with_them_what_only_they_used():
    builder = GraphBuilder()
    builder.add("conv", flop=5, output_bytes=40)
    builder.add("empty", inputs=["conv"])
    builder.add("assert", inputs=["empty"])
    builder.add("no_grad")
    builder.add("result", inputs=["conv"], output_bytes=20)
    graph, stands_for = pruned(builder)
    assert graph.op_names == ("conv", "result")
    assert stands_for["empty"] == stands_for["assert"] == "conv"


def test_an_op_that_brings_others_together_is_kept():
    builder = GraphBuilder()
    builder.add("one", flop=5, output_bytes=40)
    builder.add("other", flop=5, output_bytes=40)
    builder.add("output", inputs=["one", "other"])
    graph, _ = pruned(builder)
    assert graph.num_ops == 3


def test_unused_parameters_are_dropped_only_on_demand():
    builder = GraphBuilder()
    builder.parameter("unused", 40)
    builder.parameter("bound", 40, group="g")
    builder.add("op", flop=1)
    assert pruned(builder)[0].num_ops == 3
    graph, stands_for = pruned(builder, drop_unused_parameters=True)
    assert graph.op_names == ("bound", "op")
    assert stands_for["unused"] == "op"


def test_nothing_but_dead_ops_is_kept():
    builder = GraphBuilder()
    builder.add("one")
    builder.add("other")
    assert pruned(builder)[0].num_ops == 2


@pytest.mark.parametrize(
    ("conv", "view", "folds"),
    [
        ({}, {"group": "g"}, False),
        ({"group": "h"}, {"group": "g"}, False),
        ({"group": "g"}, {"group": "g"}, True),
        ({"group": "g"}, {}, True),
        ({}, {"allowed": ["cuda"]}, False),
        ({"allowed": ["cuda"]}, {"allowed": ["cpu", "cuda"]}, True),
        ({"allowed": ["cuda"]}, {}, True),
    ],
)
def test_a_view_only_folds_where_its_rules_allow(conv, view, folds):
    builder = GraphBuilder()
    builder.add("conv", flop=5, output_bytes=40, **conv)
    builder.add("view", inputs=["conv"], output_bytes=40, **view)
    builder.add("relu", inputs=["view"], flop=1)
    graph, _ = pruned(builder)
    assert graph.num_ops == (2 if folds else 3)


@pytest.mark.parametrize("seed", range(120))
def test_on_one_device_the_step_takes_as_long_and_no_more_memory(seed):
    problem = tangled(seed, kinds=False) if seed % 2 else nasty(seed)[0]
    done = Prune().apply(problem.graph)
    fewer = done.problem(problem)
    placement = Placement(np.zeros(done.graph.num_ops, int))
    small, large = (
        reference.simulate(fewer, placement),
        reference.simulate(problem, done.expand(placement)),
    )
    if not problem.cluster.devices[0].gap:
        assert small.step_time == pytest.approx(large.step_time)
    assert (small.peak_memory <= large.peak_memory).all()


@pytest.mark.parametrize("seed", range(120))
def test_parameters_and_work_are_kept_and_pruning_twice_is_pruning_once(seed):
    problem = tangled(seed)
    graph = problem.graph
    done = Prune().apply(graph)
    kept = done.graph
    assert (
        kept.output_bytes[kept.is_parameter].sum() == graph.output_bytes[graph.is_parameter].sum()
    )
    assert kept.is_parameter.sum() == graph.is_parameter.sum()
    for column in ("flop", "bytes_read", "bytes_written", "workspace_bytes"):
        assert getattr(kept, column).sum() == getattr(graph, column).sum()
    assert Prune().apply(kept).graph == kept
    assert (
        kept.num_ops == graph.num_ops - done.counts["prune.folded"] - done.counts["prune.dropped"]
    )
    problem.check(done.expand(anywhere(done.problem(problem), seed)))
