"""A placed model gives what it gives unplaced, and can be taken off again."""

import copy
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import roost
from roost.errors import InputError, UnknownName
from roost.runtime.whole.apply import apply, remove
from roost.runtime.whole.module_placement import ModulePlacement, named_tensors, signature
from roost.runtime.whole.tensor_moves import mapped, moved
from roost.runtime.whole.verify import verify_modules
from roost.runtime.whole.wrapped_calls import WrappedForward


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
        )
        self.register_buffer("scale", torch.rand(size))

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x)))) * self.scale


class Tied(nn.Module):
    """Blocks between an embedding and a head that share one weight."""

    def __init__(self, size=16, vocabulary=50, count=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(count))
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "last": x}


class Adapted(nn.Module):
    """A layer with a low-rank change beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.one = nn.Linear(base.in_features, rank, bias=False)
        self.other = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.other(self.one(x))


def placement(model, rng, window=0):
    """Every module with weights kept, streamed or run where its weights lie, at random."""
    home, runs_on, streamed = {}, {}, {}
    shared = {id(t) for n, t in named_tensors(model).items() if n.startswith(("embed.", "head."))}
    for name, module in model.named_modules():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        choice = rng.choice(["keep", "stream", "elsewhere"])
        if not own or choice == "keep":
            continue
        if choice == "elsewhere" and not any(id(p) in shared for p in module.parameters()):
            runs_on[name] = "cpu:1"
        else:
            streamed[name] = tuple(own)
        home |= dict.fromkeys(own, "cpu:1")
    for name, tensor in named_tensors(model).items():  # a tied weight lives in one place
        if any(tensor is named_tensors(model)[other] for other in home):
            home[name] = "cpu:1"
    return ModulePlacement("cpu:0", home, runs_on, streamed, window, signature(model))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied().eval()


@pytest.mark.parametrize("seed", range(12))
def test_outputs_are_the_same_whatever_is_streamed(model, seed):
    rng = np.random.default_rng(seed)
    ids = torch.randint(0, 50, (2, 7))
    expected = model(ids)
    names, tensors = (
        list(model.state_dict()),
        {n: t.clone() for n, t in named_tensors(model).items()},
    )
    apply(model, placement(model, rng, window=int(rng.integers(0, 50_000))))
    for _ in range(3):
        found = model(ids)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["last"], expected["last"])
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embed.weight
    remove(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in named_tensors(model).items())
    assert torch.equal(model(ids)["logits"], expected["logits"])
    with pytest.raises(InputError, match="no placement"):
        remove(model)


class Watched(nn.Linear):
    """Remembers where its weight was while it ran."""

    def forward(self, x):
        self.seen = self.weight.data_ptr()
        return super().forward(x)


def test_streamed_weights_are_in_the_window_while_a_module_runs_and_at_home_else(model):
    model.blocks[1].up, model.blocks[2].up = Watched(16, 64), Watched(16, 64)
    name = "blocks.1.up.weight"
    apply(model, ModulePlacement("cpu:0", {name: "cpu:1"}, {}, {"blocks.1.up": (name,)}))
    model(torch.zeros(1, 3, dtype=torch.long))
    begin = model.__dict__["_roost_placed"].window._memory.data_ptr()
    assert model.blocks[1].up.seen == begin != model.blocks[1].up.weight.data_ptr()
    assert model.blocks[2].up.seen == model.blocks[2].up.weight.data_ptr()
    remove(model)


def test_an_error_inside_a_module_leaves_a_model_that_works(model):
    ids = torch.randint(0, 50, (2, 7))
    expected = model(ids)["logits"]
    rng = np.random.default_rng(5)
    apply(model, placement(model, rng, 10_000))
    with pytest.raises(IndexError):
        model(torch.full((1, 2), 10**6))
    model.blocks[2].down.bias, kept = None, model.blocks[2].down.bias
    model(ids)
    model.blocks[2].down.bias = kept
    assert torch.equal(model(ids)["logits"], expected)
    remove(model)


def test_weights_that_change_between_calls_are_seen(model):
    """Also those that were fetched ahead already."""
    ids = torch.randint(0, 50, (2, 7))
    plan = placement(model, np.random.default_rng(3), 10**6)
    assert plan.streamed
    for change in (
        lambda p: p.mul_(1.5),
        lambda p: setattr(p, "data", p.detach() * 0.5),
        lambda p: p.copy_(torch.randn_like(p)),
    ):
        apply(model, plan)
        model(ids)
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)
        found = model(ids)["logits"]
        remove(model)
        with torch.no_grad():
            assert torch.equal(model(ids)["logits"], found)
    apply(model, plan)
    model(ids)
    model.load_state_dict(
        {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    )
    found = model(ids)["logits"]
    remove(model)
    with torch.no_grad():
        assert torch.equal(model(ids)["logits"], found)


def test_a_placed_model_is_not_moved_or_copied(model):
    apply(model, placement(model, np.random.default_rng(3)))
    with pytest.raises(InputError, match="cannot be moved"):
        model.half()
    with pytest.raises(InputError, match="cannot be copied"):
        copy.deepcopy(model)
    remove(model)
    assert copy.deepcopy(model).double().head.weight.dtype == torch.float64


def test_threads_take_turns(model):
    ids = [torch.randint(0, 50, (2, 7)) for _ in range(4)]
    with torch.no_grad():
        expected = [model(one)["logits"] for one in ids]
    apply(model, placement(model, np.random.default_rng(3), 10_000))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: model(ids[number % 4])["logits"], range(40)))
    assert all(torch.equal(one, expected[number % 4]) for number, one in enumerate(found))
    remove(model)


class Table(nn.Module):
    """Returns a row of its weight: a view, not a new tensor."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return self.weight[1]


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(Table(64) for _ in range(6))

    def forward(self, x):
        return torch.stack([table(x) for table in self.tables]), self.tables[0](x)


