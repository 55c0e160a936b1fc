"""Layers are found by their module paths, and placed as people do it by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from layered import machine, model, nastier, searching, timed

from roost.core.graph import FORWARD, Graph, GraphBuilder
from roost.errors import InputError, UnknownName
from roost.placers._shared.layers import Layers, top_level
from roost.placers._shared.units import Units
from roost.placers._splits.expert_rules import recurrent, rule_for, split, split_within
from roost.placers.expert import Expert
from roost.placers.published import BLOCKS, PUBLISHED, Published, published_gpus
from roost.simulator.compiled import simulate

FILE = Path(__file__).parents[2] / "examples" / "inception_v3.py"


@pytest.fixture(scope="module")
def inception() -> Graph:
    spec = importlib.util.spec_from_file_location("inception_v3_for_experts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    graph = module.build(2)
    assert isinstance(graph, Graph)
    return graph


def by_module(graph: Graph, device: np.ndarray) -> dict[str, set[int]]:
    """The devices of all ops of each module path."""
    found: dict[str, set[int]] = {}
    for module, d in zip(graph.modules, device.tolist(), strict=True):
        found.setdefault(module, set()).add(d)
    return found


def recurrent_model(
    stacks: dict[str, int], before: Sequence[str] = (), after: Sequence[str] = ()
) -> Graph:
    """Layers called at each of four steps, between modules that are called once."""
    builder = GraphBuilder("recurrent")
    last = builder.add("input", phase="input", output_bytes=4)

    def add(name: str, module: str, *inputs: str) -> str:
        if f"{module}.weight" not in weights:
            weights.add(builder.parameter(f"{module}.weight", 10, module=module))
        return builder.add(name, inputs=[*inputs, f"{module}.weight"], output_bytes=4, module=name)

    weights: set[str] = set()
    for module in before:
        last = add(module, module, last)
    for path, count in stacks.items():
        side = path.partition(".")[0]
        last = add(f"{side}.embed", f"{side}.embed", last)
        state = [last] * count
        for step in range(4):
            for layer in range(count):
                name = f"{path}.{layer}" + (f"@{step}" if step else "")
                last = state[layer] = add(name, f"{path}.{layer}", last, state[layer])
    for module in after:
        last = add(module, module, last)
    return builder.freeze()


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("encoder.layers.3.attention.query", "encoder.layers.3"),
        ("encoder.embed.table", "encoder.embed"),
        ("encoder", "encoder"),
        ("encoder.layers", "encoder.layers"),
        ("stages.1.2.conv", "stages.1.2"),
        ("Mixed_5b.b1x1.conv", "Mixed_5b"),
        ("head", "head"),
    ],
)
def test_a_path_names_the_layer_it_is_in(path: str, layer: str) -> None:
    modules = [
        "encoder.layers.0@3.x",
        "encoder.layers.3.attention.query",
        "stages.0.1.x",
        "stages.1.2.conv",
    ]
    assert top_level(modules)(path) == layer


def test_layers_are_in_forward_order_and_take_backward_ops_parameters_and_updates_along() -> None:
    graph = model(["embed", "layers.0", "layers.1", "output"])
    layers = Layers.of(graph)
    assert layers.names == ("embed", "layers.0", "layers.1", "output")
    for op, name in enumerate(graph.op_names):
        assert (
            name == "input"
            or layers.names[layers.layer[op]] == name.partition(":")[2].partition("/")[0]
        )
    assert layers.layer[graph.index_of("input")] == 0


def test_without_paths_each_forward_op_is_a_layer_and_backward_ops_stand_beside_theirs() -> None:
    graph = model([""] * 6)
    layers = Layers.of(graph)
    assert layers.num_layers == 6
    for op, name in enumerate(graph.op_names):
        assert name == "input" or layers.layer[op] == int(name.partition(":")[0])


def test_all_calls_of_a_module_are_one_layer() -> None:
    layers = Layers.of(recurrent_model({"lstm.layers": 2}, after=["output"]))
    assert layers.names == ("lstm.embed", "lstm.layers.0", "lstm.layers.1", "output")


def test_a_layer_that_shares_its_weight_with_the_first_is_where_that_is_and_the_loss_too() -> None:
    builder = GraphBuilder("tied")
    builder.parameter("weight", 100)
    last = builder.add("embed", inputs=["weight"], output_bytes=10, module="embed")
    for number in range(3):
        builder.parameter(f"weight{number}", 10)
        last = builder.add(
            f"op{number}",
            inputs=[last, f"weight{number}"],
            output_bytes=10,
            module=f"layers.{number}",
        )
    last = builder.add("logits", inputs=[last, "weight"], output_bytes=1000, module="output")
    builder.add("scaled", inputs=[last], output_bytes=500, module="output")
    builder.add("loss", inputs=["scaled"], output_bytes=4, module="loss")
    graph = builder.freeze()
    layers, units = Layers.of(graph), Units.of(timed(graph, machine(10_000)))
    layer = layers.of_units(units)[units.unit]
    placed = {
        name: layers.names[number]
        for name, number in zip(graph.op_names, layer.tolist(), strict=True)
    }
    assert {placed[name] for name in ("weight", "embed", "logits", "scaled", "loss")} == {"embed"}
    assert placed["op2"] == "layers.2"


def test_every_op_of_any_graph_has_a_layer_and_every_unit_a_place_in_the_chain() -> None:
    for seed in range(100):
        problem = nastier(seed)
        layers, units = Layers.of(problem.graph), Units.of(problem)
        assert (layers.layer >= 0).all()
        assert (layers.layer < layers.num_layers).all()
        assert sorted(layers.chain(units).tolist()) == list(range(units.num_units))


def test_a_split_has_the_shares_that_are_asked_for() -> None:
    assert split(np.ones(8), np.array([0.5, 0.25, 0.25])).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert split(np.array([6.0, 1, 1]), np.array([0.5, 0.5])).tolist() == [0, 1, 1]
    assert split(np.zeros(4), np.array([0.5, 0.5])).tolist() == [0, 0, 1, 1]


def test_a_part_ends_where_its_room_does() -> None:
    shares, sizes = np.array([0.5, 0.5, 0.0]), np.full(8, 10.0)
    assert split_within(np.ones(8), shares, sizes, np.array([99, 99, 99])).tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    assert split_within(np.ones(8), shares, sizes, np.array([20, 40, 99])).tolist() == [
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
    ]
    assert split_within(np.ones(3), shares, sizes[:3], np.array([5, 5, 5])).tolist() == [2, 2, 2]


def test_layers_are_split_by_the_speed_of_the_devices_and_the_cpu_is_left_out() -> None:
    graph = model([f"layers.{number}" for number in range(12)])
    problem = timed(
        graph, machine(*[10_000] * 3, kinds=("cpu", "cuda", "cuda")), speed=(1.0, 6.0, 3.0)
    )
    placement = Expert().place(problem, searching(problem)[1])
    forward = placement.device[graph.phase == FORWARD]
    assert forward.tolist() == [1] * 8 + [2] * 4
    assert all(
        len(devices) == 1
        for module, devices in by_module(graph, placement.device).items()
        if module
    )


def test_what_the_gpus_cannot_hold_is_on_the_cpu() -> None:
    graph = model([f"layers.{number}" for number in range(12)], size=1)
    problem = timed(
        graph, machine(10_000, 420, 420, kinds=("cpu", "cuda", "cuda")), speed=(1.0, 6.0, 6.0)
    )
    placement = Expert().place(problem, searching(problem)[1])
    assert simulate(problem, placement).feasible
    assert set(placement.device.tolist()) == {0, 1, 2}


def test_a_language_model_has_one_recurrent_layer_on_each_device() -> None:
    graph = recurrent_model({"lstm.stack.layers": 2}, before=["embed"], after=["output", "loss"])
    problem = timed(graph, machine(*[10_000] * 4))
    placed = by_module(graph, Expert().place(problem, searching(problem)[1]).device)
    assert (
        placed["embed"] == placed["lstm.stack.layers.0"] == placed["lstm.stack.layers.0@3"] == {0}
    )
    assert (
        placed["output"]
        == placed["loss"]
        == placed["lstm.stack.layers.1"]
        == placed["lstm.stack.layers.1@3"]
        == {1}
    )


@pytest.mark.parametrize(
    ("num_devices", "encoder", "decoder"), [(4, [0, 1], [2, 3]), (2, [0, 1], [0, 1])]
)
def test_translation_has_embeddings_below_and_attention_and_softmax_on_top(
    num_devices: int, encoder: list[int], decoder: list[int]
) -> None:
    stacks = {"encoder.stack.layers": 2, "decoder.stack.layers": 2}
    graph = recurrent_model(stacks, after=["decoder.attention", "output", "loss"])
    layers = Layers.of(graph)
    assert rule_for(graph, layers) == "recurrent"
    placed = dict(zip(layers.names, recurrent(graph, layers, num_devices).tolist(), strict=True))
    assert [placed[f"encoder.stack.layers.{number}"] for number in (0, 1)] == encoder
    assert [placed[f"decoder.stack.layers.{number}"] for number in (0, 1)] == decoder
    assert (placed["encoder.embed"], placed["decoder.embed"]) == (encoder[0], decoder[0])
    assert {placed[name] for name in ("decoder.attention", "output", "loss")} == {decoder[1]}


def test_more_recurrent_layers_than_devices_are_in_contiguous_parts() -> None:
    graph = recurrent_model({"lstm.layers": 6}, after=["output"])
    layers = Layers.of(graph)
    placed = dict(zip(layers.names, recurrent(graph, layers, 2).tolist(), strict=True))
    assert [placed[f"lstm.layers.{number}"] for number in range(6)] == [0, 0, 0, 1, 1, 1]


def test_inception_is_split_into_blocks_with_as_many_layers(inception: Graph) -> None:
    problem = timed(inception, machine(*[10**12] * 5, kinds=("cpu", *["cuda"] * 4)), seconds=1e-3)
    assert rule_for(inception, Layers.of(inception)) == "blocks"
    placement = Expert().place(problem, searching(problem)[1])
    devices = [by_block(inception, placement.device)[block] for block in BLOCKS]
    assert all(len(found) == 1 for found in devices)
    order = [found.pop() for found in devices]
    assert order == sorted(order)
    forward = inception.phase == FORWARD
    assert np.bincount(placement.device[forward], minlength=5)[1:] == pytest.approx(
        np.full(4, forward.sum() / 4), abs=8
    )


def by_block(graph: Graph, device: np.ndarray) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for module, d in zip(graph.modules, device.tolist(), strict=True):
        found.setdefault(module.partition(".")[0], set()).add(d)
    return found


def test_nasnet_is_split_into_contiguous_cells() -> None:
    names = [
        "stem",
        "cell_0",
        "cell_1",
        "reduction_0",
        "cell_2",
        "cell_3",
        "reduction_1",
        "cell_4",
        "cell_5",
        "fc",
    ]
    graph = model([f"{name}.conv" for name in names])
    problem = timed(graph, machine(*[10_000] * 4))
    placement = Expert().place(problem, searching(problem)[1])
    assert placement.device[graph.phase == FORWARD].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_the_published_placement_is_that_of_the_table(inception: Graph) -> None:
    gpu = published_gpus(inception)
    forward = np.flatnonzero(inception.phase == FORWARD).tolist()
    for block, digits in PUBLISHED.items():
        ops = [op for op in forward if inception.modules[op].partition(".")[0] == block]
        assert "".join(str(gpu[op]) for op in ops) == digits.replace(" ", "")
    assert all(len(devices) == 1 for devices in by_module(inception, gpu).values())


def test_the_published_placement_is_on_the_first_four_gpus(inception: Graph) -> None:
    problem = timed(inception, machine(*[10**12] * 6, kinds=("cpu", *["cuda"] * 5)), seconds=1e-3)
    for placer in (Published(), Expert("published")):
        placement = placer.place(problem, searching(problem)[1])
        assert (placement.device == published_gpus(inception) + 1).all()


def test_the_published_placement_is_for_its_model_and_four_gpus(inception: Graph) -> None:
    few = timed(inception, machine(*[10**12] * 4, kinds=("cpu", *["cuda"] * 3)))
    with pytest.raises(InputError, match="for 4 GPUs; cluster 'machine' has 3"):
        Published().place(few, searching(few)[1])
    other = timed(model(["a", "b"]), machine(*[10_000] * 4))
    with pytest.raises(InputError, match="is for Inception-V3; graph 'model' has 0"):
        Published().place(other, searching(other)[1])


def test_a_rule_can_be_chosen_and_an_unknown_or_unfitting_one_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'layers'"):
        Expert("layer")
    problem = timed(
        model([f"cell_{number}" for number in range(4)] + ["reduction_0"]), machine(*[10_000] * 2)
    )
    for rule in ("layers", "cells", "blocks"):
        assert simulate(problem, Expert(rule).place(problem, searching(problem)[1])).feasible
    with pytest.raises(InputError, match="no recurrent layers"):
        Expert("recurrent").place(problem, searching(problem)[1])
