"""Every model: the published number of parameters, and at its small size that it computes, learns
and exports."""

import dataclasses
import math

import pytest
import torch

from roost import zoo
from roost.zoo import _layers, inception_v3, llama, moe, nasnet, nmt, rnnlm, t5
from roost.zoo._settings import ModelSettings

# Parameters, those that are tied once. The sources are the papers, and the weights that their
# authors or the makers of well-known libraries published; arithmetic where nobody published any.
PUBLISHED = {
    # The 110 M of the paper: 109,482,240 - pooler 590,592 + masked-word head 622,650.
    ("bert", None): 109_514_298,
    ("bert", "large"): 335_174_458,  # 340 M in the paper, which counts roughly; the head as above
    ("cifar10_cnn", None): 4_864 + 102_464 + 885_120 + 73_920 + 1_930,  # layer by layer
    # OpenAI's weights; the paper says 117 M, corrected to 124 M by its authors.
    ("gpt2", None): 124_439_808,
    ("gpt2", "medium"): 354_823_168,
    ("gpt2", "large"): 774_030_080,
    ("gpt2", "xl"): 1_557_611_200,
    ("inception_v3", None): 23_834_568,  # torchvision's 27,161,264 without the auxiliary head
    ("llama", None): 8_030_261_248,  # Meta's weights
    ("llama", "1b"): 1_235_814_400,
    ("llama", "7b"): 6_738_415_616,
    ("llama", "8b"): 8_030_261_248,
    ("llama", "13b"): 13_015_864_320,
    ("llama", "70b"): 68_976_648_192,
    ("moe", None): 46_702_792_704,  # Mistral AI's weights of Mixtral 8x7B
    # 5.3 M in the paper; Google's weights without moving means and variances.
    ("nasnet", None): 5_289_978,
    ("nasnet", "large"): 88_753_150,  # 88.9 M in the paper; the same
    ("nmt", None): (
        2 * 32000 * 1024  # embeddings
        + 3 * (8 * 1024**2 + 8 * 1024)  # LSTM layers: 4 gates, from input and state, 2 biases
        + (12 * 1024**2 + 8 * 1024)  # the decoder's first, which also takes the attention's result
        + 3 * 1024**2  # attention
        + 32000 * 1025  # output
    ),
    ("resnet50", None): 25_557_032,  # torchvision; 25.6 M
    ("resnet50", "152"): 60_192_808,
    # Embedding, LSTMs, output.
    ("rnnlm", None): 10000 * 2048 + 2 * (8 * 2048**2 + 8 * 2048) + 10000 * 2049,
    ("t5", None): 60_506_624,  # Google's weights; 60 M in the paper
    ("t5", "11b"): 11_307_321_344,
    ("transformer", None): (
        37000 * 512  # one embedding for all; the paper says 65 M in all and "about 37000" words
        # Encoder: attention, feed-forward, norms.
        + 6 * (4 * 512**2 + 2 * 512 * 2048 + 2560 + 2 * 1024)
        + 6 * (8 * 512**2 + 2 * 512 * 2048 + 2560 + 3 * 1024)
    ),
    ("transformer", "big"): 213_000_000,  # the paper
    ("vit", None): 86_567_656,  # torchvision; 86 M in the paper
    ("vit", "large"): 304_326_632,
}
OUTPUT = dict.fromkeys(("bert", "gpt2", "llama", "moe", "rnnlm"), ("batch", "length", "vocab"))
OUTPUT |= dict.fromkeys(("nmt", "t5", "transformer"), ("batch", "target_length", "vocab"))
OUTPUT |= dict.fromkeys(
    ("cifar10_cnn", "inception_v3", "nasnet", "resnet50", "vit"), ("batch", "classes")
)

# Beside the small size of each model, settings that change what is computed.
VARIANTS = {
    "bert dropout": ("bert", {"dropout": 0.1}),
    "gpt2 dropout": ("gpt2", {"dropout": 0.1}),
    "llama tied": ("llama", {"tied": True}),
    "llama all heads": ("llama", {"kv_heads": 4, "dropout": 0.1}),
    "nasnet looks back": ("nasnet", {"skips_reduction": True, "cells": 2}),
    "nmt both ways": (
        "nmt",
        {"bidirectional": True, "residual": True, "layers": 3, "dropout": 0.1},
    ),
    "nmt one layer both ways": ("nmt", {"bidirectional": True, "layers": 1}),
    "rnnlm fused": ("rnnlm", {"fused": True}),
    "rnnlm dropout": ("rnnlm", {"dropout": 0.1}),
    "transformer smoothed": ("transformer", {"smoothing": 0.1, "dropout": 0.1}),
}
SMALL = {**{name: (name, {}) for name in zoo.names()}, **VARIANTS}


def small(case):
    name, changes = SMALL[case]
    return dataclasses.replace(type(zoo.settings(name)).small(), **changes)


