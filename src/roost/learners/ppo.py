"""PPO with a KL penalty (Schulman et al. 2017), over the stages of a placement (Spotlight 2018).

Each group is a stage with its own ratio of new to old probability; all share the advantage of the
placement. Several steps are taken on one batch; the weight of the penalty is doubled or halved to
keep the divergence near its target.

The papers prove that no update makes things worse where the surrogate less a penalty is raised. For
a placement of T stages, advantages of at most E and a largest divergence of KL at any stage, the
expected reward is at least the surrogate less E T (T - 1) KL (`guarantee`): stage t is reached with
probabilities that differ by at most 2 (t - 1) a from the old ones, where a is the total variation
and a**2 <= KL / 2, and loses at most 2 a E there. That penalty is far too careful to learn with. So
an adaptive one is used, and both are told after each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array
from roost.learners.optimizer_state import state_arrays, take_up

_MUCH = 1.5  # times the target, up or down: then the weight of the penalty changes
_LEAST_PENALTY, _MOST_PENALTY = 1e-4, 1e3


@dataclass(frozen=True)
class PpoSettings:
    rate: float = 1e-2
    epochs: int = 4
    target_kl: float = 0.01
    penalty: float = 1.0  # to begin with
    entropy: float = 0.01
    clip: float = 0.0  # of the ratio; 0 for none
    most_norm: float = 1.0  # of the gradient


class Ppo:
    """Updates a policy that has `log_probs(actions)` [batch, stages, choices]."""

    def __init__(self, policy: nn.Module, settings: PpoSettings) -> None:
        self.policy, self.settings, self.penalty = policy, settings, settings.penalty
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.rate)

    def update(
        self, actions: Tensor, old: Tensor, advantage: Tensor, left: float = 1.0
    ) -> dict[str, float]:
        """Learn from actions [batch, stages] drawn with log-probabilities `old` [batch, stages,
        choices].

        `advantage` [batch] is of placements; `left` is the share of the budget that is left.
        """
        for _ in range(self.settings.epochs):
            gain, kl, new = self._gain(actions, old, advantage)
            entropy = -(new.exp() * new.clamp(min=-50.0)).sum(dim=-1).mean()
            loss = self.penalty * kl.mean() - gain.mean() - self.settings.entropy * left * entropy
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.most_norm)
            self.optimizer.step()
        with torch.no_grad():
            gain, kl, new = self._gain(actions, old, advantage)
        surrogate, divergence = float(gain.mean()), float(kl.mean())
        told = {
            "surrogate": surrogate,
            "kl": divergence,
            "kl_of_worst_stage": float(kl.mean(dim=0).max()),
            "penalty": self.penalty,
            "surrogate_less_penalty": surrogate - self.penalty * divergence,
            "guaranteed": guarantee(
                float(gain.sum(dim=1).mean()),
                float(kl.max()),
                advantage.abs().max().item(),
                kl.shape[1],
            ),
            "entropy": float(-(old.exp() * old.clamp(min=-50.0)).sum(dim=-1).mean()),
        }
        if divergence > _MUCH * self.settings.target_kl:
            self.penalty = min(_MOST_PENALTY, 2 * self.penalty)
        elif divergence < self.settings.target_kl / _MUCH:
            self.penalty = max(_LEAST_PENALTY, self.penalty / 2)
        return told

    def _gain(
        self, actions: Tensor, old: Tensor, advantage: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighed advantages and divergences [batch, stages], and the log-probabilities now."""
        new: Tensor = self.policy.log_probs(actions)  # type: ignore[operator]
        ratio = (new - old).gather(-1, actions.unsqueeze(-1)).squeeze(-1).exp()
        gain = advantage.unsqueeze(-1) * ratio
        if self.settings.clip > 0:
            bounded = ratio.clamp(1 - self.settings.clip, 1 + self.settings.clip)
            gain = torch.minimum(gain, advantage.unsqueeze(-1) * bounded)
        return gain, (old.exp() * (old - new)).sum(dim=-1), new

    def state(self) -> dict[str, Array]:
        return state_arrays(self.policy, self.optimizer) | {"penalty": np.array(self.penalty)}

    def take_up(self, state: Mapping[str, Array]) -> None:
        take_up(self.policy, self.optimizer, state)
        self.penalty = float(state["penalty"])


def guarantee(surrogate: float, largest_kl: float, largest_advantage: float, stages: int) -> float:
    """A lower bound on the expected gain of the new policy, for the surrogate summed over the
    stages."""
    return surrogate - largest_advantage * stages * (stages - 1) * largest_kl
