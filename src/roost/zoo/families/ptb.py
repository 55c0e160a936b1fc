"""Language models with random recurrent cells.

After the family `ptb` of Placeto (arXiv 1906.08879), drawn from the search space of ENAS (Pham et
al. 2018, arXiv 1802.03268): a node of the cell takes the result of an earlier one, and a gate mixes
its activation with what it took; the state is the mean of all nodes that no other takes. Numbers of
nodes and steps and the widths are our own.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._networks import LanguageModel
from roost.zoo._settings import LanguageSettings
from roost.zoo.families._random_model import RandomModel

ACTIVATIONS = ("tanh", "relu", "sigmoid", "identity")


@dataclass(frozen=True)
class PtbFamily(RandomModel, LanguageSettings):
    """A recurrent language model with a random cell."""

    # The source of each node, -1 for the input, and its activation.
    nodes: tuple[tuple[int, str], ...] = ((-1, "tanh"),)
    batch: int = 64
    length: int = 20
    hidden: int = 1000
    vocab: int = 10000

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        count = int(rng.integers(6, 13))
        sources = [-1, *(int(rng.integers(node)) for node in range(1, count))]
        activations = [str(rng.choice(ACTIVATIONS)) for _ in range(count)]
        return cls(
            nodes=tuple(zip(sources, activations, strict=True)),
            batch=int(rng.choice([32, 64, 128])),
            length=int(rng.integers(10, 36)),
        )

    def shrunk(self) -> Self:
        return dataclasses.replace(self, batch=2, length=3, hidden=8, vocab=30)

    def check(self) -> None:
        for number, (source, activation) in enumerate(self.nodes):
            known = source == -1 if number == 0 else 0 <= source < number
            if activation not in ACTIVATIONS or not known:
                raise InputError(
                    f"node {number} of the cell is {(source, activation)!r}; its source or "
                    "activation does not exist"
                )

    def model(self) -> nn.Module:
        return PtbNetwork(self)


class PtbNetwork(LanguageModel):
    def __init__(self, settings: PtbFamily) -> None:
        super().__init__()
        self.embed = nn.Embedding(settings.vocab, settings.hidden)
        self.cell = RandomRecurrentCell(settings.hidden, settings.nodes)
        self.output = nn.Linear(settings.hidden, settings.vocab, bias=False)
        self.output.weight = self.embed.weight
        self.loss = _layers.CrossEntropy()
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def logits(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        state = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states = []
        for step in embedded.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.output(torch.stack(states, dim=1))


class RandomRecurrentCell(nn.Module):
    """One step: from the input and the state before to the state after."""

    def __init__(self, hidden: int, nodes: Sequence[tuple[int, str]]) -> None:
        super().__init__()
        self.sources = [source for source, _ in nodes]
        self.ends = sorted(set(range(len(nodes))) - set(self.sources))
        widths = [2 * hidden] + [hidden] * (len(nodes) - 1)
        self.nodes = nn.ModuleList(
            RandomNode(width, hidden, activation)
            for width, (_, activation) in zip(widths, nodes, strict=True)
        )

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        results = [self.nodes[0](torch.cat([x, state], dim=-1), state)]
        for node, source in zip(self.nodes[1:], self.sources[1:], strict=True):
            results.append(node(results[source], results[source]))
        ends = [results[number] for number in self.ends]
        return ends[0] if len(ends) == 1 else torch.stack(ends).mean(0)


class RandomNode(nn.Module):
    """gate * activation(W x) + (1 - gate) * carried."""

    def __init__(self, inputs: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * hidden, bias=False)
        self.activation = activation

    def forward(self, x: Tensor, carried: Tensor) -> Tensor:
        gate, value = self.linear(x).chunk(2, dim=-1)
        if self.activation != "identity":
            value = getattr(torch, self.activation)(value)
        return torch.lerp(carried, value, torch.sigmoid(gate))