def made(settings, train, seed=0):
    torch.manual_seed(seed)
    return settings.model().train(train), settings.inputs(train)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_has_a_published_figure_and_an_output_shape():
    assert {name for name, size in PUBLISHED if size is None} == set(zoo.names()) == set(OUTPUT)


@pytest.mark.parametrize(("name", "size"), PUBLISHED)
def test_parameters_are_as_many_as_published(name, size):
    with torch.device("meta"):
        model = zoo.settings(name, size=size).model()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert parameters(model) == pytest.approx(PUBLISHED[name, size], rel=0.01)


@pytest.mark.parametrize("name", zoo.names())
def test_settings_are_those_of_a_file_of_the_zoo(name):
    settings = zoo.settings(name)
    assert isinstance(settings, ModelSettings)
    assert settings.batch > 1
    assert hash(settings) == hash(type(settings)())


@pytest.mark.parametrize("case", SMALL)
def test_small_size_computes_and_every_parameter_learns(case):
    settings = small(case)
    model, inputs = made(settings, train=True)
    assert parameters(model) < 1_000_000
    loss = model(*inputs)
    assert loss.shape == ()
    assert 0 < loss.item() < 20
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("name", zoo.names())
def test_inference_gives_an_output_for_each_input(name):
    settings = small(name)
    model, inputs = made(settings, train=False)
    assert settings.batch == 2
    assert len(inputs) == len(settings.inputs(train=True)) - 1
    with torch.no_grad():
        output = model(*inputs)
    assert output.shape == tuple(getattr(settings, field) for field in OUTPUT[name])
    assert output.isfinite().all()


@pytest.mark.parametrize("case", SMALL)
def test_the_same_seed_gives_the_same_loss(case):
    losses = []
    for seed in (1, 1, 2):
        model, inputs = made(small(case), train=True, seed=seed)
        losses.append(model(*inputs).item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("case", SMALL)
def test_it_works_on_meta(case, train):
    with torch.device("meta"):
        model, inputs = made(small(case), train)
    output = model(*inputs)
    assert output.is_meta
    if train:
        output.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # nn.LSTM keeps a list of its weights
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("case", [*zoo.names(), "gpt2 dropout", "nmt both ways", "rnnlm fused"])
def test_it_exports_and_the_export_computes_the_same(case, train):
    settings = small(case)
    model, inputs = made(settings, train)
    exported = torch.export.export(model, inputs, strict=False).module()
    if settings.__dict__.get("dropout"):
        return
    with torch.no_grad():
        torch.testing.assert_close(exported(*inputs), made(settings, train)[0](*inputs))


def test_no_dropout_leaves_no_op():
    model, inputs = made(small("gpt2"), train=True)
    exported = torch.export.export(model, inputs, strict=False)
    assert not [node for node in exported.graph.nodes if "dropout" in str(node.target)]


def test_attention_is_one_op():
    for name in ("bert", "gpt2", "llama", "moe", "t5", "transformer", "vit"):
        settings = small(name)
        model, inputs = made(settings, train=False)
        exported = torch.export.export(model, inputs, strict=False)
        found = [
            node
            for node in exported.graph.nodes
            if "scaled_dot_product_attention" in str(node.target)
        ]
        layers = settings.layers
        assert len(found) == (3 * layers if name in ("t5", "transformer") else layers)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "transformer"])
def test_the_output_shares_the_embedding(name):
    model, _ = made(small(name), train=False)
    state = model.state_dict()
    shared = [key for key, value in state.items() if value.shape == (50, 16)]
    assert len(shared) == 2
    assert len({state[key].data_ptr() for key in shared}) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "rnnlm", "t5", "transformer", "nmt"])
