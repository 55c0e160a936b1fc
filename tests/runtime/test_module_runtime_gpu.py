"""The module runtime on a GPU: weights streamed from the CPU, or used there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import roost
from roost.runtime.whole.apply import apply, remove
from roost.runtime.whole.module_placement import (
    ModulePlacement,
    is_placed,
    named_tensors,
    signature,
)

pytestmark = pytest.mark.gpu


def llama(hidden):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def model():
    return llama(256)


def placement(model, seed, in_place=False):
    rng = np.random.default_rng(seed)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    away = [name for name in linear if rng.random() < 0.7]
    there = [name for name in away if in_place and name != "lm_head" and rng.random() < 0.4]
    home = {f"{name}.weight": "cpu" for name in away}
    home |= dict.fromkeys(
        ["model.embed_tokens.weight", "lm_head.weight"], home.get("lm_head.weight", "cuda:0")
    )
    streamed = {name: (f"{name}.weight",) for name in away if name not in there}
    if home["lm_head.weight"] == "cpu":
        streamed = {"model.embed_tokens": ("model.embed_tokens.weight",), **streamed}
    window = int(rng.integers(0, 8_000_000))
    return ModulePlacement(
        "cuda:0", home, dict.fromkeys(there, "cpu"), streamed, window, signature(model)
    )


@pytest.mark.parametrize("seed", range(6))
def test_streaming_does_not_change_a_bit(model, seed):
    ids = torch.randint(0, 1000, (2, 17))
    with torch.no_grad():
        expected = model.cuda()(ids.cuda()).logits.cpu()
    model.cpu()
    apply(model, placement(model, seed))
    for _ in range(20):
        assert torch.equal(model(ids).logits, expected)
    remove(model)
    assert {tensor.device.type for tensor in named_tensors(model).values()} == {"cpu"}
    assert not any(tensor.is_pinned() for tensor in named_tensors(model).values())


@pytest.mark.parametrize("seed", range(3))
def test_weights_that_come_in_their_calls_do_not_change_a_bit(model, seed):
    ids = torch.randint(0, 1000, (2, 17))
    with torch.no_grad():
        expected = model.cuda()(ids.cuda()).logits.cpu()
    model.cpu()
    where = placement(model, seed)
    apply(model, replace(where, on_the_spot=tuple(where.streamed)[::2]))
    for _ in range(5):
        assert torch.equal(model(ids).logits, expected)
    remove(model)


@pytest.mark.parametrize("few_rows", [0, 5, 100])
@pytest.mark.parametrize("seed", range(3))
def test_modules_that_run_on_the_cpu(model, seed, few_rows):
    """The second call of a shape is computed in turn with the GPU; with few rows allowed, weights
    come to the GPU."""
    ids = torch.randint(0, 1000, (2, 17))
    with torch.no_grad():
        expected = model(ids).logits
    apply(model, replace(placement(model, seed, in_place=True), few_rows=few_rows))
    for _ in range(4):
        assert torch.allclose(
            model(ids.cuda()).logits.cpu(), expected, atol=1e-2 * float(expected.abs().max())
        )
    remove(model)


def test_a_whole_block_runs_on_the_cpu(model):
    """Layers inside it are wrapped too, and called by another thread than the model."""
    ids = torch.randint(0, 1000, (1, 3))
    with torch.no_grad():
        expected = model(ids).logits
    parts = [
        f"model.layers.{n}.mlp.{part}_proj" for n in range(4) for part in ("gate", "up", "down")
    ]
    home = {f"{name}.weight": "cpu" for name in parts}
    runs_on = {f"model.layers.{n}.mlp": "cpu" for n in range(4)}
    apply(model, ModulePlacement("cuda:0", home, runs_on, {}, 0, signature(model), few_rows=32))
    for _ in range(5):
        assert torch.allclose(
            model(ids.cuda()).logits.cpu(), expected, atol=1e-3 * float(expected.abs().max())
        )
    long = torch.randint(0, 1000, (4, 40))
    assert model(long.cuda()).logits.shape == (4, 40, 1000)
    remove(model)


@pytest.mark.parametrize("seed", [1, 2])
def test_generate_gives_the_same_tokens(model, seed):
    ids = torch.randint(0, 1000, (1, 9))
    ask = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = (
        model.cuda().generate(ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), **ask).cpu()
    )
    apply(model.cpu(), placement(model, seed))
    given = ids.to(model.device)  # that of the first weight
    assert torch.equal(
        model.generate(given, attention_mask=torch.ones_like(given), **ask).cpu(), expected
    )
    remove(model)


def test_what_the_next_one_reads_stays_on_the_cpu():
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 4, 3),
    )
    model, images = torch.nn.Sequential(*layers).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images)
    where: list[torch.device] = []
    hook = model[2].register_forward_pre_hook(lambda module, given: where.append(given[0].device))
    home = {"0.weight": "cpu", "0.bias": "cpu"}
    runs_on = dict.fromkeys("012", "cpu")
    apply(model, ModulePlacement("cuda:0", home, runs_on, model=signature(model), stays=("0", "1")))
    for _ in range(3):
        torch.testing.assert_close(model(images.cuda()).cpu(), expected, atol=1e-3, rtol=1e-3)
    assert {device.type for device in where} == {"cpu"}
    hook.remove()
    remove(model)


def test_a_plan_is_tried_and_stays_within_its_cap(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = llama(1024)  # 240 MiB, which are more than the cap beside what libraries keep
    ids = torch.randint(0, 1000, (1, 1))
    size = sum(
        tensor.nbytes for tensor in {id(t): t for t in named_tensors(model).values()}.values()
    )
    cap = 100 * 2**20 + size // 2
    plan = roost.place(model, {"input_ids": ids}, memory={"cuda:0": cap}, seconds=2)
    assert plan.modules.streamed or plan.modules.runs_on
    assert plan.measured > 0
    assert not is_placed(model)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        expected = model(ids).logits
    plan.apply(model)
    for _ in range(3):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-3, rtol=1e-3)
    assert torch.cuda.max_memory_allocated() - before <= cap
    plan.remove(model)
