"""A table of logits with one independent softmax for each group (Gao, Chen, Li 2018, "Post").

`post` learns by it. Cross-entropy refits the probabilities to the best of the last samples and
mixes them with equal probabilities. Between refits come gradient steps on a clipped ratio, in
closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array

_CLOSED = -1e9  # a logit that is never drawn


@dataclass
class Softmaxes:
    """A table of logits, and two ways to improve it."""

    logits: Array  # [groups, choices]
    allowed: Array  # [groups, choices] bool

    @property
    def probabilities(self) -> Array:  # [groups, choices]
        """The softmax of each row; 0 for choices that are not allowed."""
        logits = np.where(self.allowed, self.logits, _CLOSED)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def sample(self, rng: np.random.Generator, count: int) -> Array:  # [count, groups]
        """Draw choices for each group, independently."""
        edges = self.probabilities.cumsum(axis=1)
        edges[:, -1] = 1.0
        drawn = rng.random((count, len(edges), 1))
        return np.asarray((drawn > edges).sum(axis=2))

    def improve(
        self, actions: Array, advantage: Array, steps: int, rate: float, clip: float
    ) -> float:
        """Climb the clipped surrogate of actions [batch, groups] with advantages [batch].

        Returns the mean divergence (KL) of the new probabilities from the old ones.
        """
        old = self.probabilities
        rows = np.arange(actions.shape[1])
        before = np.maximum(old[rows, actions], 1e-12)
        chosen = np.zeros((*actions.shape, old.shape[1]))
        np.put_along_axis(chosen, actions[..., None], 1.0, axis=2)
        advantage = advantage[:, None]
        for _ in range(steps):
            now = self.probabilities
            ratio = now[rows, actions] / before
            too_high = (advantage > 0) & (ratio > 1 + clip)
            too_low = (advantage < 0) & (ratio < 1 - clip)
            weight = np.where(too_high | too_low, 0.0, advantage * ratio)
            slope = np.einsum("bg,bgc->gc", weight, chosen) - weight.sum(axis=0)[:, None] * now
            self.logits = self.logits + rate * slope / len(actions)
        change = np.log(old + 1e-30) - np.log(self.probabilities + 1e-30)
        return float((old * change).sum(axis=1).mean())

    def refit(self, elite: Array, step: float, mix: float) -> None:
        """Move the probabilities towards the frequencies among the elite [elite, groups].

        `step` is the fraction of the way. Then mix equal probabilities in, by a fraction `mix`.
        """
        frequency = np.zeros(self.logits.shape)
        for choices in elite:
            frequency[np.arange(len(choices)), choices] += 1.0 / len(elite)
        moved = (1 - step) * self.probabilities + step * frequency
        equal = self.allowed / self.allowed.sum(axis=1, keepdims=True)
        self.logits = np.log(np.maximum((1 - mix) * moved + mix * equal, 1e-12))

    @property
    def entropy(self) -> float:
        """Mean entropy of the groups."""
        p = self.probabilities
        return float(-(p * np.log(p + 1e-30)).sum(axis=1).mean())
