"""The test models that the onnx package ships: almost all are captured."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the onnx extra")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("onnx_tests")


@pytest.mark.slow
def test_refusals_of_shipped_models_are_few_and_of_known_causes(script):
    data, nodes = script.count(script.data()), script.count(script.nodes())
    assert data.first.total() <= 1
    assert not data.refused
    assert nodes.models > 1000
    assert nodes.first.total() <= 0.04 * nodes.models
    assert len(nodes.refused) <= 0.016 * nodes.models
    assert {*nodes.first} <= {*script.CAUSES.values()}