def streamed(model, names, window=0):
    home = {f"{name}.weight": "cpu:1" for name in names}
    return apply(
        model,
        ModulePlacement("cpu:0", home, {}, {name: (f"{name}.weight",) for name in names}, window),
    )


def test_what_a_module_returns_of_its_own_weight_is_not_written_over():
    model = Rows()
    with torch.no_grad():
        expected = model(None)
    streamed(model, [f"tables.{n}" for n in range(6)])
    found = [model(None) for _ in range(3)]
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))
    remove(model)


def test_weights_put_in_place_of_others_are_told(model):
    name = "blocks.1.up"
    streamed(model, [name])
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids)
    model.blocks[1].up.weight = new = nn.Parameter(torch.zeros(64, 16))
    with pytest.raises(InputError, match=r"module 'blocks\.1\.up' is another tensor"):
        model(ids)
    remove(model)
    assert model.blocks[1].up.weight is new


class Counting(nn.Linear):
    """Writes into its own weight."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(1.0)
        return super().forward(x)


def test_a_module_that_writes_into_its_streamed_weights_is_told():
    model = nn.Sequential(Counting(4, 4))
    streamed(model, ["0"])
    with pytest.raises(InputError, match="writes into its own weights"):
        model(torch.ones(1, 4))
    remove(model)


def test_a_forward_that_somebody_else_put_there_comes_back(model):
    ids = torch.zeros(1, 3, dtype=torch.long)
    before = model.head.forward
    model.head.forward = lambda x: before(x) * 2
    with torch.no_grad():
        expected = model(ids)["logits"]
    streamed(model, ["blocks.1.up"])
    assert torch.equal(model(ids)["logits"], expected)
    remove(model)
    with torch.no_grad():
        assert torch.equal(model(ids)["logits"], expected)
    streamed(model, ["head"])
    with pytest.raises(InputError, match="cannot be copied"):
        copy.deepcopy(model.head)
    remove(model)
    with torch.no_grad():
        assert torch.equal(model(ids)["logits"], expected)


def test_inference_mode(model):
    ids = torch.zeros(1, 3, dtype=torch.long)
    with torch.inference_mode():
        expected = model(ids)["logits"]
    streamed(model, ["blocks.1.up", "blocks.2.down"])
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model(ids)["logits"], expected)
        assert torch.equal(model(ids)["logits"], expected)
    remove(model)
    with torch.inference_mode():
        streamed(model, ["blocks.1.up"])
        assert torch.equal(model(ids)["logits"], expected)
    assert torch.equal(model(ids)["logits"], expected)
    remove(model)


def test_buffers_and_foreign_weights_are_not_streamed(model):
    with pytest.raises(InputError, match="is a buffer"):
        apply(
            model,
            ModulePlacement(
                "cpu", {"blocks.0.scale": "cpu:1"}, {}, {"blocks.0": ("blocks.0.scale",)}
            ),
        )
    with pytest.raises(InputError, match=r"is not inside module 'blocks\.0'"):
        apply(
            model,
            ModulePlacement("cpu", {"head.weight": "cpu:1"}, {}, {"blocks.0": ("head.weight",)}),
        )


def test_adapters_beside_a_streamed_layer(model):
    for block in model.blocks:
        block.up = Adapted(block.up)
    ids = torch.randint(0, 50, (2, 7))
    expected = model(ids)["logits"]
    names = [f"blocks.{n}.up.base" for n in range(4)]
    home = {f"{name}.{key}": "cpu:1" for name in names for key in ("weight", "bias")}
    apply(
        model,
        ModulePlacement(
            "cpu:0", home, {}, {name: (f"{name}.weight", f"{name}.bias") for name in names}
        ),
    )
    assert torch.equal(model(ids)["logits"], expected)
    remove(model)


def test_what_is_refused(model):
    plan = placement(model, np.random.default_rng(0))
    other = Tied(size=8)
    with pytest.raises(InputError, match=f"{signature(model)}, this model is {signature(other)}"):
        apply(other, plan)
    with pytest.raises(InputError, match=r"which has no 'blocks\.[123].*'"):
        apply(Tied(count=1), plan)
    with pytest.raises(UnknownName, match="no device on this machine called 'cuda:77'"):
        apply(model, ModulePlacement("cuda:77", {}))
    with pytest.raises(UnknownName, match=r"'hed\.weight'.*did you mean 'head.weight'"):
        apply(model, ModulePlacement("cpu", {"hed.weight": "cpu:1"}))
    with pytest.raises(UnknownName, match="no module of the model called 'nothing'"):
        apply(model, ModulePlacement("cpu", {}, {"nothing": "cpu:1"}))
    with pytest.raises(InputError, match="lives on cpu already"):
        ModulePlacement("cpu", {}, {}, {"head": ("head.weight",)})
    apply(model, plan)
    with pytest.raises(InputError, match="placed already"):
        apply(model, plan)
    remove(model)


def test_a_model_dispatched_by_accelerate_is_told():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(copy.deepcopy(Tied()), execution_device="cpu")
    calls = (
        lambda: apply(model, ModulePlacement("cpu", {})),
        lambda: verify_modules(
            model, ModulePlacement("cpu", {}), torch.zeros(1, 3, dtype=torch.long)
        ),
        lambda: roost.place(model, torch.zeros(1, 3, dtype=torch.long), "h200"),
        lambda: roost.capture(model, torch.zeros(1, 3, dtype=torch.long)),
    )
    for call in calls:
        with pytest.raises(InputError, match="dispatched by accelerate; take that off first"):
            call()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)  # as it says
    apply(model, ModulePlacement("cpu", {}))


def test_generate_gives_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 97, (2, 6))
    ask = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    expected = model.generate(ids, **ask)
    layers = range(3)
    mlp = [
        f"model.layers.{n}.mlp.{part}"
        for n in layers
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    streamed = {name: (f"{name}.weight",) for name in mlp[:6]} | {"lm_head": ("lm_head.weight",)}
    home = dict.fromkeys((f"{name}.weight" for name in mlp), "cpu:1")
    home |= {"lm_head.weight": "cpu:1", "model.embed_tokens.weight": "cpu:1"}
    runs_on = {"model.layers.2.mlp": "cpu:1", "model.embed_tokens": "cpu:1"}
    apply(model, ModulePlacement("cpu:0", home, runs_on, streamed, 20_000, signature(model)))
    assert torch.equal(model.generate(ids, **ask), expected)
    assert model.__dict__["_roost_placed"].window.num_unexpected <= 1
    remove(model)
    assert torch.equal(model.generate(ids, **ask), expected)


def test_a_forward_wrapped_twice_has_both_around_it():
    def around(name, call):
        seen.append(name)
        return call.run()

    seen = []
    inner = WrappedForward(lambda x: x + 1, partial(around, "inner"), nullcontext())
    outer = WrappedForward(inner, partial(around, "outer"), nullcontext())
    assert outer(1) == 2
    assert seen == ["outer", "inner"]


def everything_streamed(model, window=0):
    streamed = {
        name: tuple(f"{name}.{key}" for key, _ in module.named_parameters(recurse=False))
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters(recurse=False))
    }
    return ModulePlacement(
        "cpu", {key: "cpu:1" for names in streamed.values() for key in names}, {}, streamed, window
    )


def tower(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count))).eval()


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, seen):
        seen.append(self.inner(x))
        return self.outer(torch.stack(seen).sum(0))


def test_what_a_model_writes_into_a_list_of_the_caller_is_there():
    model, x = Remembers().eval(), torch.randn(3, 16)
    with torch.no_grad():
        before: list[torch.Tensor] = []
        expected = [model(x, before) for _ in range(3)]
    apply(model, everything_streamed(model))
    after: list[torch.Tensor] = []
    assert all(torch.equal(model(x, after), each) for each in expected)
    assert len(after) == 3


def test_weights_made_in_inference_mode_are_seen_when_they_change():
    x = torch.randn(3, 16)
    with torch.inference_mode():
        model = tower()
        apply(model, everything_streamed(model))
        model(x)
        model[0].weight.mul_(3)
        found = model(x)
        remove(model)
        assert torch.equal(found, model(x))


def test_a_part_of_a_placed_model_is_not_placed_again():
    model = tower()
    apply(model, everything_streamed(model))
    with pytest.raises(InputError, match="placed already"):
        apply(model[2], ModulePlacement("cpu", {}))
    with pytest.raises(InputError, match="cannot be moved or converted"):
        model[2].half()
    remove(model)
    model[2].double().float()


@dataclass(frozen=True)
class Found:
    part: torch.Tensor


class Shows(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.randn(16, 16)), wrap

    def forward(self):
        return self.wrap(self.weight[:4])


class Keeps(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.shows, self.inner, self.outer = Shows(wrap), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        found = self.shows()
        part = found.part if isinstance(found, Found) else found["part"]
        return self.outer(self.inner(x)) + part.sum()


@pytest.mark.parametrize("wrap", [Found, lambda part: UserDict(part=part)])
def test_weights_inside_of_what_a_module_returns_are_not_written_over(wrap):
    model, x = Keeps(wrap).eval(), torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
    apply(model, everything_streamed(model))
    assert all(torch.equal(model(x), expected) for _ in range(3))


def test_a_transposed_weight_keeps_its_layout():
    model = tower()
    for layer in model:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    seen = []
    model[3].register_forward_pre_hook(lambda module, args: seen.append(module.weight.stride()))
    apply(model, everything_streamed(model))
    model(torch.randn(3, 16))
    assert seen == [(1, 16)]


class Pair(tuple):
    def __new__(cls, one, two):
        return super().__new__(cls, (one, two))


def test_tuples_of_their_own_kind_are_left_alone():
    same = Pair(torch.ones(1), torch.ones(1))
    assert moved(same, torch.device("cpu")) is same
    with pytest.raises(InputError, match="Pair must be moved"):
        moved(same, torch.device("meta"))


class Circle:
    def __init__(self, part):
        self.part, self.me = part, [self]


def test_what_holds_itself_has_an_end():
    circle = Circle(torch.ones(2))
    assert mapped(circle, lambda tensor: tensor, objects=True) is circle
    changed = mapped(circle, torch.neg, objects=True)
    assert changed.part.tolist() == [-1, -1]
    assert circle.part.tolist() == [1, 1]


class Forgets(nn.Module):
    """One that writes into what it is given; what it returns is not looked at."""

    def __init__(self):
        super().__init__()
        self.layer, self.relu, self.pool = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.AvgPool1d(2)

    def forward(self, x):
        x = self.layer(x)
        self.relu(x)
        return self.pool(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("stays", [(), ("relu",)])
def test_what_a_module_elsewhere_writes_into_its_input_is_there(monkeypatch, mode, stays):
    model, x = Forgets().eval(), torch.randn(3, 8)
    with mode():
        expected = model(x)
        apply(model, ModulePlacement("cpu:0", {}, {"relu": "cpu:1"}, stays=stays))
        monkeypatch.setattr(
            "roost.runtime.whole.tensor_moves._moved", lambda tensor, device: tensor.clone()
        )  # as between devices
        assert torch.equal(model(x), expected)
    remove(model)


class Named(nn.Module):
    """Its parts are called by names that are ours as well."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.part.forward = self._of_part

    def _of_part(
        self, *, name, window, slots, load, here, main, device, spent, back, few_rows, own, module
    ):
        return nn.functional.linear(name, self.part.weight, self.part.bias)

    def forward(self, forward):
        names = (
            "window",
            "slots",
            "load",
            "here",
            "main",
            "device",
            "spent",
            "back",
            "few_rows",
            "own",
            "module",
        )
        return self.part(name=forward, **dict.fromkeys(names))


@pytest.mark.parametrize("how", ["streamed", "on the spot", "elsewhere"])
def test_arguments_may_have_any_name(how):
    torch.manual_seed(0)
    model, x = Named().eval(), torch.randn(2, 4)
    with torch.no_grad():
        expected = model(forward=x)
    names = ("part.weight", "part.bias")
    streamed = {} if how == "elsewhere" else {"part": names}
    placement = ModulePlacement(
        "cpu:0", dict.fromkeys(names, "cpu:1"), {"part": "cpu:1"} if how == "elsewhere" else {}, streamed,
        on_the_spot=("part",) if how == "on the spot" else (),
    )  # fmt: skip
    apply(model, placement)
    assert torch.equal(model(forward=x), expected)
    remove(model)
    assert torch.equal(model(forward=x), expected)
