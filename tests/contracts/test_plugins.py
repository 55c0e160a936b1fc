"""Every front-end, cost model, exporter, preset and transform of Roost, under its contract."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import roost
from roost import catalog, presets
from roost.core.costs import Costs
from roost.testing import (
    check_cost_model,
    check_exporter,
    check_frontend,
    check_preset,
    check_transform,
)
from roost.transforms import Transformed

ELSEWHERE = {  # plug-ins that need more than a file: tests of their own hold them to it
    "frontends": {"torch", "huggingface", "tensorflow"},
    "cost_models": {"profiled"},
    "transforms": {"microbatch"},  # it makes more ops, so no placement goes back
}


@pytest.mark.parametrize("name", presets.names())
def test_presets(name: str) -> None:
    check_preset(name)


@pytest.mark.parametrize("name", catalog.own_names("report/exports"))
def test_exporters(name: str) -> None:
    check_exporter(name)


@pytest.mark.parametrize("name", catalog.own_names("transforms"))
def test_transforms(name: str) -> None:
    if name not in ELSEWHERE["transforms"]:
        check_transform(name)


@pytest.mark.parametrize("name", catalog.own_names("cost_models"))
def test_cost_models(name: str) -> None:
    if name not in ELSEWHERE["cost_models"]:
        check_cost_model(name)


def test_front_ends(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    shape = [4, 4]
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, shape, np.ones(16).tolist())
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "tiny",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [weight],
    )
    onnx.save(helper.make_model(graph), tmp_path / "tiny.onnx")
    check_frontend("onnx", tmp_path / "tiny.onnx")
    assert {"onnx", *ELSEWHERE["frontends"]} == set(catalog.own_names("frontends"))


def test_a_captured_model_holds_to_the_contract_of_front_ends(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    torch.export.save(exported, tmp_path / "tiny.pt2")
    check_frontend("torch", tmp_path / "tiny.pt2", trust=True)


@dataclass(frozen=True)
class Wrong:
    """Plug-ins with a fault each."""

    fault: str

    def estimate(self, graph: roost.Graph, cluster: roost.Cluster) -> Costs:
        devices = cluster.num_devices - (self.fault == "shape")
        return Costs(np.ones((graph.num_ops, devices)), source="wrong")

    def apply(self, graph: roost.Graph) -> Transformed:
        return Transformed.unchanged(roost.load("examples/inception_v3.json.gz"))

    def read(self, source: str, **options: object) -> roost.Graph:
        builder = roost.GraphBuilder(self.fault)
        builder.parameter("w", 1)
        return builder.freeze()


def test_the_suites_see_faults() -> None:
    with pytest.raises(AssertionError, match="it must be"):
        check_cost_model(Wrong("shape"))
    with pytest.raises(AssertionError, match="a weight takes time"):
        check_cost_model(Wrong("time"))
    with pytest.raises(AssertionError, match="another graph"):
        check_transform(Wrong("graph"), ["chain"])
    with pytest.raises(AssertionError, match="no op that computes"):
        check_frontend(Wrong("empty"), "a file")
    with pytest.raises(AssertionError, match=r"is no roost\.report"):
        check_exporter(Wrong)
