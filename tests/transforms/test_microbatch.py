"""Unrolled steps: copies, sums of gradients, groups, and placements on the way in and out."""

from __future__ import annotations

import numpy as np
import pytest

import roost
from roost.core.graph import UPDATE, Graph, GraphBuilder
from roost.errors import GraphError, InputError
from roost.transforms.microbatch import SHARED, Microbatch, Microbatched, copies_of


def step(buffer: str = "", group: bool = False) -> Graph:
    """A layer with a weight and an optimizer state; with `buffer` also one of that dtype."""
    builder = GraphBuilder("step")
    builder.parameter("weight", 400)
    builder.add("x", "input", phase="input", output_bytes=80)
    builder.add("mask", "input", phase="input", output_bytes=8)
    together = "pair" if group else None
    builder.add("mm", "mm", ["x", "weight", "mask"], flop=100, output_bytes=40, group=together)
    builder.add("loss", "mean", ["mm"], flop=10, output_bytes=4, group=together)
    backward = {"phase": "backward", "module": "layer"}
    builder.add("grad", "mm", ["loss", "x"], flop=100, output_bytes=400, **backward)
    builder.parameter("weight:state", 400)
    update = ["weight", "weight:state", "grad"]
    builder.add("weight:update", "sgd", update, flop=200, phase="update", module="layer")
    if buffer:
        builder.parameter("seen", 8, dtype=buffer)
        builder.add("next", "add", ["seen"], output_bytes=8, dtype=buffer)
        builder.add("seen:update", "copy", ["seen", "next"], phase="update", dtype=buffer)
    return builder.freeze()


def inputs_of(made: Microbatched, name: str) -> list[str]:
    graph = made.graph
    return [graph.op_names[op] for op in graph.inputs_of(graph.index_of(name)).tolist()]


def test_parameters_and_updates_exist_once_and_every_other_op_as_often_as_microbatches() -> None:
    graph = step()
    made = Microbatch(3).apply(graph)
    names = made.graph.op_names
    for name in ("weight", "weight:state", "weight:update"):
        assert names.count(name) == 1
    for name in ("x", "mask", "mm", "loss", "grad"):
        assert [f"{name}#{copy}" in names for copy in range(3)] == [True] * 3
    assert made.graph.num_ops == 3 + 3 * 5 + 2  # two sums
    assert made.graph.flop.sum() == 3 * 210 + 200 + 2 * 100


def test_one_microbatch_is_the_step_itself() -> None:
    graph = step()
    made = Microbatch(1).apply(graph)
    assert made.graph is graph
    assert made.copy[graph.index_of("mm")] == 0
    assert made.copy[graph.index_of("weight")] == SHARED


def test_gradients_are_added_up_in_the_order_of_gradient_accumulation() -> None:
    made = Microbatch(3).apply(step())
    assert inputs_of(made, "grad#sum1") == ["grad#0", "grad#1"]
    assert inputs_of(made, "grad#sum2") == ["grad#sum1", "grad#2"]
    assert inputs_of(made, "weight:update") == ["weight", "weight:state", "grad#sum2"]
    names = made.graph.op_names
    assert names.index("grad#sum1") == names.index("grad#1") + 1


def test_blocks_of_neighbouring_copies_are_added_up_first() -> None:
    made = Microbatch(4, blocks=2).apply(step())
    assert inputs_of(made, "grad#sum1") == ["grad#0", "grad#1"]
    assert inputs_of(made, "grad#sum2") == ["grad#2", "grad#3"]
    assert inputs_of(made, "grad#sum3") == ["grad#sum1", "grad#sum2"]


def test_a_sum_moves_the_bytes_of_its_parameter_and_is_backward_work_of_its_module() -> None:
    made = Microbatch(2).apply(step())
    graph = made.graph
    op = graph.index_of("grad#sum1")
    assert graph.kinds[op] == "add"
    assert graph.modules[op] == "layer"
    assert (graph.bytes_read[op], graph.bytes_written[op], graph.output_bytes[op]) == (
        800,
        400,
        400,
    )
    assert graph.flop[op] == 100


