"""A coarse graph is still a graph, is small, and loses nothing but freedom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tangled import anywhere, tangled

from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.errors import GraphError, InputError
from roost.simulator import compiled, reference
from roost.testing.problems import scattered, training_like
from roost.transforms.coarsen import Coarsen
from roost.transforms.colocate import Colocate
from roost.transforms.merging.parts import stages
from support.nasty import nasty


def least(graph):
    """The fewest ops that phases and paths allow, where kinds forbid nothing."""
    return len(np.unique(stages(graph)[~graph.is_parameter])) + int(graph.is_parameter.any())


def units(graph):
    return len(
        np.unique(
            np.where(graph.group >= 0, graph.group, graph.num_groups + np.arange(graph.num_ops))
        )
    )


def check(problem, coarse, num_groups, kinds):
    """All that holds for every coarsening. That there is no cycle is checked when the graph is
    made."""
    graph, small = problem.graph, coarse.graph
    if kinds:
        assert small.num_ops <= num_groups + coarse.counts.get("coarsen.too_many", 0)
    else:
        assert small.num_ops <= max(num_groups, least(graph))
    assert np.array_equal(small.phase[coarse.new_op], graph.phase)
    assert small.flop.sum() == pytest.approx(graph.flop.sum())
    for column in ("bytes_read", "bytes_written"):
        assert getattr(small, column).sum() == getattr(graph, column).sum()
    assert (
        small.output_bytes[small.is_parameter].sum() == graph.output_bytes[graph.is_parameter].sum()
    )
    pairs = zip(graph.input_op.tolist(), graph.edge_target.tolist(), strict=True)
    edges = {(int(coarse.new_op[source]), int(coarse.new_op[target])) for source, target in pairs}
    found = set(zip(small.input_op.tolist(), small.edge_target.tolist(), strict=True))
    assert found == {(source, target) for source, target in edges if source != target}
    placement = anywhere(coarse.problem(problem), 1)
    expanded = problem.check(coarse.expand(placement))  # no group is split, no kind is broken
    for op in range(small.num_ops):
        assert len(set(expanded.device[np.flatnonzero(coarse.new_op == op)].tolist())) == 1


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 40),
    kinds=st.booleans(),
    groups=st.booleans(),
)
def test_any_graph(seed, num_groups, kinds, groups):
    problem = tangled(seed, kinds, groups)
    coarse = Coarsen(num_groups).apply(problem.graph)
    check(problem, coarse, num_groups, kinds)
    assert Coarsen(num_groups).apply(problem.graph).graph.digest == coarse.graph.digest


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 30))
def test_any_graph_by_decisions(seed, num_groups):
    problem = tangled(seed, kinds=False)
    coarse = Coarsen(num_groups, count_ops=False).apply(problem.graph)
    check(problem, coarse, problem.graph.num_ops, kinds=False)
    assert units(coarse.graph) <= max(num_groups, least(problem.graph))


@pytest.mark.parametrize("seed", range(100))
def test_nasty_graphs(seed):
    problem, _ = nasty(seed)
    for num_groups in (1, 5, 20):
        check(problem, Coarsen(num_groups).apply(problem.graph), num_groups, kinds=False)


@pytest.mark.parametrize("num_groups", [3, 50, 400])
@pytest.mark.parametrize("seed", range(3))
def test_training_graphs(seed, num_groups):
    problem = training_like(1500, 3, seed)
    coarse = Coarsen(num_groups).apply(problem.graph)
    check(problem, coarse, num_groups, kinds=False)
    weight = coarse.graph.flop[~coarse.graph.is_parameter]
    assert weight.max() <= max(4 * weight.mean(), 1.2 * problem.graph.flop.max())


@pytest.mark.parametrize("seed", range(60))
def test_on_one_device_the_step_takes_as_long(seed):
    problem = tangled(seed, kinds=False) if seed % 2 else training_like(300, 2, seed)
    coarse = Coarsen(20).apply(problem.graph)
    for order in ("program", "rank", "fifo"):
        placement = Placement(np.zeros(coarse.graph.num_ops, int), order)
        small = compiled.simulate(coarse.problem(problem), placement)
        large = compiled.simulate(problem, coarse.expand(placement))
        assert small.step_time == pytest.approx(large.step_time)


@pytest.mark.parametrize("seed", range(5))
def test_the_original_is_about_as_fast_as_the_coarse_graph_foretold(seed):
    problem = training_like(1000, 3, seed)
    coarse = Coarsen(60).apply(problem.graph)
    placement = Placement(scattered(coarse.problem(problem), seed))
    small = compiled.simulate(coarse.problem(problem), placement)
    large = compiled.simulate(problem, coarse.expand(placement))
    assert 0.6 * small.step_time <= large.step_time <= 1.05 * small.step_time


@pytest.mark.parametrize("seed", range(60))
def test_memory_of_a_part_is_what_it_holds_when_run_by_itself(seed):
    problem = tangled(seed, kinds=False)
    graph = problem.graph
    coarse = Coarsen(8).apply(graph)
    for new in range(coarse.graph.num_ops):
        members = np.flatnonzero(coarse.new_op == new).tolist()
        if len(members) < 2 or graph.is_parameter[members[0]]:
            continue
        leaving = {op for op in members if set(graph.consumers_of(op).tolist()) - set(members)}
        assert coarse.graph.output_bytes[new] == sum(graph.output_bytes[list(leaving)])
        peak = 0
        for at, op in enumerate(members):
            held = [
                o
                for o in members[: at + 1]
                if o in leaving
                or o == op
                or set(members[at:]) & set(graph.consumers_of(o).tolist())
            ]
            peak = max(peak, graph.output_bytes[held].sum() + graph.workspace_bytes[op])
        assert coarse.graph.output_bytes[new] + coarse.graph.workspace_bytes[new] == max(
            peak, coarse.graph.output_bytes[new]
        )


def test_what_a_coarse_op_says_of_its_ops():
    builder = GraphBuilder("net")
    builder.add(
        "conv",
        "conv2d",
        flop=90,
        output_bytes=10,
        dtype="float16",
        module="net.stem.conv",
        allowed=["cuda", "cpu"],
    )
    builder.add(
        "relu",
        "relu",
        ["conv"],
        flop=10,
        output_bytes=10,
        module="net.stem.act",
        allowed=["tpu", "cuda"],
    )
    builder.add(
        "pool", "pool", ["relu"], flop=1000, output_bytes=10, module="net.pool", group="late"
    )
    small = Coarsen(2).apply(builder.freeze()).graph
    assert small.name == "net"
    assert small.op_names == ("conv+1", "pool")
    assert small.kinds == ("merged", "pool")
    assert small.dtypes == ("float16", "float32")
    assert small.modules == ("net.stem", "net.pool")
    assert small.allowed == (("cuda",), ())
    assert small.group_names == ("late",)
    assert small.group.tolist() == [-1, 0]


def test_forward_and_backward_of_a_group_stay_two_ops_of_one_group():
    builder = GraphBuilder()
    builder.add("f1", flop=1, output_bytes=1, group="layer")
    builder.add("f2", inputs=["f1"], flop=1, output_bytes=1, group="layer")
    builder.add("loss", inputs=["f2"], flop=9, output_bytes=1)
    builder.add(
        "b2", inputs=["loss", "f2"], flop=1, output_bytes=1, group="layer", phase="backward"
    )
    builder.add("b1", inputs=["b2", "f1"], flop=1, output_bytes=1, group="layer", phase="backward")
    coarse = Coarsen(3).apply(builder.freeze())
    assert coarse.graph.op_names == ("f1+1", "loss", "b2+1")
    assert coarse.graph.group.tolist() == [0, -1, 0]


def test_parameters_and_updates_stay_with_what_reads_them():
    problem = training_like(400, 2)
    coarse = Coarsen(40).apply(problem.graph)
    graph, new_op = problem.graph, coarse.new_op
    first = {
        int(op): int(new_op[graph.consumers_of(op)[0]]) for op in np.flatnonzero(graph.is_parameter)
    }
    for new in np.flatnonzero(coarse.graph.is_parameter):
        assert len({first[int(op)] for op in np.flatnonzero(coarse.new_op == int(new))}) == 1


def test_groups_become_one_only_when_nothing_else_is_left():
    builder = GraphBuilder()
    for op in range(12):
        builder.add(
            f"op{op}",
            inputs=[f"op{op - 1}"] if op else [],
            flop=1,
            output_bytes=1,
            group=f"g{op // 4}",
        )
    graph = builder.freeze()
    assert Coarsen(3).apply(graph).graph.group_names == ("g0", "g1", "g2")
    assert len(Coarsen(2).apply(graph).graph.group_names) == 2
    assert Coarsen(1).apply(graph).graph.group_names == ("g0",)


def test_weight_may_be_given():
    builder = GraphBuilder()
    for op in range(8):
        builder.add(f"op{op}", inputs=[f"op{op - 1}"] if op else [], flop=1, output_bytes=1)
    graph = builder.freeze()
    light = Coarsen(2).apply(graph, weight=np.array([9.0, 1, 1, 1, 1, 1, 1, 1]))
    assert light.new_op.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    with pytest.raises(InputError, match="weight must be 8 finite figures"):
        Coarsen(2).apply(graph, weight=np.ones(7))


def test_bad_settings_and_impossible_groups_are_refused():
    with pytest.raises(InputError, match="num_groups is 0"):
        Coarsen(0)
    builder = GraphBuilder()
    builder.add("a", allowed=["cpu"], group="g")
    builder.add("b", allowed=["cuda"], group="g")
    with pytest.raises(GraphError, match="can go nowhere"):
        Coarsen(1).apply(builder.freeze())


def test_a_graph_that_is_small_enough_is_left_alone():
    problem = tangled(1)
    assert Coarsen(100).apply(problem.graph).graph is problem.graph


def test_ops_that_allow_no_common_kind_stay_apart_and_are_counted():
    builder = GraphBuilder()
    for op in range(6):
        kind = ["cpu", "cuda"][op % 2]
        builder.add(
            f"op{op}", inputs=[f"op{op - 1}"] if op else [], flop=1, output_bytes=1, allowed=[kind]
        )
    coarse = Coarsen(2).apply(builder.freeze())
    assert coarse.graph.num_ops == 6
    assert coarse.counts == {"coarsen.merged": 0, "coarsen.too_many": 4}


def test_colocated_graphs_keep_their_groups():
    problem = training_like(600, 2)
    grouped = Colocate(single_consumer=True).apply(problem.graph)
    coarse = grouped.then(Coarsen(60))
    small = coarse.graph
    for group in range(grouped.graph.num_groups):
        inside = coarse.new_op[grouped.graph.group == group]
        assert len(set(small.group[inside].tolist())) == 1


@pytest.mark.slow
def test_a_hundred_thousand_ops():
    problem = training_like(100_000, 4)
    coarse = Coarsen(1000).apply(problem.graph)
    check(problem, coarse, 1000, kinds=False)
    placement = Placement(np.zeros(coarse.graph.num_ops, int))
    small = reference.simulate(coarse.problem(problem), placement)
    assert small.step_time == pytest.approx(
        compiled.simulate(problem, coarse.expand(placement)).step_time
    )
