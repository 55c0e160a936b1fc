"""Decoders with rotary positions: the settings and the network of `llama` and `moe`."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._networks import LanguageModel
from roost.zoo._settings import LanguageSettings


class RotarySettings(LanguageSettings):
    """Settings of a decoder with rotary positions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    base: float

    def check(self) -> None:
        self.must_divide("heads", "hidden")
        self.must_divide("kv_heads", "heads")
        if self.hidden // self.heads % 2:
            raise InputError(
                f"hidden is {self.hidden}; with {self.heads} heads, hidden / heads must be even"
            )


class RotaryDecoder(LanguageModel):
    """Layers that take rotary positions, between an embedding and an output."""

    def __init__(
        self, settings: RotarySettings, layer: Callable[[], nn.Module], tied: bool = False
    ) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.vocab, hidden)
        self.rotary = _layers.Rotary(settings.length, hidden // settings.heads, settings.base)
        self.layers = nn.ModuleList(layer() for _ in range(settings.layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.output = nn.Linear(hidden, settings.vocab, bias=False)
        if tied:
            self.output.weight = self.embed.weight
        self.loss = _layers.CrossEntropy()
        _layers.init_normal(self)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cosine, sine = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.output(self.norm(x))