def test_a_shared_input_exists_once() -> None:
    made = Microbatch(2, shared_inputs=("mask",)).apply(step())
    assert "mask#0" not in made.graph.op_names
    assert inputs_of(made, "mm#1") == ["x#1", "weight", "mask"]


def test_a_buffer_gets_the_mean_of_its_new_values_and_a_counter_the_last() -> None:
    made = Microbatch(2, batch_statistics=True).apply(step("float32"))
    assert inputs_of(made, "next#mean") == ["next#sum1"]
    assert inputs_of(made, "seen:update") == ["seen", "next#mean"]
    counted = Microbatch(2, batch_statistics=True).apply(step("int64"))
    assert inputs_of(counted, "seen:update") == ["seen", "next#1"]


def test_a_buffer_that_calls_change_is_named_and_only_unrolled_when_asked() -> None:
    with pytest.raises(InputError, match="each call of the model changes seen"):
        Microbatch(2).apply(step("float32"))


def test_copies_share_a_group_only_when_they_are_together() -> None:
    apart = Microbatch(2).apply(step(group=True)).graph
    group = {name: apart.group[apart.index_of(name)] for name in apart.op_names}
    assert group["mm#0"] == group["loss#0"] != group["mm#1"] == group["loss#1"]
    assert group["grad#0"] == group["grad#sum1"] == -1
    together = Microbatch(2, together=True).apply(step(group=True)).graph
    group = {name: together.group[together.index_of(name)] for name in together.op_names}
    assert group["mm#0"] == group["mm#1"] == group["loss#1"]
    assert group["grad#0"] == group["grad#1"] == group["grad#sum1"] >= 0
    assert group["weight"] == -1


def test_the_copy_of_an_op_is_known_from_its_name() -> None:
    made = Microbatch(3).apply(step())
    assert (copies_of(made.graph) == made.copy).all()


def test_a_placement_of_one_microbatch_expands_to_all_of_them() -> None:
    graph = step()
    made = Microbatch(2).apply(graph)
    device = np.arange(graph.num_ops) % 2
    priority = -np.arange(graph.num_ops, dtype=float)
    placed = roost.Placement(device, "priority", priority, graph=graph.digest)
    expanded = made.expand(placed)
    assert (expanded.device == device[made.origin]).all()
    of = dict(zip(made.graph.op_names, expanded.priority, strict=True))
    assert of["mm#0"] > of["grad#0"] > of["x#1"] > of["mm#1"] > of["weight:update"]
    with pytest.raises(InputError, match="8 ops"):
        made.expand(roost.Placement(np.zeros(3)))


def test_sums_follow_a_placement_and_every_device_sends_one() -> None:
    made = Microbatch(4).apply(step())
    graph = made.graph
    on = {0: 1, 1: 0, 2: 1, 3: 0}  # copy -> device
    device = np.array([on.get(copy, 0) for copy in made.copy.tolist()])
    other, placed = made.arranged(roost.Placement(device, graph=graph.digest))
    assert inputs_of(other, "grad#sum1") == ["grad#1", "grad#3"]
    assert inputs_of(other, "grad#sum2") == ["grad#0", "grad#2"]
    assert inputs_of(other, "grad#sum3") == ["grad#sum1", "grad#sum2"]
    at = {name: placed.device[op] for op, name in enumerate(other.graph.op_names)}
    assert [at[f"grad#sum{number}"] for number in (1, 2, 3)] == [0, 1, 0]
    assert at["mm#2"] == 1
    assert placed.graph == other.graph.digest


def test_arranged_priorities_keep_inputs_before_their_readers() -> None:
    made = Microbatch(4, blocks=2).apply(step())
    rng = np.random.default_rng(0)
    device = np.where(made.copy == SHARED, 0, rng.integers(0, 3, made.graph.num_ops))
    priority = rng.permutation(made.graph.num_ops).astype(float)
    other, placed = made.arranged(roost.Placement(device, "priority", priority))
    graph = other.graph
    for op, sources in enumerate(graph.input_lists()):
        for source in sources:
            if not graph.is_parameter[source]:
                assert placed.priority[source] >= placed.priority[op]


