"""REINFORCE with a moving-average baseline (Williams 1992), as Mirhoseini et al. 2017 use it.

The signal is a cost, to be made small: the square root of the step time, and a constant for a
placement that fails. The baseline begins at that constant. After some updates, the learner ignores
failing samples.
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

_MOST_NORM = 1.0  # of the gradient
_MOST_ADVANTAGE = 3.0  # where advantages are standardised


@dataclass
class Reinforce:
    """Updates a policy from actions [batch, stages]."""

    policy: Seq2Seq
    baseline: float  # expected signal; it follows the mean of the batches
    rate: float = 1e-2
    decay: float = 0.9  # of the baseline
    drop_failures_after: int = 5000  # updates
    standardise: bool = False  # advantages within a batch, instead of those over the baseline

    def __post_init__(self) -> None:
        self.num_updates = 0
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.rate)

    def update(
        self, actions: Tensor, signal: Array, failed: Array, entropy_weight: float
    ) -> dict[str, float]:
        """Take one step on actions [batch, stages] with signals [batch]; lower is better."""
        figures = {"baseline": self.baseline, "failed": float(failed.mean())}
        used = np.ones(len(signal), dtype=bool)
        if self.num_updates >= self.drop_failures_after:
            used = ~failed
        self.num_updates += 1
        if not used.any():
            return figures
        signal = signal[used]
        actions = actions[torch.from_numpy(used).to(actions.device)]
        mean = signal.mean()
        log_probs = self.policy.log_probs(actions)
        chosen = log_probs_of(actions, log_probs)
        if self.standardise:
            advantage = (mean - signal) / max(float(signal.std()), 1e-9)
            advantage = np.clip(advantage, -_MOST_ADVANTAGE, _MOST_ADVANTAGE)
            placement = chosen.mean(dim=1)
        else:
            advantage = self.baseline - signal
            placement = chosen.sum(dim=1)
        gain = placement.new_tensor(advantage) * placement
        entropy = mean_entropy(log_probs)
        norm = clipped_gradients(
            self.optimizer, -gain.mean() - entropy_weight * entropy, _MOST_NORM
        )
        self.optimizer.step()
        self.baseline = self.decay * self.baseline + (1 - self.decay) * float(mean)
        return figures | {"entropy": float(entropy.detach()), "gradient_norm": norm}

    def state(self) -> dict[str, Array]:
        """Arrays from which `restore` continues."""
        return state_arrays(self.policy, self.optimizer) | {
            "baseline": np.array(self.baseline),
            "num_updates": np.array(self.num_updates),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from `state()` of an earlier learner."""
        restore_state(self.policy, self.optimizer, state)
        self.baseline = float(taken(state, "baseline", ()))
        self.num_updates = int(taken(state, "num_updates", (), "i", least=0))
