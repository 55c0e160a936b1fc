"""One softmax for each group, independent of all others: PPO and cross-entropy, in closed form.

Gao, Chen, Li 2018, "Post": no network, only a table of logits. Cross-entropy refits the
probabilities to the best of the last samples and mixes them with equal ones; between refits, some
gradient steps on a clipped ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array

_CLOSED = -1e9  # a logit that is never drawn


@dataclass
class Softmaxes:
    """A table of logits [groups, choices], and how to make it better."""

    logits: Array
    allowed: Array  # [groups, choices] bool

    @property
    def probabilities(self) -> Array:
        logits = np.where(self.allowed, self.logits, _CLOSED)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def sample(self, rng: np.random.Generator, count: int) -> Array:  # [count, groups]
        """Choices drawn for each group by itself."""
        edges = self.probabilities.cumsum(axis=1)
        edges[:, -1] = 1.0
        drawn = rng.random((count, len(edges), 1))
        chosen = (drawn > edges).sum(axis=2)
        return np.asarray(chosen)

    def improve(
        self, actions: Array, advantage: Array, steps: int, rate: float, clip: float
    ) -> float:
        """Climb the clipped surrogate of actions [batch, groups] with advantages [batch]; how far
        it went, in KL."""
        old = self.probabilities
        rows = np.arange(actions.shape[1])
        before = old[rows, actions]
        chosen = np.zeros((*actions.shape, old.shape[1]))
        np.put_along_axis(chosen, actions[..., None], 1.0, axis=2)
        for _ in range(steps):
            now = self.probabilities
            ratio = now[rows, actions] / np.maximum(before, 1e-12)
            weight = advantage[:, None] * ratio
            beyond = (advantage[:, None] > 0) & (ratio > 1 + clip) | (advantage[:, None] < 0) & (
                ratio < 1 - clip
            )
            weight = np.where(beyond, 0.0, weight)
            slope = np.einsum("bg,bgc->gc", weight, chosen) - weight.sum(axis=0)[:, None] * now
            self.logits = self.logits + rate * slope / len(actions)
        new = self.probabilities
        return float((old * (np.log(old + 1e-30) - np.log(new + 1e-30))).sum(axis=1).mean())

    def refit(self, elite: Array, step: float, mix: float) -> None:
        """Move the probabilities by a share `step` towards the frequencies among the elite [elite,
        groups].

        Then mix them with equal ones, by a share `mix`.
        """
        frequency = np.zeros(self.logits.shape)
        for row in elite:
            frequency[np.arange(len(row)), row] += 1.0 / len(elite)
        new = (1 - step) * self.probabilities + step * frequency
        equal = self.allowed / self.allowed.sum(axis=1, keepdims=True)
        self.logits = np.log(np.maximum((1 - mix) * new + mix * equal, 1e-12))

    @property
    def entropy(self) -> float:
        p = self.probabilities
        return float(-(p * np.log(p + 1e-30)).sum(axis=1).mean())
