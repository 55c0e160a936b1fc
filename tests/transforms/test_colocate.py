"""Which ops are put into one group."""

import numpy as np
import pytest
from tangled import anywhere, tangled

from roost.core.graph import GraphBuilder
from roost.errors import GraphError, InputError
from roost.transforms.colocate import Colocate

OFF = {
    "updates_with_parameter": False,
    "updates_with_state": False,
    "parameters_with_consumer": False,
}
EVERY_RULE = Colocate(units=1, gradients_with_forward=True, single_consumer=True)


def groups(graph):
    """The groups as sets of names."""
    names = np.array(graph.op_names)
    return {frozenset(names[graph.group == group].tolist()) for group in range(graph.num_groups)}


def colocated(builder, **settings):
    return groups(Colocate(**{**OFF, **settings}).apply(builder.freeze()).graph)


def layer():
    """One layer of a training step, with its optimizer state."""
    builder = GraphBuilder()
    builder.parameter("weight", 8)
    builder.parameter("momentum", 8)
    builder.add("mm", inputs=["weight"], module="net.fc")
    builder.add("relu", inputs=["mm"], module="net.fc")
    builder.add("loss", inputs=["relu"], module="net.loss")
    builder.add("d_relu", inputs=["loss", "relu"], module="net.fc", phase="backward")
    builder.add("d_mm", inputs=["d_relu", "weight", "mm"], module="net.fc", phase="backward")
    builder.add("step", inputs=["weight", "momentum", "d_mm"], phase="update")
    return builder


def test_updates_go_with_all_they_rewrite():
    assert colocated(layer(), updates_with_parameter=True) == {
        frozenset({"weight", "momentum", "step"})
    }


def test_updates_may_go_with_their_state_only():
    assert colocated(layer(), updates_with_state=True) == {frozenset({"momentum", "step"})}


def test_units_are_of_one_phase():
    assert colocated(layer(), units=r"\.fc") == {
        frozenset({"mm", "relu"}),
        frozenset({"d_relu", "d_mm"}),
    }
    assert colocated(layer(), units=2) == colocated(layer(), units=(r"\.fc", r"\.loss"))
    assert colocated(layer(), units=1) == {
        frozenset({"mm", "relu", "loss"}),
        frozenset({"d_relu", "d_mm"}),
    }


def test_units_are_told_apart_by_all_of_the_path_up_to_what_is_found():
    builder = GraphBuilder()
    for side in ("encoder", "decoder"):
        for step in (0, 1):
            builder.add(f"{side}{step}", module=f"{side}.layer.3.part{step}")
    graph = Colocate(units=r"layer\.\d+").apply(builder.freeze()).graph
    assert graph.group_names == ("encoder.layer.3", "decoder.layer.3")
    assert graph.group.tolist() == [0, 0, 1, 1]


def test_gradients_go_with_forward_ops_that_are_together():
    assert colocated(layer(), gradients_with_forward=True) == set()  # mm and relu are apart
    together = colocated(layer(), units=2, gradients_with_forward=True)
    assert together == {frozenset({"mm", "relu", "d_relu", "d_mm"})}


def test_a_parameter_goes_with_its_consumers_where_they_are_together():
    assert colocated(layer(), parameters_with_consumer=True) == set()
    together = colocated(
        layer(), units=2, gradients_with_forward=True, parameters_with_consumer=True
    )
    assert together == {frozenset({"weight", "mm", "relu", "d_relu", "d_mm"})}
    alone = GraphBuilder()
    alone.parameter("weight", 8)
    alone.add("mm", inputs=["weight"])
    assert colocated(alone, parameters_with_consumer=True) == {frozenset({"weight", "mm"})}


def test_an_op_goes_with_its_only_consumer_and_groups_count_as_ops():
    builder = GraphBuilder()
    builder.parameter("weight", 8)
    builder.add("fork", inputs=["weight"])
    builder.add("left", inputs=["fork"])
    builder.add("right", inputs=["fork"])
    builder.add("join", inputs=["left", "right"])
    builder.add("one", inputs=["join"])
    builder.add("other", inputs=["join"])
    assert colocated(builder, single_consumer=True) == {
        frozenset({"fork", "left", "right", "join"})
    }


