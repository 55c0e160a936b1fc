"""From rewards to a better policy: returns, a baseline for each step of an episode, and the update.

REINFORCE is one pass over what was tried. With several passes the ratio to the policy that tried it
is clipped, as in proximal policy optimisation (Schulman et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array


def returns(reward: Array, discount: float, after: Array | None = None) -> Array:
    """[steps, episodes] rewards to what follows from each step on; `after` [episodes]: what follows
    the last."""
    found = np.empty_like(reward)
    total = np.zeros(reward.shape[1]) if after is None else np.array(after, dtype=np.float64)
    for step in reversed(range(len(reward))):
        total = reward[step] + discount * total
        found[step] = total
    return found


class StepBaseline:
    """The mean return at each step of an episode, over the last so many rounds of episodes."""

    def __init__(self, num_steps: int, num_rounds: int) -> None:
        self.past = np.full((num_rounds, num_steps), np.nan)  # the oldest first

    def at(self, steps: Array) -> Array:  # [steps]; 0 where nothing is known
        known = np.isfinite(self.past[:, steps])
        total = np.where(known, self.past[:, steps], 0.0).sum(axis=0)
        return np.asarray(total / np.maximum(1, known.sum(axis=0)))

    def add(self, steps: Array, found: Array) -> None:
        """Returns [steps, episodes] of one more round, whose steps may be only some."""
        if len(self.past):
            self.past[:-1, steps] = self.past[1:, steps]
            self.past[-1, steps] = found.mean(axis=1)


def normalised(advantage: Array, most: float = 3.0) -> Array:
    """Of mean 0 and spread 1, and never so large that one lucky step outweighs all others."""
    spread = advantage.std()
    if not spread > 0:
        return np.zeros_like(advantage)
    return np.asarray(np.clip((advantage - advantage.mean()) / spread, -most, most))


@dataclass(frozen=True, eq=False)
class Tried:
    """What was done, and how good it was, at steps of episodes that go on side by side."""

    chosen: Tensor  # [steps, episodes] device
    before: Tensor  # [steps, episodes] log-probability that it had
    advantage: Tensor  # [steps, episodes]

    @staticmethod
    def of(chosen: Array, before: Array, advantage: Array) -> Tried:
        return Tried(torch.from_numpy(chosen), _float(before), _float(advantage))

    def to(self, device: torch.device) -> Tried:
        return Tried(self.chosen.to(device), self.before.to(device), self.advantage.to(device))

    def part(self, steps: slice) -> Tried:
        return Tried(self.chosen[steps], self.before[steps], self.advantage[steps])


@dataclass(frozen=True)
class Update:
    """One update of a policy."""

    passes: int = 1  # over what was tried
    clip: float = 0.2  # of the ratio to the policy that tried it; used from the second pass on
    most_norm: float = 1.25  # of the gradient
    # How far it may go from the policy that tried it; no further pass is made beyond.
    most_kl: float = np.inf

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        score: Callable[[slice], Tensor],
        parts: Sequence[slice],
        tried: Tried,
        entropy_weight: float,
    ) -> dict[str, float]:
        """Improve a policy; `score` gives log-probabilities [steps, episodes, devices] for each
        part of the steps."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        told = torch.zeros(3)
        norm = 0.0
        for _ in range(self.passes):
            optimizer.zero_grad()
            sums = []
            for part in parts:
                logs = score(part)
                mine = tried.part(part)
                taken = logs.gather(-1, mine.chosen[..., None])[..., 0]
                gain = self._gain(taken, mine)
                entropy = -(logs.exp() * logs.clamp(min=-50.0)).sum(dim=-1).mean()
                share = taken.numel() / tried.chosen.numel()
                loss = -(gain.mean() + entropy_weight * entropy) * share
                loss.backward()  # type: ignore[no-untyped-call]
                log_ratio = taken.detach() - mine.before
                kl = (log_ratio.exp() - 1 - log_ratio).mean()  # never below 0, and right on average
                sums.append(torch.stack([loss.detach(), entropy.detach() * share, kl * share]))
            told = torch.stack(sums).sum(dim=0)
            if not float(told[2]) <= self.most_kl:
                break
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.most_norm))
            if np.isfinite(norm):
                optimizer.step()
        return dict(zip(("loss", "entropy", "kl"), told.tolist(), strict=True)) | {"norm": norm}

    def _gain(self, taken: Tensor, tried: Tried) -> Tensor:
        if self.passes == 1:
            return taken * tried.advantage
        ratio = (taken - tried.before).exp()
        return torch.minimum(
            ratio * tried.advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * tried.advantage
        )


def _float(array: Array) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float32))
