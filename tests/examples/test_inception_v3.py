"""The shipped Inception-V3 has the known size, a whole training step, and the published
placement."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from roost.core.formats import load
from roost.core.graph import BACKWARD, FORWARD, INPUT, UPDATE, Graph
from roost.errors import InputError

FILE = Path(__file__).parents[2] / "examples" / "inception_v3.py"
BATCH = 32


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inception_v3_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(example: ModuleType) -> Graph:
    return example.build(BATCH)


def _convolutions(graph: Graph) -> list[str]:
    return [graph.modules[op] for op, kind in enumerate(graph.kinds) if kind == "conv2d"]


def _gpus(graph: Graph, gpu: np.ndarray, block: str) -> str:
    """Digits of a block's forward ops in program order."""
    ops = np.flatnonzero(graph.phase == FORWARD).tolist()
    return "".join(str(gpu[op]) for op in ops if graph.modules[op].startswith(f"{block}."))


def test_parameters_are_as_many_as_known(graph: Graph) -> None:
    # torchvision's inception_v3 has 27,161,264 parameters, of which 3,326,696 in the auxiliary
    # head.
    assert graph.output_bytes[graph.is_parameter].sum() == 4 * (27_161_264 - 3_326_696)


def test_forward_flop_are_as_many_as_known(graph: Graph) -> None:
    per_image = graph.flop[graph.phase == FORWARD].sum() / BATCH
    assert per_image == pytest.approx(2 * 5.71e9, rel=0.01)


def test_flop_grow_with_the_batch_and_parameters_do_not(example: ModuleType, graph: Graph) -> None:
    one = example.build(1)
    layers = np.isin(graph.kinds, ("conv2d", "linear"))
    assert np.array_equal(one.flop[layers] * BATCH, graph.flop[layers])
    assert np.array_equal(
        one.output_bytes[one.is_parameter], graph.output_bytes[graph.is_parameter]
    )


def test_backward_takes_twice_the_forward_flop_but_for_the_first_layer(graph: Graph) -> None:
    layers = np.array([kind.startswith(("conv2d", "linear")) for kind in graph.kinds])
    forward = graph.flop[layers & (graph.phase == FORWARD)].sum()
    first = graph.flop[graph.index_of("Conv2d_1a_3x3/forward")]
    assert graph.flop[layers & (graph.phase == BACKWARD)].sum() == 2 * forward - first


def test_every_op_depends_on_the_images_and_serves_an_update(graph: Graph) -> None:
    fed, useful = np.equal(graph.phase, INPUT), np.equal(graph.phase, UPDATE)
    assert fed.sum() == 1
    for op in range(graph.num_ops):
        fed[op] |= fed[graph.inputs_of(op)].any()
    for op in reversed(range(graph.num_ops)):
        useful[op] |= useful[graph.consumers_of(op)].any()
    assert (fed | graph.is_parameter).all()
    assert useful.all()


def test_every_convolution_has_its_backward_and_its_update(graph: Graph) -> None:
    modules = _convolutions(graph)
    assert len(modules) == 94
    for module in modules:
        path = module.replace(".", "/")
        gradient, update = (
            graph.index_of(f"{path}/backward_weight"),
            graph.index_of(f"{path}/update"),
        )
        assert graph.inputs_of(update).tolist() == [graph.index_of(f"{path}/weight"), gradient]
        assert graph.output_bytes[gradient] == graph.output_bytes[graph.index_of(f"{path}/weight")]
        assert graph.index_of(f"{path}/forward") in graph.inputs_of(gradient)
        assert (f"{path}/backward_input" in graph.op_names) == (module != "Conv2d_1a_3x3")
    assert graph.kinds.count("sgd") == graph.is_parameter.sum()


