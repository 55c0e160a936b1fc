"""`roost capture` and `roost zoo`."""

import json
import os
import subprocess
import sys

import pytest

from roost import load, zoo


def test_a_zoo_model_with_settings(roost, tmp_path):
    path = tmp_path / "graph.json.gz"
    result = roost(
        "capture",
        "cifar10_cnn",
        "-o",
        path,
        "--train",
        "--set",
        "batch=2",
        "--optimizer",
        "adam",
        "--json",
    )
    facts = json.loads(result.stdout)
    graph = load(path)
    assert facts["ops"] == graph.num_ops
    assert facts["digest"] == graph.digest
    assert facts["flop"] == graph.flop.sum()
    assert graph.digest == zoo.build("cifar10_cnn", train=True, optimizer="adam", batch=2).digest


def test_the_same_command_writes_the_same_bytes(tmp_path):
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "roost",
            "capture",
            "cifar10_cnn",
            "--train",
            "-o",
            f"{seed}.json",
        ]
        subprocess.run(
            command,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


def test_a_captured_graph_goes_on_to_simulate(roost, tmp_path):
    path = tmp_path / "graph.json"
    shown = roost("capture", "cifar10_cnn", "-o", path, "--set", "batch=2").stdout
    assert shown.startswith("cifar10_cnn: ")
    assert "fits" in roost("simulate", path, "--on", "h200").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet5", "-o", "graph.json"), "no model called 'resnet5'; did you mean 'resnet50'"),
        (("cifar10_cnn", "-o", "graph.json", "--set", "bach=2"), "'bach'; did you mean 'batch'"),
        (("cifar10_cnn", "-o", "graph.json", "--set", "batch=many"), "batch"),
        (("cifar10_cnn", "-o", "graph.json", "--set", "batch=0"), "batch"),
        (("cifar10_cnn", "-o", "graph.json", "--set", "batch"), "write it as KEY=VALUE"),
        (("cifar10_cnn", "-o", "graph.json", "--input", "x=1,3"), "--input is for files"),
        (("model.onnx", "-o", "graph.json", "--input", "x=1,a"), "write it as 1,3,224,224"),
        (("model.onnx", "-o", "graph.json", "--input", "x==a"), "write numbers, true or false"),
        (("model.onnx", "-o", "graph.json"), "model.onnx"),
        (("none.pt2", "-o", "graph.json"), "none.pt2: no such file"),
        (("no_such_package:model", "-o", "graph.json"), "cannot load 'no_such_package:model'"),
        (("README.txt", "-o", "graph.json"), "README.txt: is no model"),
        (("some/where", "-o", "graph.json"), "no such file"),
        (
            ("cifar10_cnn", "-o", "none/graph.json", "--set", "batch=2"),
            "folder none does not exist",
        ),
        (
            ("cifar10_cnn", "-o", "graph.json", "--train", "--optimizer", "sdg"),
            "did you mean 'sgd'",
        ),
    ],
)
def test_what_is_refused(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.txt").write_text("no model")
    assert message in refused("capture", *arguments)
    assert not (tmp_path / "graph.json").exists()


def test_the_zoo_is_listed_without_pytorch():
    code = "import sys; from roost.cli import app; app(['zoo', '--json'], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    listed, _, loaded = out.strip().rpartition("\n")
    assert loaded == "False"
    assert list(json.loads(listed)) == zoo.names()


def test_every_model_of_the_zoo_has_its_figures():
    figures = zoo.figures()
    for name in zoo.names():
        assert figures[name]["parameters"] > 0
        assert figures[name]["train"]["ops"] > figures[name]["inference"]["ops"] > 0
        assert figures[name]["train"]["flop"] > 2 * figures[name]["inference"]["flop"]


def test_the_settings_of_a_model(roost, refused):
    assert json.loads(roost("zoo", "cifar10_cnn", "--json").stdout)["batch"] > 0
    assert "batch" in roost("zoo", "cifar10_cnn").stdout
    assert "did you mean 'gpt2'" in refused("zoo", "gpt")


MODEL = """
import torch

def net(width=4):
    return torch.nn.Linear(width, width), torch.randn(2, width)

class Net(torch.nn.Linear):
    def __init__(self, width=4):
        super().__init__(width, width)

    def example_inputs(self):
        return torch.randn(2, self.in_features)
"""


@pytest.mark.parametrize("name", ["net", "Net"])
def test_settings_are_handed_to_a_callable(roost, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    module = f"model_with_{name}"
    (tmp_path / f"{module}.py").write_text(MODEL)
    sizes = []
    for given in ([], ["--set", "width=16"]):
        result = roost("capture", f"{module}:{name}", "-o", "graph.json", "--json", *given)
        assert result.exit_code == 0, result.output
        sizes.append(json.loads(result.stdout)["parameter_bytes"])
    assert sizes == [4 * (4 * 4 + 4), 4 * (16 * 16 + 16)]


def test_a_setting_that_a_callable_has_not_is_named(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_unset.py").write_text(MODEL)
    message = refused("capture", "model_unset:net", "-o", "graph.json", "--set", "depth=2")
    assert message.startswith("cannot load 'model_unset:net' with depth=2: TypeError: ")
    assert "depth" in message


@pytest.mark.parametrize("given", [[], ["--set", "width=8"]])
def test_without_a_loss_it_says_how_to_have_one_here(refused, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_lossless.py").write_text(MODEL)
    message = refused("capture", "model_lossless:net", "-o", "graph.json", "--train", *given)
    assert "training needs a model that returns its loss" in message
    assert "or give loss=" not in message
    assert "whose module returns its loss, or capture it in Python: roost.capture(" in message
