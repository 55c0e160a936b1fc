"""Policy gradients over episodes: returns, a baseline for each step, and the update.

`placeto` learns by it. One pass is REINFORCE. With several passes, the ratio to the policy that
acted is clipped, as in proximal policy optimisation (Schulman et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array
from roost.learners.gradients import clip_norm, log_probs_of, mean_entropy


def returns(reward: Array, discount: float) -> Array:
    """Discounted sums of the rewards [steps, episodes] from each step to the end."""
    result = np.empty_like(reward)
    total = np.zeros(reward.shape[1])
    for step in reversed(range(len(reward))):
        total = reward[step] + discount * total
        result[step] = total
    return result


class StepBaseline:
    """The mean return at each step of an episode, over the last rounds of episodes."""

    def __init__(self, num_steps: int, num_rounds: int) -> None:
        self.past = np.full((num_rounds, num_steps), np.nan)  # the oldest first

    def at(self, steps: Array) -> Array:  # [steps]
        """The baseline at these steps; 0 where no round has come yet."""
        known = np.isfinite(self.past[:, steps])
        total = np.where(known, self.past[:, steps], 0.0).sum(axis=0)
        return np.asarray(total / np.maximum(1, known.sum(axis=0)))

    def add(self, steps: Array, round_returns: Array) -> None:
        """Add the returns [steps, episodes] of one round at these steps."""
        if len(self.past):
            self.past[:-1, steps] = self.past[1:, steps]
            self.past[-1, steps] = round_returns.mean(axis=1)


class EpisodeSteps(NamedTuple):
    """Actions at the steps of parallel episodes, and how good they were."""

    chosen: Tensor  # [steps, episodes] device
    before: Tensor  # [steps, episodes] log-probability of it when it was drawn
    advantage: Tensor  # [steps, episodes]

    @staticmethod
    def of(chosen: Array, before: Array, advantage: Array, device: torch.device) -> EpisodeSteps:
        """Put the arrays on a PyTorch device."""
        floats = (torch.as_tensor(x, dtype=torch.float32) for x in (before, advantage))
        return EpisodeSteps(*(x.to(device) for x in (torch.from_numpy(chosen), *floats)))

    def part(self, steps: slice) -> EpisodeSteps:
        """Some of the steps."""
        return EpisodeSteps(*(values[steps] for values in self))


@dataclass(frozen=True)
class PolicyUpdate:
    """Settings of one update of a policy."""

    passes: int = 1  # over the same steps
    clip: float = 0.2  # of the ratio to the policy that acted; used if there are several passes
    most_norm: float = 1.25  # of the gradient
    most_kl: float = np.inf  # from the policy that acted; beyond it there is no further pass

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        score: Callable[[slice], Tensor],
        parts: Sequence[slice],
        taken: EpisodeSteps,
        entropy_weight: float,
    ) -> dict[str, float]:
        """Improve a policy, and return figures of the last pass.

        `score` gives log-probabilities [steps, episodes, devices] for one part of the steps.
        """
        figures = torch.zeros(3)  # loss, entropy and divergence
        norm = 0.0
        for _ in range(self.passes):
            optimizer.zero_grad()
            sums = []
            for part in parts:
                logs = score(part)
                steps = taken.part(part)
                now = log_probs_of(steps.chosen, logs)
                gain = self._gain(now, steps)
                entropy = mean_entropy(logs)
                share = now.numel() / taken.chosen.numel()
                loss = -(gain.mean() + entropy_weight * entropy) * share
                loss.backward()  # type: ignore[no-untyped-call]
                log_ratio = now.detach() - steps.before
                kl = (log_ratio.exp() - 1 - log_ratio).mean()  # never below 0, right on average
                sums.append(torch.stack([loss.detach(), entropy.detach() * share, kl * share]))
            figures = torch.stack(sums).sum(dim=0)
            if not float(figures[2]) <= self.most_kl:
                break
            norm = clip_norm(optimizer, self.most_norm)
            if np.isfinite(norm):
                optimizer.step()
        return dict(zip(("loss", "entropy", "kl"), figures.tolist(), strict=True)) | {"norm": norm}

    def _gain(self, now: Tensor, steps: EpisodeSteps) -> Tensor:
        if self.passes == 1:
            return now * steps.advantage
        ratio = (now - steps.before).exp()
        bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
        return torch.minimum(ratio * steps.advantage, bounded * steps.advantage)
