"""Figures that would overflow, wrap around or be rounded are refused; so are arrays that are not
what they seem."""

import copy
import pickle

import numpy as np
import pytest

import roost
from roost.core import formats
from roost.errors import GraphError, InputError
from roost.simulator import reference
from roost.testing.problems import training_like
from support.nasty import nasty


def chain(**settings):
    builder = roost.GraphBuilder()
    builder.add("a", **settings)
    builder.add("b", inputs=["a"])
    return builder.freeze()


def cluster(bandwidth=1.0, memory=10, **settings):
    devices = (roost.Device("d", "cpu", memory), roost.Device("e", "cpu", memory))
    return roost.Cluster("c", devices, (roost.Link("*", "*", bandwidth, **settings),))


@pytest.mark.parametrize("time", [1e308, 1e16, np.inf, np.nan, -1.0])
def test_a_time_that_cannot_be_is_refused(time):
    with pytest.raises(InputError, match=r"op_time\[1, 0\]"):
        roost.Problem(chain(), cluster(), np.array([[1.0, 1.0], [time, 1.0]]))


@pytest.mark.parametrize(
    "settings", [{"bandwidth": 1e-320}, {"latency": 1e16}, {"gap": 1e16}, {"bandwidth": 1e-16}]
)
def test_a_link_that_takes_for_ever_is_refused(settings):
    with pytest.raises(InputError, match="the limit is 1e"):
        cluster(**settings)


@pytest.mark.parametrize("memory", [2**61, 10**30, 1.7, "1GiB"])
def test_a_memory_that_cannot_be_is_refused(memory):
    with pytest.raises((InputError, TypeError)):
        cluster(memory=memory)


@pytest.mark.parametrize(
    "column", ["output_bytes", "workspace_bytes", "bytes_read", "bytes_written"]
)
def test_sizes_that_would_overflow_together_are_refused(column):
    with pytest.raises(GraphError, match=f"{column} add up to more than"):
        chain(**{column: 2**60})
    with pytest.raises(InputError, match="must be whole"):
        chain(**{column: 1.9})


def test_the_largest_sizes_do_not_wrap_around():
    most = 2**59
    graph = chain(output_bytes=most, workspace_bytes=most)
    problem = roost.Problem(graph, cluster(), np.ones((2, 2)))
    placement = roost.Placement([0, 1])
    expected = reference.simulate(problem, placement)
    assert expected.peak_memory.tolist() == [2 * most, most]
    assert roost.simulate(problem, placement).peak_memory.tolist() == [2 * most, most]
    moved = roost.Simulator(problem).neighbours(placement, [0, 1], [0], [1])
    assert moved.peak_memory.tolist() == [[0, 2 * most]]


@pytest.mark.parametrize("order", ["program", "rank", "fifo"])
def test_huge_times_give_finite_steps(order):
    for seed in range(20):
        problem, placement = nasty(seed)
        huge = roost.Problem(
            problem.graph, problem.cluster, np.minimum(problem.op_time * 1e14, 1e15)
        )
        expected = reference.simulate(huge, roost.Placement(placement.device, order))
        assert np.isfinite(expected.step_time)
        found = roost.simulate(huge, roost.Placement(placement.device, order))
        assert found.step_time == expected.step_time


def test_exact_bytes_survive_a_cluster_file(tmp_path):
    for memory in (2**53 + 1, 2**60, 12 * 2**30, 1, 0):
        cluster(memory=memory).save(tmp_path / "cluster.toml")
        assert roost.load(tmp_path / "cluster.toml").memory.tolist() == [memory, memory]


def test_a_bus_name_is_filled_in_once():
    devices = (roost.Device("{target}", "cpu", 1), roost.Device("e", "cpu", 1))
    found = roost.Cluster("c", devices, (roost.Link("*", "*", 1.0, bus="{source}"),))
    assert found.bus_names == ("{target}", "e")


def test_a_device_may_be_named_like_a_pattern():
    devices = (roost.Device("g[0]", "cpu", 1), roost.Device("g[1]", "cpu", 1))
    assert roost.Cluster("c", devices, (roost.Link("g[0]", "g[1]", 1.0),)).num_devices == 2


@pytest.mark.parametrize(
    "bad", [[[2**32, 0]], [[0.9, 0]], [["1", "0"]], [[1j, 0]], [[True, False]], [[2**63, 0]]]
)
def test_a_batch_is_taken_as_it_is_or_refused(bad):
    problem = roost.Problem(chain(), cluster(), np.ones((2, 2)))
    with pytest.raises(InputError, match="devices"):
        roost.Simulator(problem).evaluate(np.array(bad))


def test_windows_of_the_wrong_length_are_refused():
    problem = roost.Problem(chain(), cluster(), np.ones((2, 2)))
    for window in ([1], [1, 2, 3], "x", None, [[1, 2]]):
        with pytest.raises(InputError, match="prefetch_bytes"):
            roost.Simulator(problem).evaluate(np.zeros((1, 2), int), prefetch_bytes=window)


def test_moves_that_wrap_around_are_refused():
    problem = roost.Problem(chain(), cluster(), np.ones((2, 2)))
    simulator, base = roost.Simulator(problem), roost.Placement([0, 0])
    with pytest.raises(InputError, match="move_start"):
        simulator.neighbours(base, np.array([0, 1, -(2**63), -1, 1]), np.array([1]), np.array([1]))
    with pytest.raises(InputError, match="moves to device 7"):
        simulator.neighbours(base, [0, 2], [1, 1], [7, 0])
    # The last move counts.
    assert simulator.neighbours(base, [0, 2], [1, 1], [1, 0]).num_transfers.tolist() == [0]


