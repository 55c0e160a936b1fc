"""Building graphs."""

from dataclasses import replace

import numpy as np
import pytest

import roost
from roost.errors import GraphError, InputError


def test_edges_go_both_ways(graph):
    assert graph.consumers_of(1).tolist() == [2, 3, 4]
    assert graph.inputs_of(3).tolist() == [2, 1]
    assert graph.num_edges == 6
    assert graph.index_of("u") == 4


def test_an_input_taken_twice_is_one_edge():
    builder = roost.GraphBuilder()
    builder.add("x")
    builder.add("square", inputs=["x", "x"])
    assert builder.freeze().num_edges == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "x"}, "two ops are called 'x'"),
        ({"name": "y", "inputs": ["z"]}, "input 'z' of op 'y' has not been added"),
        ({"name": "y", "inputs": "x"}, "must be a list of names, not the text 'x'"),
        ({"name": "y", "phase": "later"}, "phase 'later'; it must be one of parameter"),
    ],
)
def test_a_builder_refuses_at_once(settings, message):
    builder = roost.GraphBuilder()
    builder.add("x")
    with pytest.raises(InputError, match=message):
        builder.add(**settings)


@pytest.mark.parametrize(
    "field", ["flop", "bytes_read", "bytes_written", "output_bytes", "workspace_bytes"]
)
def test_figures_are_finite_and_not_negative(field):
    builder = roost.GraphBuilder()
    builder.add("x", **{field: -1})
    with pytest.raises(InputError, match=f"{field} of op 'x' is -1"):
        builder.freeze()
    builder = roost.GraphBuilder()
    builder.add("x", **{field: float("nan")})
    with pytest.raises(InputError, match=field):
        builder.freeze()


def test_an_empty_graph_is_refused():
    with pytest.raises(GraphError, match="has no ops"):
        roost.GraphBuilder().freeze()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": [-1, 0, 0, 0, 0]}, "a phase is none of parameter, input"),
        ({"phase": [1, 0, 5, 2, 4]}, "a phase is none of"),
        ({"group": [-2, -1, 0, 0, -1]}, "not among the 1 of this graph"),
        ({"group": [-1, -1, 1, 0, -1]}, "not among the 1 of this graph"),
        ({"group_names": ("g", "g")}, "two groups have the same name"),
        ({"op_names": ("x", "w", "a", "w", "u")}, "two ops are called 'w'"),
        ({"op_names": ("x", "w", "", "b", "u")}, "op 2 has an empty name"),
        ({"kinds": ("input",)}, "kinds has 1 entries for 5 ops"),
        ({"input_start": [1, 0, 2, 4, 6]}, "input_start"),
        ({"input_start": [0, 0, 2, 0, 4, 6]}, "input_start must go up from 0"),
        ({"input_start": [1, 1, 1, 2, 4, 6]}, "input_start must go up from 0"),
        ({"input_op": [-1, 1, 2, 1, 1, 3]}, "an edge starts at no op; ops are 0 to 4"),
        ({"input_op": [5, 1, 2, 1, 1, 3]}, "an edge starts at no op; ops are 0 to 4"),
        ({"input_op": [2, 1, 2, 1, 1, 3]}, "'a' takes its own output"),
        ({"input_op": [3, 1, 2, 1, 1, 3]}, "has a cycle: 'a' -> 'b' -> 'a'"),
        ({"input_op": [4, 1, 0, 1, 1, 0]}, "'a' comes before its input 'u'"),
        ({"input_op": [0, 0, 2, 1, 1, 3]}, "'a' has the same input twice"),
        ({"phase": [1, 0, 0, 2, 4]}, "parameter 'a' has inputs"),
        ({"output_bytes": [2**59 + 2**10, 0, 0, 0, 0]}, "more than 2.*59"),
    ],
)
def test_arrays_that_are_no_graph_are_refused(graph, change, message):
    with pytest.raises((GraphError, InputError), match=message):
        replace(graph, **change)


def test_groups_are_numbered_by_their_first_ops(graph):
    grouped = replace(graph, group=[2, -1, 0, 2, -1], group_names=("first", "none", "second"))
    assert grouped.group_names == ("second", "first")
    assert grouped.group.tolist() == [0, -1, 1, 0, -1]
    assert replace(graph, output_bytes=[2**59, 0, 0, 0, 0]).output_bytes[0] == 2**59


def test_a_long_cycle_is_shown_in_part():
    builder = roost.GraphBuilder()
    builder.add("op0")
    for number in range(1, 20):
        builder.add(f"op{number}", inputs=[f"op{number - 1}"])
    graph = builder.freeze()
    start = np.arange(21)
    for length, shown in ((11, None), (12, "2 more"), (20, "10 more")):
        source = [length - 1, *range(19)]
        with pytest.raises(GraphError, match="cycle") as raised:
            replace(graph, input_start=start, input_op=source)
        assert str(raised.value).count("more") == (shown is not None)
        assert (shown or "op5") in str(raised.value)


def test_digest_sees_every_field(graph):
    def built(**change):
        builder = roost.GraphBuilder("g")
        builder.add("x")
        builder.add("y", inputs=["x"], **change)
        return builder.freeze()

    base = built()
    assert base == built()
    changes = (
        {"flop": 1},
        {"kind": "other"},
        {"group": "g"},
        {"allowed": ["cpu"]},
        {"dtype": "float16"},
    )
    for change in (
        *changes,
        {"workspace_bytes": 1},
        {"module": "m"},
        {"phase": "backward"},
        {"output_bytes": 2},
    ):
        assert built(**change) != base, change


def test_a_hundred_thousand_edges_into_one_op_are_no_trouble():
    builder = roost.GraphBuilder()
    names = [builder.add(f"x{i}", output_bytes=1) for i in range(5000)]
    builder.add("sum", inputs=names)
    graph = builder.freeze()
    assert graph.num_edges == 5000
    problem = roost.Problem(graph, roost.cluster("k80x4"), np.ones((5001, 5)))
    timeline = roost.simulate(problem, roost.Placement(np.arange(5001) % 5))
    assert timeline.num_transfers == 4000  # all but the fifth that is there already
