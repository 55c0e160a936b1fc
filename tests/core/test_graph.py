"""Building graphs."""

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
