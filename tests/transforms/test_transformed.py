"""The way back from a transformed graph."""

import numpy as np
import pytest
from tangled import anywhere, tangled

from roost import catalog
from roost.core.graph import UPDATE, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.simulator import reference
from roost.simulator.order import dispatch_order
from roost.transforms import Transformed, apply
from roost.transforms.coarsen import Coarsen
from roost.transforms.colocate import Colocate
from roost.transforms.prune import Prune
from support.nasty import nasty

STEPS = (Prune(), Colocate(single_consumer=True), Coarsen(12))


# `microbatch` makes many ops of one: it has a way back of its own.
MERGING = [name for name in catalog.names("transforms") if name != "microbatch"]


@pytest.mark.parametrize("name", MERGING)
def test_every_transform_keeps_its_promises(name):
    transform = catalog.find("transforms", name)()
    # Settings can be logged.
    assert eval(repr(transform), {type(transform).__name__: type(transform)}) == transform
    for seed in range(30):
        problem = tangled(seed)
        done = transform.apply(problem.graph)
        assert done.original is problem.graph
        assert done.graph.digest == transform.apply(problem.graph).graph.digest
        assert all(what.startswith(f"{name}.") for what in done.counts)
        for order in ("program", "rank", "fifo"):
            problem.check(done.expand(anywhere(done.problem(problem), seed, order=order)))


def _reads_before_updates(graph):
    """Ops that read a parameter, each with an update that rewrites it later in the program."""
    consumers, update = graph.consumer_lists(), graph.phase == UPDATE
    return [
        (reader, other)
        for parameter in np.flatnonzero(graph.is_parameter).tolist()
        for other in consumers[parameter]
        for reader in consumers[parameter]
        if update[other] and not update[reader] and reader < other
    ]


@pytest.mark.parametrize("seed", range(60))
def test_placements_come_back_through_any_number_of_transforms(seed):
    problem = tangled(seed)
    pruned = Prune().apply(problem.graph)
    grouped = Colocate(single_consumer=True).apply(pruned.graph)
    coarse = Coarsen(12).apply(grouped.graph)
    whole = apply(problem.graph, *STEPS)
    assert whole.graph == coarse.graph
    placement = anywhere(whole.problem(problem), seed)
    expanded = whole.expand(placement)
    problem.check(expanded)  # groups and kinds of the original are respected
    step_by_step = pruned.expand(grouped.expand(coarse.expand(placement)))
    assert np.array_equal(expanded.device, step_by_step.device)
    guarded = _reads_before_updates(problem.graph)
    for found in (expanded, step_by_step):
        order = dispatch_order(problem, found)
        turn = np.argsort(np.concatenate([order, np.flatnonzero(problem.graph.is_parameter)]))
        assert all(turn[reader] < turn[update] for reader, update in guarded)
        assert guarded or (np.diff(whole.new_op[order]) >= 0).all()  # new op by new op
    assert set(whole.counts) >= {"prune.folded", "colocate.single_consumer"}


@pytest.mark.parametrize("seed", range(60))
def test_costs_are_added_up(seed):
    problem = tangled(seed)
    whole = apply(problem.graph, *STEPS)
    summed = whole.sum_costs(problem.op_time)
    assert np.allclose(summed.sum(axis=0), problem.op_time.sum(axis=0))
    for op in range(whole.graph.num_ops):
        assert np.allclose(
            summed[op], problem.op_time[np.flatnonzero(whole.new_op == op)].sum(axis=0)
        )
    assert whole.problem(problem).op_time.shape == (
        whole.graph.num_ops,
        problem.cluster.num_devices,
    )


@pytest.mark.parametrize("steps", [(), (Colocate(),)])
def test_a_transform_that_leaves_the_ops_leaves_the_placement(steps):
    for seed in range(20):
        problem, placement = nasty(seed)
        done = apply(problem.graph, *steps)
        assert done.expand(placement) == placement


def test_what_one_new_op_stands_for_is_dispatched_together():
    builder = GraphBuilder()
    for name, inputs in (("a", []), ("x", []), ("b", ["a"]), ("y", ["x"])):
        builder.add(name, inputs=inputs, output_bytes=1, flop=1)
    graph = builder.freeze()
    coarse = Coarsen(2).apply(graph)
    assert [
        [graph.op_names[op] for op in np.flatnonzero(coarse.new_op == new)] for new in range(2)
    ] == [
        ["a", "b"],
        ["x", "y"],
    ]
    problem = Problem(graph, nasty(0)[0].cluster, np.ones((4, nasty(0)[0].cluster.num_devices)))
    together = coarse.expand(Placement(np.zeros(2, int)))
    assert dispatch_order(problem, together).tolist() == [0, 2, 1, 3]
    as_written = coarse.expand(Placement(np.zeros(2, int)), keep_order=False)
    assert dispatch_order(problem, as_written).tolist() == [0, 1, 2, 3]


def test_what_a_new_op_fetches_once_is_fetched_once():
    builder = GraphBuilder()
    builder.parameter("v", 30)
    builder.parameter("w", 50)
    for step in range(4):
        builder.add(
            f"v{step}", inputs=[f"w{step - 1}", "v"] if step else ["v"], output_bytes=1, flop=1
        )
        builder.add(f"w{step}", inputs=[f"v{step}", "w"], output_bytes=1, flop=1)
    problem = Problem(
        builder.freeze(),
        tangled(0).cluster,
        np.where(np.arange(10)[:, None] < 2, 0, np.ones((10, 3))),
    )
    coarse = Coarsen(2).apply(problem.graph)
    assert coarse.graph.op_names == ("v+1", "v0+7")
    placement = coarse.expand(Placement(np.array([0, 1])))
    assert placement.prefetch_bytes == 80
    assert reference.simulate(problem, placement).num_transfers == 2
    named = coarse.expand(Placement(np.array([0, 1]), devices=problem.cluster.device_names))
    assert named.prefetch_bytes.tolist() == [0, 80, 0]
    given = coarse.expand(Placement(np.array([0, 1]), prefetch_bytes=np.array([5, 100, 0])))
    assert given.prefetch_bytes.tolist() == [5, 100, 0]


def test_a_placement_of_another_graph_is_refused():
    problem = tangled(3)
    done = Transformed.unchanged(problem.graph)
    with pytest.raises(InputError, match="devices; the new graph has"):
        done.expand(Placement(np.zeros(problem.graph.num_ops + 1, int)))
    with pytest.raises(InputError, match="was made for graph"):
        done.expand(Placement(np.zeros(problem.graph.num_ops, int), graph="0123456789abcdef"))
    with pytest.raises(InputError, match="op_time is"):
        done.sum_costs(np.zeros((problem.graph.num_ops + 1, 2)))
    with pytest.raises(InputError, match="the problem is about"):
        done.problem(tangled(4))
    with pytest.raises(InputError, match="does not begin with"):
        done.then(Transformed.unchanged(tangled(4).graph))


def test_a_placement_that_knows_its_graph_still_does():
    problem = tangled(3)
    coarse = Coarsen(5).apply(problem.graph)
    placement = Placement(anywhere(coarse.problem(problem)).device, graph=coarse.graph.digest)
    assert problem.check(coarse.expand(placement)).graph == problem.graph.digest