def naive_single_consumer(graph):
    """The rule as it is written: as long as a group's output is consumed by one other group only,
    they are one."""
    group = list(range(graph.num_ops))
    for op in np.flatnonzero(graph.group >= 0):
        group[op] = int(np.argmax(graph.group == graph.group[op]))
    edges = list(zip(graph.input_op.tolist(), graph.edge_target.tolist(), strict=True))
    merged = True
    while merged:
        merged = False
        for one in sorted(set(group)):
            consumers = {group[target] for source, target in edges if group[source] == one} - {one}
            computes = any(
                group[op] == one and not graph.is_parameter[op] for op in range(graph.num_ops)
            )
            if computes and len(consumers) == 1:
                other = consumers.pop()
                group = [other if g == one else g for g in group]
                merged = True
                break
    names = np.array(graph.op_names)
    sets = {frozenset(names[np.array(group) == g].tolist()) for g in set(group)}
    given = {graph.op_names[op] for op in np.flatnonzero(graph.group >= 0)}
    return {ops for ops in sets if len(ops) > 1 or ops & given}


@pytest.mark.parametrize("seed", range(60))
def test_single_consumer_is_the_rule_as_written(seed):
    graph = tangled(seed, kinds=False).graph
    found = Colocate(**OFF, single_consumer=True).apply(graph).graph
    assert groups(found) == naive_single_consumer(graph)


@pytest.mark.parametrize("seed", range(150))
def test_applying_twice_is_applying_once_and_groups_are_kept(seed):
    problem = tangled(seed)
    graph = problem.graph
    for colocate in (Colocate(), EVERY_RULE):
        done = colocate.apply(graph)
        again = colocate.apply(done.graph)
        assert again.graph.digest == done.graph.digest
        assert not any(again.counts.values())
        for group in range(graph.num_groups):  # none is split, none is lost
            assert len(set(done.graph.group[graph.group == group].tolist()) - {-1}) <= 1
        assert set(done.graph.group_names) >= {graph.group_names[0]} if graph.num_groups else True
        anywhere(done.problem(problem), seed)  # every group has a device kind left
        assert np.array_equal(done.graph.input_op, graph.input_op)
        assert done.graph.op_names == graph.op_names


def test_groups_that_allow_no_common_kind_stay_apart():
    builder = GraphBuilder()
    builder.add("a", allowed=["cpu"], module="m")
    builder.add("b", ["a"], allowed=["cuda"], module="m")
    builder.add("c", ["b"], module="m")
    builder.add("d", ["c"], allowed=["cpu", "tpu"], module="m")
    assert colocated(builder, units=1) == {frozenset({"a", "c", "d"})}
    assert colocated(builder, units=1, single_consumer=True) == {frozenset({"a", "c", "d"})}


def test_a_group_that_can_go_nowhere_is_an_error():
    builder = GraphBuilder()
    builder.add("a", allowed=["cpu"], group="g")
    builder.add("b", allowed=["cuda"], group="g")
    with pytest.raises(GraphError, match=r"group 'g' can go nowhere: its ops, such as 'a'"):
        Colocate().apply(builder.freeze())


def test_joined_groups_have_the_name_of_the_first():
    builder = GraphBuilder()
    builder.add("a", group="late", module="m")
    builder.add("b", group="early", module="m")
    builder.add("c", module="m")
    builder.add("d", module="n")
    builder.add("late", module="n")
    done = Colocate(units=1).apply(builder.freeze())
    assert done.graph.group_names == ("late", "n")
    assert done.graph.group.tolist() == [0, 0, 0, 1, 1]
    assert done.counts["colocate.units"] == 3


def test_bad_units_are_refused():
    with pytest.raises(InputError, match="no regular expression"):
        Colocate(units="(")
    with pytest.raises(InputError, match="must be a number of names"):
        Colocate(units=-1)


def test_a_long_training_chain_takes_linear_time():
    # Every backward op has one output, so the rule takes in the whole graph, one op after the
    # other.
    length = 20_000
    builder = GraphBuilder()
    builder.add("f0")
    for op in range(1, length):
        builder.add(f"f{op}", inputs=[f"f{op - 1}"])
    builder.add(f"b{length - 1}", inputs=[f"f{length - 1}"], phase="backward")
    for op in range(length - 2, -1, -1):
        builder.add(f"b{op}", inputs=[f"b{op + 1}", f"f{op}"], phase="backward")
    done = Colocate(single_consumer=True).apply(builder.freeze())
    assert done.graph.num_groups == 1
    assert (done.graph.group == 0).all()
