"""Placeto's network (Addanki et al. 2019): embeds a graph by message passing and pooling, then scores devices.

Differs in: a device is scored by features of it, with one network for all devices, where the paper has one output for
each; messages and pools are means instead of sums, so that numbers stay in range on graphs of any size. Nothing
depends on how many groups or devices there are, nor on how they are numbered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array


@dataclass(frozen=True, eq=False)
class GraphMaps:
    """How numbers travel between the groups of a graph: each row takes the mean over those it hears from."""

    parents: Tensor  # [groups, groups] sparse
    children: Tensor  # [groups, groups] sparse
    reach: Tensor  # [3, groups, groups] ancestors, descendants, and those that are neither

    @staticmethod
    def of(reach: Array, source: Array, target: Array) -> GraphMaps:
        """From edges between groups, along which there is no cycle, and from who is reached [groups, groups]."""
        return GraphMaps(
            _means(len(reach), target, source),
            _means(len(reach), source, target),
            torch.from_numpy(pools(reach)),
        )


def pools(reach: Array) -> Array:  # [3, groups, groups] f4
    """Rows that take the mean over ancestors, descendants and parallel groups; reach[u, v]: v comes after u."""
    sets = np.stack([reach.T, reach, ~(reach | reach.T | np.eye(len(reach), dtype=bool))]).astype(np.float32)
    return np.asarray(sets / np.maximum(1, sets.sum(axis=2, keepdims=True)))


def _means(count: int, row: Array, column: Array) -> Tensor:
    size = np.bincount(row, minlength=count)
    index = torch.from_numpy(np.stack([row, column]).astype(np.int64))
    value = torch.from_numpy((1.0 / size[row]).astype(np.float32))
    return torch.sparse_coo_tensor(index, value, (count, count), check_invariants=True).coalesce()


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
    """Scores of devices for a group, from features of all groups and of each device for this group."""

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
        """[groups, batch, features] to [groups, batch, 2 * width]: messages along the edges, and against them."""
        own = self.first(groups)
        if not self.shape.messages:
            return torch.cat([own, own], dim=-1)
        both = []
        for way, heard, taken in zip((maps.parents, maps.children), self.heard, self.taken, strict=True):
            state = own
            anyone = (torch.sparse.mm(way, torch.ones(len(own), 1)) > 0).float()[..., None]  # [groups, 1, 1]
            for _ in range(self.shape.rounds):
                said = torch.relu(heard(state))
                news = torch.sparse.mm(way, said.flatten(1)).view_as(said)
                state = own + anyone * torch.relu(taken(news))
            both.append(state)
        return torch.cat(both, dim=-1)

    def contexts(self, maps: GraphMaps, embedded: Tensor) -> Tensor:
        """[groups, batch, 2 * width] to [groups, batch, context]: every group with its three pools."""
        if not self.shape.pools:
            return embedded
        parts = [embedded]
        for mask, pooled in zip(maps.reach, self.pooled, strict=True):
            said = torch.relu(pooled(embedded))
            parts.append((mask @ said.flatten(1)).view_as(said))
        return torch.cat(parts, dim=-1)

    def contexts_at(self, maps: GraphMaps, embedded: Tensor, at: Tensor) -> Tensor:
        """[groups, batch, 2 * width] to [batch, context]: one group for each of the batch."""
        mine = embedded[at, torch.arange(len(at))]
        if not self.shape.pools:
            return mine
        parts = [mine]
        for mask, pooled in zip(maps.reach, self.pooled, strict=True):
            parts.append(torch.einsum("bg,gbw->bw", mask[at], torch.relu(pooled(embedded))))
        return torch.cat(parts, dim=-1)

    def log_probs(self, context: Tensor, devices: Tensor, allowed: Tensor) -> Tensor:
        """[batch, devices] from contexts [batch, 1 or devices, context], features of devices, and which are allowed."""
        each = torch.relu(self.about(context) + self.device(devices))
        usable = allowed.float()[..., None]
        mean = (each * usable).sum(1, keepdim=True) / usable.sum(1, keepdim=True)
        score = self.score(torch.relu(self.middle(torch.cat([each, mean.expand_as(each)], dim=-1))))[..., 0]
        return torch.log_softmax(score.masked_fill(~allowed, -torch.inf), dim=-1)


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