def test_a_later_word_does_not_change_what_comes_before(name):
    model, inputs = made(small(name), train=False)
    changed = inputs[-1].clone()
    changed[:, 3] = (changed[:, 3] + 1) % 50
    with torch.no_grad():
        before, after = model(*inputs), model(*inputs[:-1], changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert (before[:, 3] - after[:, 3]).abs().max() > 1e-6


def test_fused_and_unrolled_lstms_agree():
    unrolled, inputs = made(small("rnnlm"), train=True)
    fused, _ = made(small("rnnlm fused"), train=True, seed=5)
    weights = unrolled.state_dict()
    renamed = {key.replace("lstm.stack.", "lstm."): value for key, value in weights.items()}
    renamed = {f"{key}_l0" if "layers" in key else key: value for key, value in renamed.items()}
    fused.load_state_dict(renamed)
    torch.testing.assert_close(fused(*inputs), unrolled(*inputs))


def test_modules_of_inception_are_called_as_in_the_example():
    model, _ = made(small("inception_v3"), train=False)
    paths = {name for name, _ in model.named_modules()}
    assert {
        "Conv2d_1a_3x3",
        "maxpool2",
        "Mixed_5b.b3x3dbl_3",
        "Mixed_6a.pool",
        "Mixed_6e.b7x7dbl_5",
    } <= paths
    assert {
        "Mixed_7b.b3x3_concat",
        "Mixed_7c.b3x3dbl_3b",
        "Mixed_7c.pool_conv",
        "Mixed_7c.concat",
        "fc",
    } <= paths


def test_the_auxiliary_head_has_a_part_in_the_loss():
    settings = inception_v3.InceptionV3(batch=2, image=299, classes=10, width=0.125, auxiliary=True)
    model, inputs = made(settings, train=True)
    model(*inputs).backward()
    assert all(parameter.grad.any() for parameter in model.auxiliary.parameters())
    with torch.device("meta"):
        full = inception_v3.InceptionV3(auxiliary=True).model()
    assert parameters(full) == 27_161_264  # torchvision


def test_sides_of_nasnet_are_halved_as_published():
    with torch.device("meta"):
        for size, side, channels in (("mobile", 7, 1056), ("large", 11, 4032)):
            settings = dataclasses.replace(nasnet.Nasnet.size(size), batch=2)
            model = settings.model()
            shapes = []
            last = list(model.looks_back)[-1]
            model.get_submodule(last).register_forward_hook(
                lambda _, __, y, shapes=shapes: shapes.append(y.shape)
            )
            model(*settings.inputs(train=False))
            assert shapes == [(2, channels, side, side)]


def test_each_expert_is_a_module_and_takes_its_share():
    settings = moe.Moe.small()
    model, inputs = made(settings, train=False)
    taken = []
    for expert in model.layers[0].mixture.experts:
        expert.register_forward_pre_hook(lambda _, args: taken.append(args[0].shape))
    model(*inputs)
    assert taken == [(settings.capacity, settings.hidden)] * settings.experts
    assert (
        settings.capacity == settings.batch * settings.length * settings.top_k // settings.experts
    )


def test_an_expert_adds_to_the_tokens_it_took_and_to_no_other():
    torch.manual_seed(0)
    settings = dataclasses.replace(moe.Moe.small(), experts=4, top_k=1)
    mixture = moe.Mixture(settings)
    x = torch.randn(2, 6, 16)
    tokens = x.flatten(0, 1)
    gates = torch.softmax(mixture.router(tokens), dim=-1)
    expected = torch.zeros(12, 16)
    for number, expert in enumerate(mixture.experts):
        for token in gates[:, number].argsort(descending=True)[: settings.capacity]:
            expected[token] += gates[token, number] * expert(tokens[token])
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected)


def test_rotary_scores_depend_on_distance_only():
    torch.manual_seed(0)
    cosine, sine = _layers.Rotary(10, 8, 10000.0)(10)
    query, key = (torch.randn(1, 1, 1, 8).expand(1, 1, 10, 8) for _ in range(2))
    scores = (
        _layers.turn(query, cosine, sine) @ _layers.turn(key, cosine, sine).transpose(-1, -2)
    )[0, 0]
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].unique().numel() == 10


def test_query_heads_share_key_heads_in_order():
    settings = llama.Llama.small()
    grouped, inputs = made(settings, train=False)
    every = dataclasses.replace(settings, kv_heads=settings.heads).model()
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("key.weight", "value.weight")):
            heads = state[name].unflatten(0, (settings.kv_heads, -1))
            state[name] = heads.repeat_interleave(settings.heads // settings.kv_heads, 0).flatten(
                0, 1
            )
    every.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(*inputs), every(*inputs))


def test_buckets_of_distances_are_those_of_t5():
    distance = torch.tensor([0, -1, 1, -7, 7, -8, 8, -127, 127, -500, 500])
    assert t5._buckets(distance, both_ways=True).tolist() == [
        0,
        1,
        17,
        7,
        23,
        8,
        24,
        15,
        31,
        15,
        31,
    ]
    assert t5._buckets(distance, both_ways=False).tolist() == [0, 1, 0, 7, 0, 8, 0, 31, 0, 31, 0]
    near = torch.arange(-20, 1)
    assert t5._buckets(near, both_ways=False).tolist() == [17, 17, 16, 16, 16, *range(15, -1, -1)]


def test_attention_of_nmt_weighs_the_source():
    torch.manual_seed(0)
    attention = nmt.LuongAttention(4)
    query, memory = torch.randn(2, 4), torch.randn(2, 5, 4)
    context = torch.stack(
        [torch.softmax(attention.keys(m) @ q, 0) @ m for q, m in zip(query, memory, strict=True)]
    )
    expected = torch.tanh(attention.combine(torch.cat([context, query], -1)))
    torch.testing.assert_close(attention(query, attention.keys(memory), memory), expected)


def test_positions_are_waves_of_growing_length():
    table = _layers.sinusoids(50, 8)
    assert table.shape == (50, 8)
    assert table[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert table[1, 0] == pytest.approx(math.sin(1))
    assert table[10, 3] == pytest.approx(math.sin(10 / 10000), rel=1e-4)


def test_an_lstm_layer_is_a_module():
    model, _ = made(rnnlm.Rnnlm.small(), train=False)
    assert {"lstm.stack.layers.0", "lstm.stack.layers.1"} <= {
        name for name, _ in model.named_modules()
    }
