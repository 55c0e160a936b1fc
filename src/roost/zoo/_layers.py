"""Layers that several models share."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden and memory of an LSTM cell, each [batch, hidden]


def dropout(probability: float) -> nn.Module:
    """Dropout, or no op at all if it would keep everything."""
    return nn.Dropout(probability) if probability else nn.Identity()


def init_normal(model: nn.Module, deviation: float = 0.02) -> None:
    """Initialise weights as transformers do: small and normal, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def sinusoids(length: int, width: int) -> Tensor:  # [length, width]
    """Positions as sines, then cosines (Vaswani et al. 2017).

    Their wavelengths go from 2 pi to 20000 pi.
    """
    half = width // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class CrossEntropy(nn.Module):
    """Mean cross entropy of logits [..., classes] against class numbers [...]."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), label_smoothing=self.smoothing
        )


class LstmStack(nn.Module):
    """LSTM cells on top of each other, unrolled over time.

    The cells run step by step, and within a step from layer to layer.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        layers: int,
        dropout_probability: float = 0.0,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTMCell(hidden if layer else inputs, hidden) for layer in range(layers)
        )
        self.dropout = dropout(dropout_probability)
        self.hidden = hidden
        self.residual = residual

    def forward(
        self, steps: Sequence[Tensor], states: list[State] | None = None
    ) -> tuple[list[Tensor], list[State]]:
        """The last layer's output at each step, and each layer's last state.

        The states start as zeros unless given.
        """
        if states is None:
            zero = steps[0].new_zeros(steps[0].shape[0], self.hidden)
            states = [(zero, zero)] * len(self.layers)
        outputs = []
        for x in steps:
            after = []
            for number, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
                hidden, memory = layer(self.dropout(x), state)
                after.append((hidden, memory))
                x = x + hidden if self.residual and number else hidden
            outputs.append(x)
            states = after
        return outputs, states


class MultiHeadAttention(nn.Module):
    """Multi-head attention of x [batch, length, hidden] to a memory, or to itself."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        bias: bool = True,
        dropout_probability: float = 0.0,
        causal: bool = False,
        head_width: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        inner = heads * head_width if head_width else hidden
        self.heads = heads
        self.causal = causal
        self.scale = scale
        self.dropout_probability = dropout_probability
        self.query = nn.Linear(hidden, inner, bias=bias)
        self.key = nn.Linear(hidden, inner, bias=bias)
        self.value = nn.Linear(hidden, inner, bias=bias)
        self.output = nn.Linear(inner, hidden, bias=bias)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, scores: Tensor | None = None
    ) -> Tensor:
        """`scores` [1, heads, length, memory length] is added to the scores before the softmax."""
        source = x if memory is None else memory
        y = F.scaled_dot_product_attention(
            split_heads(self.query(x), self.heads),
            split_heads(self.key(source), self.heads),
            split_heads(self.value(source), self.heads),
            attn_mask=scores,
            dropout_p=self.dropout_probability if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
        )
        return self.output(join_heads(y))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * width] to [batch, heads, length, width]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class PreNormLayer(nn.Module):
    """A transformer layer with a norm before attention and before feed-forward."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: nn.Module,
        feed_forward: nn.Module,
        dropout_probability: float,
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.dropout = dropout(dropout_probability)

    def forward(self, x: Tensor, *positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *positions))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class PostNormLayer(nn.Module):
    """A transformer layer with a norm after attention and after feed-forward."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: nn.Module,
        feed_forward: nn.Module,
        dropout_probability: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = norm()
        self.feed_forward = feed_forward
        self.feed_forward_norm = norm()
        self.dropout = dropout(dropout_probability)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class FeedForward(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: nn.Module,
        *,
        bias: bool = True,
        dropout_probability: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate, bias=bias)
        self.activation = activation
        self.dropout = dropout(dropout_probability)
        self.down = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021) in halves.

    Number i of a head turns with number i + width / 2. The angles are a buffer that is not saved
    with the weights. On `meta` it has no values, so build the module again to run it.
    """

    angles: Tensor

    def __init__(self, length: int, width: int, base: float) -> None:
        super().__init__()
        rates = base ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("angles", torch.arange(length)[:, None] * rates, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [length, width / 2]."""
        angles = self.angles[:length]
        return angles.cos(), angles.sin()


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [batch, heads, length, width]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions.

    Several query heads may share one head of keys and values.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, dropout_probability: float = 0.0
    ) -> None:
        super().__init__()
        width = hidden // heads
        self.heads = heads
        self.kv_heads = kv_heads
        self.dropout_probability = dropout_probability
        self.query = nn.Linear(hidden, heads * width, bias=False)
        self.key = nn.Linear(hidden, kv_heads * width, bias=False)
        self.value = nn.Linear(hidden, kv_heads * width, bias=False)
        self.output = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(
            turn(split_heads(self.query(x), self.heads), cosine, sine),
            turn(split_heads(self.key(x), self.kv_heads), cosine, sine),
            split_heads(self.value(x), self.kv_heads),
            dropout_p=self.dropout_probability if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(join_heads(y))


class SwiGlu(nn.Module):
    """A gated feed-forward layer (Shazeer 2020)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
