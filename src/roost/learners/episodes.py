"""From rewards to a better policy: returns, a baseline for each step of an episode, and the update.

REINFORCE is one pass over what was tried. With several passes the ratio to the policy that tried it is clipped, as in
proximal policy optimisation (Schulman et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array


def returns(reward: Array, discount: float, after: Array | None = None) -> Array:
    """[steps, episodes] rewards to what follows from each step on; `after` [episodes]: what follows the last."""
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


@dataclass(frozen=True)
class Update:
    """One update of a policy."""

    passes: int = 1  # over what was tried
    clip: float = 0.2  # of the ratio to the policy that tried it; used from the second pass on
    most_norm: float = 1.25  # of the gradient

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        score: Callable[[Array], Tensor],
        parts: Iterable[Array],
        chosen: Array,
        before: Array,
        advantage: Array,
        entropy_weight: float,
    ) -> dict[str, float]:
        """Improve a policy. `score` gives log-probabilities [rows, devices] of some of the rows; parts are rows.

        `chosen`, `before` and `advantage` [rows] are the devices, their log-probabilities then, and how good they were.
        """
        parts, parameters = list(parts), [p for group in optimizer.param_groups for p in group["params"]]
        told: dict[str, float] = {}
        for number in range(self.passes):
            optimizer.zero_grad()
            told = {"loss": 0.0, "entropy": 0.0, "kl": 0.0}
            for rows in parts:
                share = len(rows) / len(chosen)
                logs = score(rows)
                taken = logs.gather(1, torch.from_numpy(chosen[rows])[:, None])[:, 0]
                gain = self._gain(taken, _float(before[rows]), _float(advantage[rows]), number)
                entropy = -(logs.exp() * logs.clamp(min=-50.0)).sum(dim=1).mean()
                loss = -(gain.mean() + entropy_weight * entropy) * share
                loss.backward()  # type: ignore[no-untyped-call]
                told["loss"] += loss.item()
                told["entropy"] += entropy.item() * share
                told["kl"] += (_float(before[rows]) - taken.detach()).mean().item() * share
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.most_norm)
            told["norm"] = norm.item()
            if np.isfinite(told["norm"]):
                optimizer.step()
        return told

    def _gain(self, taken: Tensor, before: Tensor, advantage: Tensor, number: int) -> Tensor:
        if self.passes == 1:
            return taken * advantage
        ratio = (taken - before).exp()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)


def _float(array: Array) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float32))
