"""Finding models by name, and settings that cannot be."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from roost import zoo
from roost.errors import InputError, UnknownName

NAMES = "bert cifar10_cnn gpt2 inception_v3 llama moe nasnet nmt resnet50 rnnlm t5 transformer vit"


def test_names_are_the_files():
    assert zoo.names() == NAMES.split()
    assert zoo.family_names() == ["cifar10", "nmt", "ptb"]


def test_listing_imports_no_torch():
    code = "import sys\nfrom roost import zoo\nzoo.names(), zoo.family_names()\nprint('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_settings_are_the_defaults_unless_overridden():
    assert zoo.settings("gpt2", layers=3) == dataclasses.replace(zoo.settings("gpt2"), layers=3)
    assert zoo.settings("gpt2", size="xl", batch=1).hidden == 1600
    assert zoo.settings("resnet50", size=152).blocks == (3, 8, 36, 3)


def test_a_model_of_another_package_is_found():
    assert zoo.settings("roost.zoo.vit:Vit", layers=2) == zoo.settings("vit", layers=2)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt3", {}, "no model called 'gpt3'; did you mean 'gpt2'?"),
        ("gpt2", {"layer": 2}, "no setting of gpt2 called 'layer'; did you mean 'layers'?"),
        ("gpt2", {"size": "x1"}, "no size of gpt2 called 'x1'"),
        ("rnnlm", {"size": "large"}, "size is 'large'; rnnlm has no named sizes"),
        ("gpt2", {"layers": 0}, "layers is 0; it must be positive"),
        ("gpt2", {"layers": -3}, "layers is -3; it must be positive"),
        ("gpt2", {"layers": 2.0}, "layers is 2.0; it must be a whole number"),
        ("gpt2", {"layers": "2"}, "layers is '2'; it must be a whole number"),
        ("gpt2", {"batch": True}, "batch is True; it must be a whole number"),
        ("gpt2", {"batch": None}, "batch is None; it must be a whole number"),
        ("gpt2", {"dropout": -0.1}, "dropout is -0.1; it must be 0 or more"),
        ("gpt2", {"dropout": 1}, "dropout is 1; it must be less than 1"),
        ("gpt2", {"dropout": "no"}, "dropout is 'no'; it must be a number"),
        ("llama", {"base": float("nan")}, "base is nan; it must be positive"),
        ("rnnlm", {"fused": 1}, "fused is 1; it must be true or false"),
        ("gpt2", {"hidden": 100}, "hidden is 100; it must be a multiple of heads, 12"),
        ("gpt2", {"length": 2000}, "length is 2000; it must be at most positions, 1024"),
        ("llama", {"kv_heads": 5}, "heads is 32; it must be a multiple of kv_heads, 5"),
        ("llama", {"hidden": 96}, "hidden is 96; with 32 heads, hidden / heads must be even"),
        ("moe", {"top_k": 9}, "top_k is 9; it must be at most experts, 8"),
        (
            "moe",
            {"batch": 1, "length": 3},
            "experts is 8; 3 tokens with top_k 2 leave some with none",
        ),
        (
            "nmt",
            {"hidden": 7, "bidirectional": True},
            "hidden is 7; it must be even where bidirectional",
        ),
        ("nasnet", {"filters": 6}, "filters is 6; it must be a multiple of 4"),
        ("inception_v3", {"image": 60}, "image is 60; it must be at least 75"),
        (
            "resnet50",
            {"blocks": (3, 0)},
            "blocks is (3, 0); it must be positive whole numbers, one for each stage",
        ),
        (
            "resnet50",
            {"blocks": 3},
            "blocks is 3; it must be positive whole numbers, one for each stage",
        ),
    ],
)
def test_what_cannot_be_is_named(name, overrides, message):
    with pytest.raises(InputError) as raised:
        zoo.settings(name, **overrides)
    assert str(raised.value).startswith(message)


def test_an_unknown_model_or_family_is_an_unknown_name():
    with pytest.raises(UnknownName):
        zoo.model("nothing like it")
    with pytest.raises(UnknownName, match="no family called 'cifar'; did you mean 'cifar10'"):
        zoo.family_models("cifar", 1, 0)


def test_model_gives_inputs_that_fit():
    sizes = {"batch": 2, "length": 4, "hidden": 8, "vocab": 20}
    for train in (True, False):
        model, inputs = zoo.model("rnnlm", train, **sizes)
        assert model.training is train
        assert model(*inputs).shape == (() if train else (2, 4, 20))
    with torch.device("meta"):
        model, inputs = zoo.model("llama", size="70b")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *inputs))


@pytest.mark.parametrize(
    ("name", "train"), [("cifar10_cnn", True), ("gpt2", False), ("moe", True), ("rnnlm", True)]
)
def test_build_captures_a_graph_with_all_parameters(name, train):
    pytest.importorskip("roost.frontends.torch")
    settings = type(zoo.settings(name)).small()
    graph = zoo.build(name, train=train, **dataclasses.asdict(settings))
    assert graph.name == name
    held = sum(parameter.nbytes for parameter in settings.model().parameters())
    assert graph.output_bytes[graph.is_parameter].sum() >= held
    assert graph.flop.sum() > 0
