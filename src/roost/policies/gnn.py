"""Placeto's network (Addanki et al. 2019): it embeds a graph of groups, then scores devices.

Messages along the edges and pools over ancestors, descendants and parallel groups embed the graph.
Neither the number of groups or devices nor their numbering matters.

Differs in: one network scores any device by its features, where the paper has one output for each
device. Messages and pools are means and not sums, so that numbers stay in range on large graphs.

In all arrays, features come first and groups or devices last. Layers this narrow are several times
faster so, and a mean over other groups is a product with one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array


class GraphMaps(NamedTuple):
    """Matrices that take means over the groups related to each group."""

    parents: Tensor  # [groups, groups] in each column, equal shares of the groups it reads
    children: Tensor  # [groups, groups] the same, against the edges
    reach: Tensor  # [3, groups, groups] in each row: ancestors, descendants, parallel groups

    @staticmethod
    def of(reach: Array, source: Array, target: Array) -> GraphMaps:
        """Maps of an acyclic graph with edges from `source` to `target`.

        `reach` [groups, groups] is true where the second group comes after the first.
        """
        edges = np.zeros((len(reach), len(reach)), dtype=np.float32)
        edges[source, target] = 1.0
        parents, children = (way / np.maximum(1.0, way.sum(axis=0)) for way in (edges, edges.T))
        return GraphMaps(*(torch.from_numpy(each) for each in (parents, children, pools(reach))))

    def to(self, device: torch.device) -> GraphMaps:
        """The same on another PyTorch device."""
        return GraphMaps(*(each.to(device) for each in self))


def pools(reach: Array) -> Array:  # [3, groups, groups] f4
    """Rows that take means over ancestors, descendants and parallel groups."""
    parallel = ~(reach | reach.T | np.eye(len(reach), dtype=bool))
    sets = np.stack([reach.T, reach, parallel]).astype(np.float32)
    return np.asarray(sets / np.maximum(1, sets.sum(axis=2, keepdims=True)))


@dataclass(frozen=True)
class GraphPolicyShape:
    """Sizes of the network, and which parts it has."""

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
    """Scores of devices for a group, from features of all groups and of each device."""

    def __init__(self, shape: GraphPolicyShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        hidden = shape.hidden
        self.first = _two_layers(shape.num_group_features, width)
        # All rounds and all groups share weights; each of the two directions has its own.
        self.heard = nn.ModuleList([_two_layers(width, width) for _ in range(2)])
        self.taken = nn.ModuleList([_two_layers(width, width) for _ in range(2)])
        self.pooled = nn.ModuleList([_two_layers(2 * width, 2 * width) for _ in range(3)])
        self.about = nn.Linear(shape.num_context, hidden)
        self.device = nn.Linear(shape.num_device_features, hidden)
        self.middle = nn.Linear(2 * hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        _initialise(self, seed)

    def embed(self, maps: GraphMaps, groups: Tensor) -> Tensor:
        """Embed groups: [features, batch, groups] to [2 * width, batch, groups].

        The first half hears from messages along the edges, the second from those against them.
        """
        own = _through(self.first, groups)
        if not self.shape.messages:
            return torch.cat([own, own])
        states = []
        for means, heard, taken in zip(maps[:2], self.heard, self.taken, strict=True):
            state = own
            has_neighbours = (means.sum(dim=0) > 0).float()  # [groups]
            for _ in range(self.shape.rounds):
                message = torch.relu(_through(heard, state)) @ means
                state = own + has_neighbours * torch.relu(_through(taken, message))
            states.append(state)
        return torch.cat(states)

    def contexts(self, maps: GraphMaps, embedded: Tensor) -> Tensor:
        """Describe all groups to the head, each with its three pools.

        [2 * width, batch, groups] to [hidden, batch, groups].
        """
        parts = [embedded]
        if self.shape.pools:
            for means, pooled in zip(maps.reach, self.pooled, strict=True):
                parts.append(torch.relu(_through(pooled, embedded)) @ means.T)
        return _linear(self.about, torch.cat(parts))

    def contexts_at(self, maps: GraphMaps, embedded: Tensor, at: Tensor) -> Tensor:
        """Describe one group `at` [batch] of each graph: [2 * width, batch, groups] to [hidden,
        batch]."""
        parts = [embedded[:, torch.arange(len(at), device=at.device), at]]
        if self.shape.pools:
            for means, pooled in zip(maps.reach, self.pooled, strict=True):
                parts.append((torch.relu(_through(pooled, embedded)) * means[at]).sum(dim=-1))
        return _linear(self.about, torch.cat(parts))

    def log_probs(self, context: Tensor, devices: Tensor, allowed: Tensor) -> Tensor:
        """Log-probabilities [..., devices] from features of devices [features, ..., devices].

        `context` [hidden, ..., devices] describes the group; it is broadcast. `allowed` is
        [..., devices].
        """
        hidden = self.shape.hidden
        usable = allowed.float()
        each = (_linear(self.device, devices) + context).relu_()
        mean = (each * usable).sum(dim=-1) / usable.sum(dim=-1)
        of_each = self.middle.weight[:, :hidden]
        of_mean = self.middle.weight[:, hidden:]
        shared = _affine(self.middle.bias, of_mean, mean)
        own = (of_each @ each.reshape(hidden, -1)).view_as(each)
        score = _linear(self.score, (own + shared[..., None]).relu_())[0]
        return torch.log_softmax(score.masked_fill(~allowed, -torch.inf), dim=-1)


def _affine(bias: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """[features, ...] to [outputs, ...]."""
    flat = torch.addmm(bias[:, None], weight, x.reshape(len(x), -1))
    return flat.view(-1, *x.shape[1:])


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return _affine(layer.bias, layer.weight, x)


def _through(layers: Any, x: Tensor) -> Tensor:
    """[features, ...] to [outputs, ...], through `_two_layers`."""
    first, _, last = layers
    flat = x.reshape(len(x), -1)
    hidden = torch.addmm(first.bias[:, None], first.weight, flat).relu_()
    return torch.addmm(last.bias[:, None], last.weight, hidden).view(-1, *x.shape[1:])


def _two_layers(num_inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, width))


def _initialise(policy: GraphPolicy, seed: int) -> None:
    """Draw weights from a seed; with a last layer of zeros, all devices are equally likely."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in policy.modules():
            if isinstance(module, nn.Linear):
                spread = (2.0 / module.in_features) ** 0.5
                module.weight.normal_(0.0, spread, generator=generator)
                module.bias.zero_()
        policy.score.weight.zero_()
