"""Zoo models at sizes for CPU cores, and their two stages cut by hand, as for a pipeline library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from roost import zoo

# A step takes 0.3 to 0.6 s on one core. The head costs about as much as one or two layers, so that
# two stages with the same work exist.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "batch": 16,
        "length": 64,
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "vocab": 6000,
        "positions": 64,
    },
    "bert": {
        "batch": 16,
        "length": 64,
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "intermediate": 1024,
        "vocab": 6000,
        "positions": 64,
    },
    "t5": {
        "batch": 16,
        "length": 64,
        "target_length": 40,
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "head_width": 64,
        "intermediate": 1024,
        "vocab": 2000,
    },
    "moe": {
        "batch": 16,
        "length": 64,
        "layers": 5,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "intermediate": 768,
        "experts": 4,
        "top_k": 2,
        "vocab": 5400,
    },
}


class Gpt2Start(nn.Module):
    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.words = model.words
        self.positions = model.positions
        self.layers = model.layers[:cut]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


class DecoderEnd(nn.Module):
    """The last layers, the norm and the output, of gpt2 and moe."""

    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.layers = model.layers[cut:]
        self.rotary = getattr(model, "rotary", None)
        self.norm = model.norm
        self.output = model.output

    def forward(self, x: Tensor) -> Tensor:
        positions = () if self.rotary is None else self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, *positions)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


class MoeStart(nn.Module):
    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.embed = model.embed
        self.rotary = model.rotary
        self.layers = model.layers[:cut]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cosine, sine = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return x  # type: ignore[no-any-return]


class BertStart(nn.Module):
    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.embed = model.embed
        self.layers = model.layers[:cut]

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.embed(tokens, segments)
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


class BertEnd(nn.Module):
    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.layers = model.layers[cut:]
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class T5Start(nn.Module):
    """The encoder, whole: the tables of relative positions belong to a whole stack."""

    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.embed = model.embed
        self.encoder = model.encoder

    def forward(self, source: Tensor) -> Tensor:
        return self.encoder(self.embed(source))  # type: ignore[no-any-return]


class T5End(nn.Module):
    """The decoder, whole, and the output."""

    def __init__(self, model: Any, cut: int) -> None:
        super().__init__()
        self.embed = model.embed
        self.decoder = model.decoder
        self.output = model.output
        self.scale = model.scale

    def forward(self, memory: Tensor, previous: Tensor) -> Tensor:
        return self.output(self.decoder(self.embed(previous), memory) * self.scale)  # type: ignore[no-any-return]


STAGES: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "gpt2": (Gpt2Start, DecoderEnd),
    "bert": (BertStart, BertEnd),
    "t5": (T5Start, T5End),
    "moe": (MoeStart, DecoderEnd),
}
CUTS_LAYERS = ("gpt2", "bert", "moe")  # the two stages of t5 are its encoder and its decoder


@dataclass(frozen=True)
class Cut:
    """A model in two stages."""

    first: nn.Module
    last: nn.Module
    tied: list[nn.Parameter]  # parameters of both stages, whose gradients are added up
    says: str  # where it is cut, for the row


def example(model: str, small: bool) -> Any:
    """The settings of a model; `small` for trying the benchmark out."""
    if small:
        return zoo.settings(model, **dict(_small(model), batch=8))
    return zoo.settings(model, **SIZES[model])


def _small(model: str) -> dict[str, Any]:
    import dataclasses

    from roost import catalog

    tiny = catalog.find("zoo", model).small()
    return {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny)}


def cut(name: str, model: Any, inputs: tuple[Tensor, ...], share: float) -> Cut:
    """Two stages, the first with about this share of the work."""
    start, end = STAGES[name]
    where = _cut(model, inputs, share) if name in CUTS_LAYERS else 0
    first = start(model, where)
    last = end(model, where)
    own = {id(parameter) for parameter in first.parameters()}
    tied = [parameter for parameter in last.parameters() if id(parameter) in own]
    says = f"after layer {where} of {len(model.layers)}" if where else "encoder, decoder"
    return Cut(first, last, tied, says)


def _cut(model: Any, inputs: tuple[Tensor, ...], share: float) -> int:
    """The number of layers before the cut, by the FLOP of the layers and of what follows them."""
    counter = FlopCounterMode(display=False, depth=3)
    with counter, torch.no_grad():
        model(*inputs)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    kind = type(model).__name__
    whole = counts["Global"]
    done = [0]
    for number in range(len(model.layers)):
        done.append(done[-1] + counts[f"{kind}.layers.{number}"])
    layers = range(1, len(model.layers))
    return min(layers, key=lambda number: abs(done[number] / whole - share))


def split_inputs(
    name: str, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """What the first stage takes, and what the last takes by name; the targets are neither."""
    if name == "t5":
        return inputs[:1], {"previous": inputs[1]}
    return inputs[:-1], {}