def test_backward_weight_reads_the_saved_input(graph: Graph) -> None:
    gradient = graph.index_of("Mixed_5b/b5x5_2/backward_weight")
    assert graph.index_of("Mixed_5b/b5x5_1/forward") in graph.inputs_of(gradient)
    assert graph.modules[gradient] == "Mixed_5b.b5x5_2"


def test_gradients_of_branches_are_added_where_they_part(graph: Graph) -> None:
    added = graph.index_of("Mixed_5b/concat/backward_add")
    sources = {graph.op_names[op] for op in graph.inputs_of(added).tolist()}
    assert sources == {
        "Mixed_5c/b1x1/backward_input",
        "Mixed_5c/b5x5_1/backward_input",
        "Mixed_5c/b3x3dbl_1/backward_input",
        "Mixed_5c/pool/backward",
    }


def test_a_gradient_is_as_large_as_its_tensor(graph: Graph) -> None:
    for op, name in enumerate(graph.op_names):
        path, _, role = name.rpartition("/")
        if role == "backward_add":
            assert graph.output_bytes[op] == graph.output_bytes[graph.index_of(f"{path}/forward")]
        elif graph.kinds[op] == "split":
            part = f"{path.rpartition('/')[0]}/{role.removeprefix('backward_')}/forward"
            assert graph.output_bytes[op] == graph.output_bytes[graph.index_of(part)]


@pytest.mark.parametrize(
    ("block", "digits"),
    [
        ("Mixed_5b", "2 20 233 02 2"),
        ("Mixed_6a", "0 333 0 1"),
        ("Mixed_6e", "2 000 03223 32 3"),
        ("Mixed_7a", "33 3320 0 3"),
        ("Mixed_7b", "0 0333 02000 33 0"),
    ],
)
def test_published_placement_is_that_of_the_table(
    example: ModuleType, graph: Graph, block: str, digits: str
) -> None:
    assert _gpus(graph, example.published_placement(graph), block) == digits.replace(" ", "")


def test_published_placement_covers_all_ops_and_keeps_layers_whole(
    example: ModuleType, graph: Graph
) -> None:
    gpu = example.published_placement(graph)
    assert gpu.dtype == np.int32
    assert gpu.shape == (graph.num_ops,)
    assert set(gpu.tolist()) == {0, 1, 2, 3}
    assert len(set(zip(graph.modules, gpu.tolist(), strict=True))) == len(set(graph.modules))
    # GPU 1 is nearly unused: one pool, one concat, one convolution.
    forward = np.flatnonzero((graph.phase == FORWARD) & (gpu == 1)).tolist()
    assert [graph.modules[op] for op in forward] == ["maxpool1", "Mixed_6a.concat", "Mixed_6c.b1x1"]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_contiguous_parts_are_in_order_and_about_equal(
    example: ModuleType, graph: Graph, parts: int
) -> None:
    part = example.contiguous(graph, parts)
    forward = graph.phase == FORWARD
    assert part.dtype == np.int32
    assert (np.diff(part[forward]) >= 0).all()
    share = np.bincount(part[forward], weights=graph.flop[forward]) / graph.flop[forward].sum()
    assert share == pytest.approx(np.full(parts, 1 / parts), abs=0.02)
    assert len(set(zip(graph.modules, part.tolist(), strict=True))) == len(set(graph.modules))


def test_contiguous_needs_a_part(example: ModuleType, graph: Graph) -> None:
    with pytest.raises(InputError, match="at least 1"):
        example.contiguous(graph, 0)


def test_every_build_is_the_same_and_the_script_saves_it(
    example: ModuleType, graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.build(BATCH).digest == graph.digest
    example.main(str(tmp_path / "out"))
    assert load(tmp_path / "out" / "inception_v3.json.gz") == graph
    printed = capsys.readouterr().out.splitlines()[1]
    assert all(figures in printed for figures in ("585 ops", "1134 edges", "23,834,568 parameters"))
    assert printed.split(", 1.10 TFLOP")[0] in " ".join((example.__doc__ or "").split())
