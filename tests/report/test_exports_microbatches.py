"""Placements of an unrolled tiny step: recognised as pipelines or data parallelism, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import BACKWARD, INPUT, Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports import microbatches
from roost.report.exports._export import Export
from roost.report.exports._nearest import nearest_data_parallel, nearest_pipeline
from roost.report.exports._schedules import GPIPE, ONE_F_ONE_B, schedule_of, sequence, slots
from roost.report.exports._unrolled import UnrolledStep
from roost.report.exports.device_map import DeviceMap
from roost.report.exports.llama_cpp import LlamaCpp
from roost.report.exports.split_spec import SplitSpec
from roost.simulator.compiled import simulate
from roost.testing import check_exporter
from roost.transforms.microbatch import Microbatch

LAYERS = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0  # of a layer


def layers(train: bool = True, tied: bool = False) -> Graph:
    """Four layers with a weight each. The last one may read the weight of the first too."""
    builder = GraphBuilder("four")
    builder.add("x", "input", phase="input")
    for number in range(LAYERS):
        module = f"layers.{number}"
        builder.parameter(f"{module}.weight", 100, module=module)
    before = "x"
    for number in range(LAYERS):
        module = f"layers.{number}"
        inputs = [before, f"{module}.weight"]
        inputs += ["layers.0.weight"] * (tied and number == LAYERS - 1)
        before = builder.add(f"f{number}", "mm", inputs, module=module)
    for number in reversed(range(LAYERS) if train else ()):
        module = f"layers.{number}"
        inputs = [before, f"f{number}", f"{module}.weight"]
        back = {"phase": "backward", "module": module}
        before = builder.add(f"b{number}", "mm", inputs, **back)
        inputs = [f"{module}.weight", before]
        builder.add(f"{module}:update", "sgd", inputs, phase="update", module=module)
    return builder.freeze()


def unrolled(count: int, devices: int = 2, memory: int = 10_000, **kind: bool) -> Problem:
    made = Microbatch(count).apply(layers(**kind))
    time = np.zeros((made.graph.num_ops, devices))
    for op, name in enumerate(made.graph.op_names):
        if "#" in name and "sum" not in name:
            time[op] = {"f": FORWARD_SECONDS, "b": BACKWARD_SECONDS}.get(name[0], 0.0)
    cuda = tuple(Device(f"cuda:{number}", "cuda", memory) for number in range(devices))
    return Problem(made.graph, Cluster("alike", cuda, (Link("*", "*", 1e9),)), time)  # type: ignore[arg-type]


def layer_of(name: str) -> int:
    """The layer of an op, by its name; 0 for inputs."""
    digits = [letter for letter in name.partition("#")[0] if letter.isdigit()]
    return int(digits[0]) if digits else 0


def copy_of(name: str) -> int | None:
    tail = name.rpartition("#")[2]
    return int(tail) if "#" in name and tail.isdecimal() else None


def placed(
    problem: Problem, device: Callable[[int, int | None], int], order: str = ""
) -> Placement:
    """Each op on a device by its layer and microbatch; works such as `0F1` (stage 0) in order."""
    names = problem.graph.op_names
    where = np.array([device(layer_of(name), copy_of(name)) for name in names])
    if not order:
        return problem.placement(where, "rank")
    at = {work: number for number, work in enumerate(order.split())}
    priority = np.full(len(names), -float(len(at)))
    for op, name in enumerate(names):
        if "#" in name and name[0] in "fb" and "sum" not in name:
            work = f"{where[op]}{name[0].upper()}{copy_of(name)}"
            priority[op] = -at[work]
        elif name.startswith("x#"):
            priority[op] = 0.0
    return problem.placement(where, "priority", priority)


def halves(layer: int, copy: int | None) -> int:
    """Two stages of two layers."""
    return layer // 2


def whole(layer: int, copy: int | None) -> int:
    """Copies on the two devices in turn, all weights on the first."""
    return (copy or 0) % 2


ALL_FORWARD = "0F0 0F1 1F0 0F2 1F1 0F3 1F2 1F3 1B0 1B1 0B0 1B2 0B1 1B3 0B2 0B3"
IN_TURN = "0F0 0F1 1F0 1B0 0B0 1F1 0F2 1B1 0B1 1F2 0F3 1B2 0B2 1F3 1B3 0B3"
EAGER = "0F0 0F1 1F0 0F2 1B0 1F1 0B0 0F3 1B1 0B1 1F2 1B2 0B2 1F3 1B3 0B3"


def test_all_forward_work_first_is_gpipe() -> None:
    problem = unrolled(4)
    export = microbatches(None, problem, placed(problem, halves, ALL_FORWARD))
    found = export.facts()
    assert found["form"] == "pipeline"
    assert found["schedule"] == "GPipe"
    assert found["split_spec"] == {"layers.2": "BEGINNING"}
    assert found["devices"] == ["cuda:0", "cuda:1"]
    assert found["under_way"] == [4, 4]
    assert found["microbatches"] == 4
    # Five works of two layers each, forward and backward.
    assert found["step_time"] == found["placed_time"] == 5 * 2 * 3.0
    assert found["agreement"] == 1.0


def test_forward_and_backward_in_turn_are_1f1b() -> None:
    problem = unrolled(4)
    export = microbatches(None, problem, placed(problem, halves, IN_TURN))
    found = export.facts()
    assert found["schedule"] == "1F1B"
    assert found["under_way"] == [2, 1]
    assert found["step_time"] == found["placed_time"] == 30.0
    assert "1F1B; 4 microbatches, 30.0 s a step expected, 1.00 times" in str(export)
    assert "notes" not in found


def test_more_microbatches_under_way_than_in_1f1b_are_told() -> None:
    problem = unrolled(4)
    export = microbatches(None, problem, placed(problem, halves, EAGER))
    assert export.facts()["schedule"] == "1F1B"
    assert "has 3, 1 microbatches under way, 1F1B has 2, 1" in str(export)


def test_devices_in_rounds_are_interleaved_stages() -> None:
    problem = unrolled(4)
    in_rounds = placed(problem, lambda layer, _: layer % 2)  # all forward work is first in rank
    found = microbatches(None, problem, in_rounds).facts()
    assert found["schedule"] == "LoopedBFS"
    one_by_one = problem.placement(in_rounds.device, "program")
    assert microbatches(None, problem, one_by_one).facts()["schedule"] == "Interleaved1F1B"
    assert found["stages_per_device"] == 2
    assert found["devices"] == ["cuda:0", "cuda:1"] * 2
    assert list(found["split_spec"]) == ["layers.1", "layers.2", "layers.3"]


def test_a_pipeline_of_inference_has_forward_work_only() -> None:
    problem = unrolled(4, train=False)
    found = microbatches(None, problem, placed(problem, halves)).facts()
    assert found["schedule"] == "GPipe"
    assert found["step_time"] == 5 * 2 * 1.0


def test_whole_copies_on_devices_are_data_parallelism() -> None:
    problem = unrolled(4)
    export = microbatches(None, problem, placed(problem, whole))
    found = export.facts()
    assert (found["form"], found["use"], found["ranks"]) == ("data parallel", "DDP", 2)
    assert found["accumulate"] == 2
    assert found["state"] == "at one home, cuda:0"
    assert found["step_time"] == pytest.approx(2 * 4 * 3.0, rel=1e-6)
    assert str(export).startswith("use DDP with 2 ranks, on cuda:0, cuda:1; 4 microbatches")


def test_state_on_all_devices_or_without_room_for_copies_is_fsdp() -> None:
    problem = unrolled(4)
    spread = placed(problem, lambda layer, copy: layer % 2 if copy is None else copy % 2)
    found = microbatches(None, problem, spread).facts()
    assert (found["use"], found["state"]) == ("FSDP", "sharded")
    # The first device needs 900 bytes, 400 of them weights; the second 100, or 500 with weights.
    assert simulate(problem, placed(problem, whole)).peak_memory.tolist() == [900, 100]
    for second, use in ((499, "FSDP"), (500, "DDP")):
        unlike = unrolled(4, memory=900)
        devices = (unlike.cluster.devices[0], replace(unlike.cluster.devices[1], memory=second))
        unlike = replace(unlike, cluster=replace(unlike.cluster, devices=devices))
        assert microbatches(None, unlike, placed(unlike, whole)).facts()["use"] == use


def test_a_single_device_has_nothing_to_distribute() -> None:
    problem = unrolled(2)
    export = microbatches(None, problem, placed(problem, lambda *_: 1))
    assert export.facts()["form"] == "one device"
    assert "everything runs on cuda:1" in str(export)


@pytest.mark.parametrize("form", [DeviceMap, SplitSpec, LlamaCpp])
def test_forms_with_one_place_for_a_module_refuse_microbatches(form: type[Export]) -> None:
    problem = unrolled(2)
    with pytest.raises(InputError, match="export it with --format microbatches"):
        form.of(None, problem, placed(problem, whole))


def test_a_single_device_that_fetches_its_weights_is_refused() -> None:
    problem = unrolled(2)
    away = placed(problem, lambda _, copy: 0 if copy is None else 1)
    assert "100% of the weights" in refusal(problem, away)


def refusal(problem: Problem, placement: Placement) -> str:
    with pytest.raises(InputError) as error:
        microbatches(None, problem, placement)
    return str(error.value)


def test_a_mixture_is_refused_with_the_cost_of_the_nearest_forms() -> None:
    problem = unrolled(4)
    mixed = placed(problem, lambda layer, copy: copy % 2 if copy and copy > 1 else layer // 2)
    said = refusal(problem, mixed)
    assert "no plain pipeline: module 'layers.0' runs on cuda:0 for 75%, cuda:1 for 25%" in said
    assert "no plain data parallelism: microbatch 0 runs on cuda:0 for 50%" in said
    step = UnrolledStep.of(None, problem, mixed)
    time = simulate(problem, mixed).step_time
    for form in (nearest_pipeline(step), nearest_data_parallel(step)):
        assert f"the nearest {form.name} takes {form.step.step_time / time:.2f} times" in said
        assert form.step.step_time == simulate(problem, form.placement).step_time


def test_devices_with_unlike_numbers_of_copies_are_no_data_parallelism() -> None:
    problem = unrolled(4)
    uneven = placed(problem, lambda layer, copy: int(copy == 3))
    said = refusal(problem, uneven)
    assert "unlike numbers of microbatches: 3 on cuda:0, 1 on cuda:1" in said


def test_a_pipeline_with_its_weights_elsewhere_is_refused() -> None:
    problem = unrolled(4, devices=3)
    away = placed(problem, lambda layer, copy: 2 if copy is None else layer // 2)
    assert "100% of the weights live on other devices than their modules" in refusal(problem, away)


def test_stages_that_come_back_without_a_round_are_refused() -> None:
    problem = unrolled(4)
    there_and_back = placed(problem, lambda layer, _: int(layer in (1, 2)))
    said = refusal(problem, there_and_back)
    assert "its modules go over cuda:0, cuda:1, cuda:0 in turn" in said


def test_a_weight_of_two_stages_is_told() -> None:
    problem = unrolled(4, tied=True)
    export = microbatches(None, problem, placed(problem, halves, IN_TURN))
    assert "weight 'layers.0.weight' is used in stages 1, 2" in str(export)
    assert len(export.facts()["notes"]) == 1


def test_a_minor_share_of_the_computing_is_rounded_away() -> None:
    problem = unrolled(4)
    op = problem.graph.index_of("f1#0")
    times: Any = problem.op_time.copy()
    times[op] = 0.1
    problem = Problem(problem.graph, problem.cluster, times)
    placement = placed(problem, halves, IN_TURN).moved(op, 1)
    found = microbatches(None, problem, placement).facts()
    assert found["schedule"] == "1F1B"
    assert 0.98 < found["agreement"] < 1.0
    assert found["cost"] == found["step_time"] / found["placed_time"]


def test_the_nearest_form_of_a_pure_form_is_itself() -> None:
    problem = unrolled(4)
    chain = placed(problem, halves, IN_TURN)
    form = nearest_pipeline(UnrolledStep.of(None, problem, chain))
    assert (form.placement.device == chain.device).all()
    assert form.step.step_time == 30.0
    parallel = placed(problem, whole)
    nearest = nearest_data_parallel(UnrolledStep.of(None, problem, parallel))
    assert nearest.step.step_time == pytest.approx(24.0, rel=1e-6)


@pytest.mark.parametrize(
    ("held", "chunks", "trains", "name"),
    [
        ([4, 4], 1, True, "GPipe"),
        ([4, 1], 1, True, "1F1B"),
        ([2, 1], 1, False, "GPipe"),
        ([4, 3], 2, True, "Interleaved1F1B"),
        ([4, 4], 2, True, "LoopedBFS"),
        ([1, 1], 2, False, "LoopedBFS"),
    ],
)
def test_a_schedule_is_named_by_what_its_last_device_has_under_way(
    held: list[int], chunks: int, trains: bool, name: str
) -> None:
    assert schedule_of(held, 4, trains, chunks) == name


def test_a_stage_of_1f1b_begins_as_many_microbatches_as_stages_are_left() -> None:
    work = sequence(ONE_F_ONE_B, 1, 3, 4, True)
    phases = "".join("FB"[phase == BACKWARD] + str(number) for phase, number in work)
    assert phases == "F0F1B0F2B1F3B2B3"


def test_a_module_that_takes_no_time_stays_with_the_module_before_it() -> None:
    problem = unrolled(2)
    times: Any = problem.op_time.copy()
    for name in ("f2#0", "f2#1", "b2#0", "b2#1"):
        times[problem.graph.index_of(name)] = 0.0
    problem = Problem(problem.graph, problem.cluster, times)
    step = UnrolledStep.of(None, problem, placed(problem, lambda layer, _: int(layer > 0)))
    assert step.busiest.tolist() == [0, 1, 1, 1]


def test_rounding_leaves_ops_where_they_may_run() -> None:
    graph = layers()
    fixed = replace(graph, allowed=(("cpu",), *graph.allowed[1:]))
    made = Microbatch(2).apply(fixed)
    cpu = Device("cpu:0", "cpu", 10_000)
    two = tuple(Device(f"cuda:{number}", "cuda", 10_000) for number in range(2))
    whole = Cluster("unlike", (cpu, *two), (Link("*", "*", 1e9),))
    times: Any = np.repeat(~made.graph.is_parameter[:, None], 3, axis=1) * 1.0
    problem = Problem(made.graph, whole, times)
    inputs = made.graph.phase == INPUT
    device = np.where(inputs, 0, 1 + np.maximum(made.copy, 0) % 2)
    nearest = nearest_data_parallel(UnrolledStep.of(None, problem, problem.placement(device)))
    assert (nearest.placement.device[inputs] == 0).all()
    assert set(nearest.placement.device[made.copy == 1].tolist()) <= {0, 2}


def test_gradients_of_one_device_are_added_up_there() -> None:
    problem = unrolled(4)
    first_half = placed(problem, lambda layer, copy: int(copy is not None and copy > 1))
    nearest = nearest_data_parallel(UnrolledStep.of(None, problem, first_half))
    device = dict(zip(problem.graph.op_names, nearest.placement.device.tolist(), strict=True))
    for layer in range(LAYERS):
        assert device[f"b{layer}#sum1"] == device[f"b{layer}#0"] == device[f"b{layer}#1"]
        assert device[f"b{layer}#sum2"] == device[f"layers.{layer}:update"]


def test_a_module_that_is_called_again_later_is_no_stage() -> None:
    builder = GraphBuilder("again")
    before = []
    for number, module in enumerate(("one", "two", "one@1")):
        before = [builder.add(f"f{number}", "mm", before, module=module)]
    made = Microbatch(2).apply(builder.freeze())
    cuda = tuple(Device(f"cuda:{number}", "cuda", 100) for number in range(2))
    alike = Cluster("alike", cuda, (Link("*", "*", 1e9),))
    problem = Problem(made.graph, alike, np.ones((made.graph.num_ops, 2)))  # type: ignore[arg-type]
    on = [int(name.startswith("f1")) for name in made.graph.op_names]
    assert "a module is called again" in refusal(problem, problem.placement(np.array(on)))


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 4), (4, 4), (4, 8), (3, 2)])
def test_a_schedule_of_equal_stages_is_idle_for_one_work_less_than_stages(
    schedule: str, stages: int, count: int
) -> None:
    begins = slots(schedule, stages, count, trains=True)
    assert len(begins) == 2 * stages * count
    ends = max(start + (1.0 if work[0] == 2 else 2.0) for (_, work), start in begins.items())
    assert ends == 3.0 * (count + stages - 1)


def test_the_exporter_holds_to_its_contract_with_an_unrolled_step() -> None:
    problem = unrolled(2)
    check_exporter("microbatches", problem, [placed(problem, halves), placed(problem, whole)])
    text = microbatches(None, problem, placed(problem, halves)).text()
    assert json.loads(text)["form"] == "pipeline"
