"""Models of the zoo, exported by PyTorch and read back, count the same FLOP."""

import pytest
import torch

from roost import zoo
from roost.frontends.onnx import Onnx

pytest.importorskip("onnx", reason="needs the onnx extra")
pytest.importorskip("onnxscript", reason="PyTorch needs it to export")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["resnet50", "bert", "gpt2"])
def test_a_zoo_model_read_back_from_onnx(name, tmp_path):
    settings = zoo.settings(name, batch=1)
    path = tmp_path / f"{name}.onnx"
    torch.onnx.export(
        settings.model().eval(), settings.inputs(False), str(path), dynamo=True, verbose=False
    )
    expected = zoo.build(name, train=False, batch=1)
    found = Onnx().read(path)
    assert found.flop.sum() == pytest.approx(expected.flop.sum(), rel=0.01)
    kept = expected.output_bytes[expected.is_parameter].sum()
    # An exporter writes some things out that a module makes as it runs, such as a mask.
    assert found.output_bytes[found.is_parameter].sum() == pytest.approx(kept, rel=0.05)