def test_an_expanded_placement_adds_up_gradients_as_they_come() -> None:
    made = Microbatch(4).apply(step())
    priority = -np.arange(made.original.num_ops, dtype=float)
    device = np.zeros(made.original.num_ops, dtype=int)
    placed = made.expand(roost.Placement(device, "priority", priority))
    at = dict(zip(made.graph.op_names, placed.priority, strict=True))
    assert at["grad#sum1"] > at["mm#2"] > at["grad#sum2"] > at["mm#3"]


def test_an_op_whose_name_looks_like_a_copy_is_none() -> None:
    builder = GraphBuilder("names")
    builder.parameter("mul", 8)
    builder.add("x", "input", phase="input", output_bytes=8)
    builder.add("mul#2", "mul", ["x", "mul"], output_bytes=8)
    graph = builder.freeze()
    assert (copies_of(graph) == SHARED).all()
    made = Microbatch(2).apply(graph).graph
    found = dict(zip(made.op_names, copies_of(made).tolist(), strict=True))
    assert found == {"mul": SHARED, "x#0": 0, "mul#2#0": 0, "x#1": 1, "mul#2#1": 1}


def test_times_of_copies_are_those_of_the_original_and_sums_have_their_own() -> None:
    graph = step()
    made = Microbatch(2).apply(graph)
    original = np.arange(graph.num_ops, dtype=float)[:, None]
    estimated = np.full((made.graph.num_ops, 1), 99.0)
    times = made.op_time(original, estimated)[:, 0]
    at = dict(zip(made.graph.op_names, times, strict=True))
    assert at["mm#0"] == at["mm#1"] == graph.index_of("mm")
    assert at["grad#sum1"] == 99.0
    with pytest.raises(InputError, match="it must be of 8"):
        made.op_time(original[:2], estimated)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, 10**6])
def test_a_count_that_is_no_number_of_microbatches_is_refused(count: object) -> None:
    with pytest.raises(InputError, match="count"):
        Microbatch(count)  # type: ignore[arg-type]


def test_batch_norm_is_named_and_only_unrolled_when_asked() -> None:
    graph = roost.zoo.build("resnet50", **vars(roost.zoo.settings("resnet50").small()))
    with pytest.raises(InputError, match=r"BatchNorm in stem.* and \d+ more .*batch_statistics"):
        Microbatch(2).apply(graph)
    made = Microbatch(2, batch_statistics=True).apply(graph)
    updates = made.graph.phase == UPDATE
    assert updates.sum() == (graph.phase == UPDATE).sum()
    assert "div" in {made.graph.kinds[op] for op in np.flatnonzero(made.is_sum).tolist()}


def test_a_step_that_reads_an_updated_parameter_again_is_refused() -> None:
    builder = GraphBuilder()
    builder.parameter("weight", 4)
    builder.add("grad", inputs=["weight"], phase="backward", output_bytes=4)
    builder.add("update", inputs=["weight", "grad"], phase="update", output_bytes=4)
    builder.add("after", inputs=["update"], output_bytes=4)
    with pytest.raises(GraphError, match="later ops of the same step"):
        Microbatch(2).apply(builder.freeze())


def test_a_shared_input_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="no input of the graph"):
        Microbatch(2, shared_inputs=("mm",)).apply(step())


def test_one_device_takes_as_long_as_its_copies_and_sums_together() -> None:
    graph = step()
    made = Microbatch(4).apply(graph)
    problem = roost.Problem(made.graph, roost.cluster("k80x2"), np.ones((made.graph.num_ops, 3)) *
                            ~made.graph.is_parameter[:, None])  # fmt: skip
    timeline = roost.simulate(problem, problem.placement(np.zeros(made.graph.num_ops)))
    assert timeline.step_time == pytest.approx(4 * 5 + 3 + 1)
