"""Placeto's network (Addanki et al. 2019): embeds a graph by message passing and pooling, then
scores devices.

Differs in: a device is scored by features of it, with one network for all devices, where the paper
has one output for each; messages and pools are means instead of sums, so that numbers stay in range
on graphs of any size. Nothing depends on how many groups or devices there are, nor on how they are
numbered.

Features come first in all arrays, and groups or devices last: layers this narrow are several times
faster so, and a mean over other groups is a product with one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array


@dataclass(frozen=True, eq=False)
class GraphMaps:
    """How numbers travel between the groups of a graph: each takes the mean over those it hears
    from."""

    # [groups, groups] of each column those it hears from, as shares that add up to 1.
    parents: Tensor
    children: Tensor  # the same, against the edges
    # [3, groups, groups] of each row its ancestors, descendants, and those that are neither.
    reach: Tensor

    @staticmethod
    def of(reach: Array, source: Array, target: Array) -> GraphMaps:
        """From edges between groups, along which there is no cycle, and from who is reached
        [groups, groups]."""
        heard = np.zeros((len(reach), len(reach)), dtype=np.float32)
        heard[source, target] = 1.0
        parents, children = (way / np.maximum(1.0, way.sum(axis=0)) for way in (heard, heard.T))
        return GraphMaps(
            torch.from_numpy(parents), torch.from_numpy(children), torch.from_numpy(pools(reach))
        )

    def to(self, device: torch.device) -> GraphMaps:
        return GraphMaps(self.parents.to(device), self.children.to(device), self.reach.to(device))


def pools(reach: Array) -> Array:  # [3, groups, groups] f4
    """Rows that take the mean over ancestors, descendants and parallel groups; reach[u, v]: v comes
    after u."""
    sets = np.stack([reach.T, reach, ~(reach | reach.T | np.eye(len(reach), dtype=bool))]).astype(
        np.float32
    )
    return np.asarray(sets / np.maximum(1, sets.sum(axis=2, keepdims=True)))


@dataclass(frozen=True)
class Shape:
    """How large the network is, and which of its parts it has."""

    num_group_features: int
    num_device_features: int
    width: int = 16
    hidden: int = 32
    rounds: int = 8  # of messages, in each direction
    messages: bool = True
    pools: bool = True

    @property
    def num_context(self) -> int:
        """Numbers that describe a group to the head."""
        return 2 * self.width * (4 if self.pools else 1)


class GraphPolicy(nn.Module):
    """Scores of devices for a group, from features of all groups and of each device for this
    group."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.first = _layers(shape.num_group_features, width, width)
        # Weights are shared by all rounds and all groups; the two directions have their own.
        self.heard = nn.ModuleList([_layers(width, width, width) for _ in range(2)])
        self.taken = nn.ModuleList([_layers(width, width, width) for _ in range(2)])
        self.pooled = nn.ModuleList([_layers(2 * width, 2 * width, 2 * width) for _ in range(3)])
        self.about = nn.Linear(shape.num_context, shape.hidden)
        self.device = nn.Linear(shape.num_device_features, shape.hidden)
        self.middle = nn.Linear(2 * shape.hidden, shape.hidden)
        self.score = nn.Linear(shape.hidden, 1)
        _initialise(self, seed)

    def embed(self, maps: GraphMaps, groups: Tensor) -> Tensor:
        """[features, batch, groups] to [2 * width, batch, groups]: messages along the edges, and
        against them."""
        own = _through(self.first, groups)
        if not self.shape.messages:
            return torch.cat([own, own])
        both = []
        for way, heard, taken in zip(
            (maps.parents, maps.children), self.heard, self.taken, strict=True
        ):
            state = own
            anyone = (way.sum(dim=0) > 0).float()  # [groups] whether there is anyone to hear from
            for _ in range(self.shape.rounds):
                said = torch.relu(_through(heard, state))
                state = own + anyone * torch.relu(_through(taken, said @ way))
            both.append(state)
        return torch.cat(both)

    def contexts(self, maps: GraphMaps, embedded: Tensor) -> Tensor:
        """[2 * width, batch, groups] to [hidden, batch, groups]: every group with its three pools,
        for the head."""
        parts = [embedded]
        if self.shape.pools:
            parts += [
                torch.relu(_through(pooled, embedded)) @ mask.T
                for mask, pooled in zip(maps.reach, self.pooled, strict=True)
            ]
        return _linear(self.about, torch.cat(parts))

    def contexts_at(self, maps: GraphMaps, embedded: Tensor, at: Tensor) -> Tensor:
        """[2 * width, batch, groups] to [hidden, batch]: one group for each of the batch."""
        parts = [embedded[:, torch.arange(len(at), device=at.device), at]]
        if self.shape.pools:
            parts += [
                (torch.relu(_through(pooled, embedded)) * mask[at]).sum(dim=-1)
                for mask, pooled in zip(maps.reach, self.pooled, strict=True)
            ]
        return _linear(self.about, torch.cat(parts))

    def log_probs(self, context: Tensor, devices: Tensor, allowed: Tensor) -> Tensor:
        """[..., devices] from features [features, ..., devices] of devices, and which are allowed
        [..., devices].

        `context` [hidden, ..., devices] is what describes the group; it is broadcast.
        """
        hidden, usable = self.shape.hidden, allowed.float()
        each = (_linear(self.device, devices) + context).relu_()
        mean = (each * usable).sum(dim=-1) / usable.sum(dim=-1)
        of_each, of_all = self.middle.weight[:, :hidden], self.middle.weight[:, hidden:]
        shared = torch.addmm(self.middle.bias[:, None], of_all, mean.reshape(hidden, -1)).view_as(
            mean
        )
        middle = ((of_each @ each.reshape(hidden, -1)).view_as(each) + shared[..., None]).relu_()
        score = _linear(self.score, middle)[0]
        return torch.log_softmax(score.masked_fill(~allowed, -torch.inf), dim=-1)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """[features, ...] to [outputs, ...]."""
    return torch.addmm(layer.bias[:, None], layer.weight, x.reshape(len(x), -1)).view(
        -1, *x.shape[1:]
    )


def _through(layers: nn.Module, x: Tensor) -> Tensor:
    """[features, ...] to [outputs, ...], by two layers."""
    assert isinstance(layers, nn.Sequential)
    first, _, last = layers
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    hidden = torch.addmm(first.bias[:, None], first.weight, x.reshape(len(x), -1)).relu_()
    return torch.addmm(last.bias[:, None], last.weight, hidden).view(-1, *x.shape[1:])


def _layers(given: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(given, hidden), nn.ReLU(), nn.Linear(hidden, out))


def _initialise(policy: GraphPolicy, seed: int) -> None:
    """Weights from a seed; the last layer begins at zero, and with it every device is as likely."""
    generator = torch.Generator().manual_seed(seed)
    for module in policy.modules():
        if isinstance(module, nn.Linear):
            spread = (2.0 / module.in_features) ** 0.5
            with torch.no_grad():
                module.weight.normal_(0.0, spread, generator=generator)
                module.bias.zero_()
    with torch.no_grad():
        policy.score.weight.zero_()
