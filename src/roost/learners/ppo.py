"""PPO with a KL penalty (Schulman et al. 2017), over the stages of a placement (Spotlight 2018).

Each group is a stage with its own ratio of new to old probability. All stages share the advantage
of the placement. Each batch gives several steps. The weight of the penalty is doubled or halved to
keep the divergence near its target.

The papers prove that an update makes nothing worse if it raises the surrogate less a penalty. Take
a placement of T stages, advantages of at most E, and a largest divergence of KL at any stage. Then
the expected reward is at least the surrogate less E T (T - 1) KL (`guarantee`). The reason: new and
old probability of reaching stage t differ by at most 2 (t - 1) a, where a is the total variation
and a**2 <= KL / 2, and stage t then loses at most 2 a E. That penalty is far too careful to learn
with, so `Ppo` adapts its own. It reports both after each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array, taken
from roost.learners.gradients import clipped_gradients, log_probs_of, mean_entropy
from roost.learners.optimizer_state import restore_state, state_arrays
from roost.policies.seq2seq import Seq2Seq

_MUCH = 1.5  # beyond this times the target divergence, or below 1 / this, the penalty changes
_LEAST_PENALTY = 1e-4
_MOST_PENALTY = 1e3
_MOST_NORM = 1.0  # of the gradient


@dataclass
class Ppo:
    """Updates a policy from actions [batch, stages]."""

    policy: Seq2Seq
    rate: float = 1e-2
    epochs: int = 4
    target_kl: float = 0.01
    penalty: float = 1.0  # weight of the divergence; it changes while the policy learns

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.rate)

    def update(
        self, actions: Tensor, old: Tensor, advantage: Tensor, entropy_weight: float
    ) -> dict[str, float]:
        """Take some steps on actions that were drawn with log-probabilities `old`.

        `old` is [batch, stages, choices]; `advantage` [batch] is of whole placements.
        """
        for _ in range(self.epochs):
            gain, kl, new = self._gain(actions, old, advantage)
            loss = self.penalty * kl.mean() - gain.mean() - entropy_weight * mean_entropy(new)
            clipped_gradients(self.optimizer, loss, _MOST_NORM)
            self.optimizer.step()
        with torch.no_grad():
            gain, kl, _ = self._gain(actions, old, advantage)
        surrogate = float(gain.mean())
        divergence = float(kl.mean())
        largest_advantage = advantage.abs().max().item()
        guaranteed = guarantee(
            float(gain.sum(dim=1).mean()), float(kl.max()), largest_advantage, kl.shape[1]
        )
        figures = {
            "surrogate": surrogate,
            "kl": divergence,
            "kl_of_worst_stage": float(kl.mean(dim=0).max()),
            "penalty": self.penalty,
            "surrogate_less_penalty": surrogate - self.penalty * divergence,
            "guaranteed": guaranteed,
            "entropy": float(mean_entropy(old)),
        }
        if divergence > _MUCH * self.target_kl:
            self.penalty = min(_MOST_PENALTY, 2 * self.penalty)
        elif divergence < self.target_kl / _MUCH:
            self.penalty = max(_LEAST_PENALTY, self.penalty / 2)
        return figures

    def _gain(
        self, actions: Tensor, old: Tensor, advantage: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted advantages and divergences [batch, stages], and the new log-probabilities."""
        new = self.policy.log_probs(actions)
        ratio = log_probs_of(actions, new - old).exp()
        divergence = (old.exp() * (old - new)).sum(dim=-1)
        return advantage.unsqueeze(-1) * ratio, divergence, new

    def state(self) -> dict[str, Array]:
        """Arrays from which `restore` continues."""
        return state_arrays(self.policy, self.optimizer) | {"penalty": np.array(self.penalty)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from `state()` of an earlier learner."""
        restore_state(self.policy, self.optimizer, state)
        self.penalty = float(taken(state, "penalty", (), least=0))


def guarantee(surrogate: float, largest_kl: float, largest_advantage: float, stages: int) -> float:
    """A lower bound on the expected gain of the new policy; the surrogate is summed over stages."""
    return surrogate - largest_advantage * stages * (stages - 1) * largest_kl
