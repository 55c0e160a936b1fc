"""Models from Hugging Face configs, with random weights that take no memory."""

import json

import pytest

from roost.errors import InputError, UnsupportedOp
from roost.frontends import read

pytest.importorskip("transformers", reason="needs the hf extra")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
CONFIGS = {
    "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 50, "attn_pdrop": 0.0},
    "llama": SMALL | {"num_key_value_heads": 2},
    "bert": SMALL | {"attention_probs_dropout_prob": 0.0},
    "t5": {"num_layers": 1, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 50},
}


def write(folder, content):
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_language_model(tmp_path, kind, train):
    graph = read(write(tmp_path, {"model_type": kind} | CONFIGS[kind]), train=train, batch=2, length=16)
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
