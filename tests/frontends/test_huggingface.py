"""Models from Hugging Face configs, with random weights that take no memory."""

import json

import numpy as np
import pytest
import torch

from roost.errors import InputError, UnsupportedOp
from roost.frontends import read
from roost.frontends.torch import step_of
from roost.runtime.ops.verify import verify
from support.runs import any_placement, virtual_problem

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
}
CONFIGS = {
    "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 50, "attn_pdrop": 0.0},
    "llama": SMALL | {"num_key_value_heads": 2},
    "bert": SMALL | {"attention_probs_dropout_prob": 0.0},
    "t5": {"num_layers": 1, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 50},
}


def write(folder, content):
    (folder / "config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return str(folder)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_language_model(tmp_path, kind, train):
    graph = read(
        write(tmp_path, {"model_type": kind} | CONFIGS[kind]), train=train, batch=2, length=16
    )
    assert graph.name == kind
    assert ("sgd" in graph.kinds) == train
    if kind != "t5":  # its mask learns, so in training its scores are multiplied out
        assert "attention" in graph.kinds


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", InputError, "config.json: is not JSON"),
        ({"a": 1}, InputError, "model_type is missing"),
        ({"model_type": "nonsense"}, InputError, "model_type 'nonsense'"),
        ({"model_type": "vit"}, UnsupportedOp, "vit is no language model"),
        ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, InputError, "cannot build this model"),
    ],
)
def test_a_bad_config(tmp_path, content, error, message):
    with pytest.raises(error, match=message):
        read(write(tmp_path, content))


def test_a_bad_length(tmp_path):
    with pytest.raises(InputError, match="at least 1"):
        read(write(tmp_path, {"model_type": "gpt2"} | CONFIGS["gpt2"]), length=0)


def test_a_model_that_keeps_keys_and_values_is_captured_without():
    """As it comes from transformers, its outputs have a cache, which is no tensor. It is left as it
    was."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    inputs = {"input_ids": torch.zeros((1, 4), dtype=torch.int64)}
    assert model.config.use_cache
    step = step_of(model, inputs)
    assert model.config.use_cache
    problem = virtual_problem(step)
    assert verify(
        step, problem, any_placement(problem, np.random.default_rng(0)), model, inputs
    ).same
