"""Placeto's policy and its optimizer, and what they have come to. `training.py` makes it learn.

It needs torch, so only a placer that runs imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isinf

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array, taken
from roost.learners.episodes import PolicyUpdate
from roost.learners.hardware import torch_device
from roost.learners.optimizer_state import (
    load_weight_arrays,
    restore_state,
    state_arrays,
    weight_arrays,
)
from roost.placers._placeto.episodes import Choose, PlacetoEpisodes, PolicyInput
from roost.placers._placeto.features import DEVICE, FIXED, MOVING, SimulatedPlacements
from roost.placers._placeto.settings import PlacetoSettings
from roost.policies.gnn import GraphPolicy, GraphPolicyShape

# Groups, times devices, times episodes, embedded at a time if groups are embedded at every step:
# what fits into a cache.
_PART = 20_000
_COUNTS = ("num_rounds", "num_trials", "repeats")  # attributes that a state keeps


class PlacetoLearner:
    """A policy, its optimizer, and how far they are. A policy that repeats itself is followed by a
    new one, in a new phase."""

    def __init__(self, settings: PlacetoSettings, seed: int, trials: float) -> None:
        self.first_settings = settings
        self.seed = seed
        self.device = torch_device(settings.train_on)
        self.horizon = settings.horizon if isinf(trials) else max(1, int(trials))
        self.num_rounds = self.num_trials = 0
        self.fresh = 1.0  # share of new trials in the last rounds
        self.start_phase(0)

    def start_phase(self, phase: int) -> None:
        """Replace the policy by an untrained one; every second one has the settings for
        refining."""
        self.phase = phase
        self.repeats = 0  # rounds in a row in which the policy tried little that is new
        refine = self.first_settings.refine if phase % 2 else None
        self.settings = settings = refine or self.first_settings
        shape = GraphPolicyShape(
            len(MOVING if settings.embed == "step" else FIXED),
            len(DEVICE),
            settings.width,
            settings.hidden,
            settings.rounds,
            settings.messages,
            settings.pools,
        )
        self.policy = GraphPolicy(shape, (self.seed + phase) % 2**62).to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.rate[0])
        self.update = PolicyUpdate(
            settings.passes, settings.clip, settings.most_norm, settings.most_kl
        )

    def rng(self, number: int) -> np.random.Generator:
        """The generator of one round. A search that goes on from a journal needs nothing of the
        rounds before."""
        return np.random.default_rng([self.seed, number + 1])

    def annealed(self, ends: tuple[float, float]) -> float:
        """The value between its first and its last, by the share of trials that are done."""
        first, last = ends
        return first + min(1.0, self.num_trials / self.horizon) * (last - first)

    def chooser(self, episodes: PlacetoEpisodes) -> Choose:
        """The policy as a function for episodes, without gradients."""
        with torch.no_grad():
            contexts = self._contexts(episodes)

        def choose(policy_input: PolicyInput) -> Array:
            with torch.no_grad():
                return self._log_probs(episodes, [policy_input], contexts)[0].cpu().numpy()

        return choose

    def scorer(
        self, episodes: PlacetoEpisodes, inputs: Sequence[PolicyInput]
    ) -> tuple[Callable[[slice], Tensor], list[slice]]:
        """The policy as a function for an update, and the parts of the steps that it can take at a
        time."""

        def score(part: slice) -> Tensor:
            return self._log_probs(episodes, inputs[part], self._contexts(episodes))

        size = len(inputs)
        if self.settings.embed == "step":
            _, num_episodes, num_devices = inputs[0].devices.shape
            size = max(1, _PART // (episodes.num_steps * num_devices * num_episodes))
        return score, [slice(first, first + size) for first in range(0, len(inputs), size)]

    def _log_probs(
        self, episodes: PlacetoEpisodes, inputs: Sequence[PolicyInput], contexts: Tensor | None
    ) -> Tensor:
        """[steps, episodes, devices] log-probabilities of the current groups."""
        groups = [each.group for each in inputs]
        devices = self._tensor(np.stack([each.devices for each in inputs], axis=1))
        allowed = self._tensor(episodes.units.allowed[groups])[:, None].expand(devices.shape[1:])
        if contexts is None:
            context = self._step_contexts(episodes, inputs)
        else:
            context = contexts[:, groups, None, None]
        return self.policy.log_probs(context, devices, allowed)

    def _contexts(self, episodes: PlacetoEpisodes) -> Tensor | None:
        """[hidden, groups] from features that do not change; None if each step has its own."""
        if self.settings.embed == "step":
            return None
        fixed = self._tensor(episodes.features.fixed)[:, None]
        embedded = self.policy.embed(episodes.maps, fixed)
        return self.policy.contexts(episodes.maps, embedded)[:, 0]

    def _step_contexts(self, episodes: PlacetoEpisodes, inputs: Sequence[PolicyInput]) -> Tensor:
        """[hidden, steps, episodes, devices] from features of the whole placement at each step."""
        features = episodes.features
        num_episodes = len(inputs[0].done)
        placements = SimulatedPlacements.joined([each.placements for each in inputs])
        group = np.repeat([each.group for each in inputs], num_episodes)
        done = np.concatenate([each.done for each in inputs])
        moving = self._tensor(features.moving(placements, group, done)).flatten(1, 2)
        embedded = self.policy.embed(episodes.maps, moving)
        group_of_device = self._tensor(np.repeat(group, features.num_devices))
        context = self.policy.contexts_at(episodes.maps, embedded, group_of_device)
        return context.view(-1, len(inputs), num_episodes, features.num_devices)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def state(self) -> dict[str, Array]:
        """All that is needed to go on from here."""
        counts = [self.seed, self.phase, *(getattr(self, name) for name in _COUNTS)]
        return {
            **state_arrays(self.policy, self.optimizer),
            "fresh": np.array(self.fresh),
            "learned": np.array(counts, dtype=np.int64),
        }

    def resume(self, state: Mapping[str, Array]) -> None:
        """Go on from a state."""
        learned = taken(state, "learned", (2 + len(_COUNTS),), "i", least=0)
        self.seed, phase, *counts = learned.tolist()
        self.start_phase(phase)
        self.fresh = float(taken(state, "fresh", ()))
        for name, count in zip(_COUNTS, counts, strict=True):
            setattr(self, name, count)
        restore_state(self.policy, self.optimizer, state)

    @property
    def weights(self) -> dict[str, Array]:
        """The weights of the policy, by name."""
        return weight_arrays(self.policy)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace the weights of the policy."""
        load_weight_arrays(self.policy, weights)
