"""`roost verify`: exit codes, JSON, and what it refuses."""

import json

import numpy as np
import pytest

from roost import zoo
from roost.core.cluster import Cluster, Device, Link
from roost.core.placement import Placement
from roost.cost_models import estimate
from roost.runtime.step.optimizers import Optimizer

SMALL = ("--set", "batch=2")
TOO_LARGE = (
    "--set",
    "layers=40",
    "--set",
    "hidden=32768",
    "--set",
    "intermediate=131072",
)  # 2 TB, and quickly sketched
FIGURES = {"peak": {"float32": 1e11}, "memory_bandwidth": 1e10}


@pytest.fixture
def folder(tmp_path):
    """Two threads as devices, and a placement of a training step over them."""
    devices = tuple(Device(f"cpu:{number}", "cpu", 2**34, **FIGURES) for number in range(2))
    cluster = Cluster("threads", devices, (Link("*", "*", 1e10),))
    cluster.save(tmp_path / "threads.toml")
    problem = estimate(zoo.build("cifar10_cnn", train=True, optimizer="adam", batch=2), cluster)
    problem.placement(np.arange(problem.graph.num_ops) // 40 % 2).save(tmp_path / "placement.json")
    return tmp_path


def args(folder, *more):
    where = ("--on", folder / "threads.toml", "--placement", folder / "placement.json")
    return ("verify", "cifar10_cnn", "--train", "--optimizer", "adam", *SMALL, *where, *more)


def test_the_same_numbers(roost, folder):
    result = roost(*args(folder, "--steps", "2"), columns=120)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the same numbers, to the last bit: 2 steps on cpu:0, cpu:1")
    assert "optimizer state" in result.stdout


def test_json(roost, folder):
    result = roost(*args(folder, "--json"))
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["same"]
    assert found["bitwise"]
    assert found["first_op"] is None
    assert found["differences"]["loss"]["absolute"] == 0.0
    assert found["differences"]["loss"]["tolerance"] == 1e-5


def test_other_numbers_exit_with_4_and_name_the_op(roost, folder, monkeypatch):
    monkeypatch.setattr(Optimizer, "_adam", lambda self, step, parameter, *rest: parameter.zero_())
    result = roost(*args(folder, "--json"))
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert not found["same"]
    assert found["first_op"] == "conv1.weight:update"
    assert found["device"] in ("cpu:0", "cpu:1")
    assert "error: not the same numbers" in result.stderr
    assert "'conv1.weight:update' on " in result.stderr
    assert roost(*args(folder)).exit_code == 4


def test_a_callable_with_settings(roost, folder, monkeypatch):
    (folder / "mine_verified.py").write_text(
        "import torch\n"
        "def net(width=3):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))\n"
        "    return model, (torch.randn(2, width),)\n"
    )
    monkeypatch.chdir(folder)
    for more in ((), ("--set", "width=5")):
        captured = roost("capture", "mine_verified:net", "-o", "graph.json", *more, "--json")
        graph = json.loads(captured.stdout)
        Placement(
            np.arange(graph["ops"]) % 2, devices=("cpu:0", "cpu:1"), graph=graph["digest"]
        ).save("net.json")
        result = roost(
            "verify", "mine_verified:net", "--on", "threads.toml", "--placement", "net.json", *more
        )
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--on", "h100x8"), "is not on this machine"),
        (("--steps", "0"), "--steps is 0"),
        (("--tolerance", "-1"), "--tolerance is -1"),
        (("--set", "batch=3"), "placement.json: the placement was made for graph "),
        (("--placement", "none.json"), "none.json: no such file"),
        (("--optimizer", "sdg"), "did you mean 'sgd'"),
        (("--set", "bach=3"), "did you mean 'batch'"),
    ],
)
def test_what_is_refused(refused, folder, change, message):
    assert message in refused(*args(folder, *change))


def test_what_has_to_be_given(refused, folder):
    assert "--placement is missing" in refused(
        "verify", "cifar10_cnn", "--on", folder / "threads.toml"
    )
    assert "add --on CLUSTER" in refused(
        "verify", "cifar10_cnn", "--placement", folder / "placement.json"
    )
    where = ("--on", folder / "threads.toml", "--placement", folder / "placement.json")
    assert "cannot be built here" in refused("verify", "model.onnx", *where)
    assert "llama: has weights of" in refused("verify", "llama", *TOO_LARGE, *where)


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_config_in_training(roost, folder):
    pytest.importorskip("transformers", reason="needs the hf extra")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 20}
    (folder / "config.json").write_text(json.dumps(config))
    model = (folder, "--set", "length=4", "--train", "--optimizer", "adam")
    graph = json.loads(roost("capture", *model, "-o", folder / "graph.json", "--json").stdout)
    Placement(np.zeros(graph["ops"], int), devices=("cpu:1", "cpu:0"), graph=graph["digest"]).save(
        folder / "hf.json"
    )
    found = roost(
        "verify",
        *model,
        "--on",
        folder / "threads.toml",
        "--placement",
        folder / "hf.json",
        "--json",
    )
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["bitwise"]
    assert "draws at random" in told["note"]  # its dropout is on
    assert "lm_head.weight (tied to transformer.wte.weight)" in told["differences"]