def test_changing_an_array_afterwards_changes_no_noun():
    device = np.zeros(2, np.int32)
    view = device[:]
    view.flags.writeable = False
    placement = roost.Placement(view)
    device[:] = 1
    assert placement.device.tolist() == [0, 0]


def test_a_problem_can_be_pickled_and_copied_after_it_was_simulated():
    problem = training_like(20, 2)
    placement = roost.Placement(np.zeros(problem.graph.num_ops, int))
    before = roost.simulate(problem, placement).step_time
    for again in (pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem)):
        assert roost.simulate(again, placement).step_time == before


def columns(**change):
    settings = {
        "name": "g",
        "op_names": ("a", "b"),
        "kinds": ("op", "op"),
        "dtypes": ("float32", "float32"),
        "modules": ("", ""),
        "allowed": ((), ()),
        "phase": [2, 2],
        "flop": [0, 0],
        "bytes_read": [0, 0],
        "bytes_written": [0, 0],
        "output_bytes": [0, 0],
        "workspace_bytes": [0, 0],
        "group_names": (),
        "group": [-1, -1],
        "input_start": [0, 0, 1],
        "input_op": [0],
    }
    return roost.Graph(**(settings | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_start": [0, 0, 2], "input_op": [0, 0]}, "has the same input twice"),
        ({"input_start": [0, 1, 0]}, "must go up from 0"),
        ({"input_start": [1, 1, 1]}, "must go up from 0"),
        ({"phase": [258, 2]}, "phase has 258"),
        ({"input_op": [2**32]}, "input_op has 4294967296"),
        ({"group_names": ("x", "x"), "group": [0, 1]}, "two groups have the same name"),
        ({"kinds": ("op",)}, "kinds has 1 entries for 2 ops"),
    ],
)
def test_columns_that_make_no_graph(change, message):
    with pytest.raises(InputError, match=message):
        columns(**change)


def test_a_graph_with_idle_groups_comes_back_the_same():
    graph = columns(group_names=["unused", "second", "first"], group=[2, 1], op_names=["a", "b"])
    assert graph.group_names == ("first", "second")
    assert formats.decode(formats.encode(graph), "again") == graph


def test_a_long_cycle_is_told_briefly():
    names = tuple(f"op{i}" for i in range(5000))
    count = len(names)
    with pytest.raises(GraphError, match=r"cycle: .* more \.\.\.") as caught:
        roost.Graph(
            **{key: (value * count if isinstance(value, tuple) else [value] * count) for key, value in {
                "kinds": ("op",), "dtypes": ("float32",), "modules": ("",), "allowed": ((),), "phase": 2, "flop": 0,
                "bytes_read": 0, "bytes_written": 0, "output_bytes": 0, "workspace_bytes": 0, "group": -1}.items()},
            name="ring", op_names=names, group_names=(), input_start=range(count + 1),
            input_op=[(op + 1) % count for op in range(count)],
        )  # fmt: skip
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format":"roost.placement","version":1,"devices":["d"],"device":[9223372036854775808]}', "device"),
        ('{"format":"roost.placement","version":1,"devices":["d"],"device":[4294967296]}', r"device\[0\]"),
        ('{"format":"roost.timeline","version":1,"step_time":0,"devices":[],"peak_memory":[],"capacity":[],'
         '"num_transfers":0}', "devices"),
        ('{"format":"roost.timeline","version":1,"step_time":0,"devices":["d"],"peak_memory":[0],"capacity":[0],'
         '"num_transfers":0,"ops":[{"name":"a","device":"d","start":0,"finish":0},'
         '{"name":"a","device":"d","start":0,"finish":0}]}', "same name"),
    ],
)  # fmt: skip
def test_files_that_are_nearly_right(text, message):
    with pytest.raises(InputError, match=message):
        formats.decode(text.encode(), "some/file")


def test_problem_files_are_checked_inside(tmp_path):
    import json

    content = json.loads(formats.encode(training_like(4, 2)))
    for change, message in (
        ({"op_time": []}, "op_time: is empty"),
        ({"graph": content["graph"] | {"version": 7}}, "graph.version: 7 is not known"),
        ({"cluster": content["cluster"] | {"version": -5}}, "cluster.version: -5 is not known"),
    ):
        with pytest.raises(InputError, match=message):
            formats.decode(json.dumps(content | change).encode(), "problem.json")


def test_a_number_of_thousands_of_digits(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('format = "roost.cluster"\nversion = ' + "1" * 5000)
    with pytest.raises(InputError, match=r"cluster\.toml"):
        roost.cluster(path)


def test_links_that_lead_in_a_circle(tmp_path):
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    with pytest.raises(InputError, match="cannot be"):
        chain().save(tmp_path / "a.json")
    with pytest.raises(InputError, match="cannot be read"):
        roost.load(tmp_path / "a.json")


def test_names_that_are_no_text(tmp_path):
    builder = roost.GraphBuilder("\ud800")
    builder.add("a")
    with pytest.raises(InputError, match="UTF-8"):
        builder.freeze().save(tmp_path / "graph.json")
    with pytest.raises(InputError, match="cannot be saved"):
        formats.save(5, tmp_path / "five.json")


def test_a_builder_that_refuses_an_op_forgets_it():
    builder = roost.GraphBuilder()
    with pytest.raises(TypeError):
        builder.add("a", allowed=None)
    builder.add("a")
    assert builder.freeze().num_ops == 1
