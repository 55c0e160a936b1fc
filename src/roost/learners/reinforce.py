"""REINFORCE with a moving-average baseline (Williams 1992), as Mirhoseini et al. 2017 use it.

The reward signal is the square root of the step time, to be made small; a placement that fails
counts a constant. The baseline begins at the failing signal. After some updates, failing samples
teach nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array
from roost.learners.optimizer_state import state_arrays, take_up


@dataclass(frozen=True)
class ReinforceSettings:
    rate: float = 1e-2
    decay: float = 0.9  # of the baseline
    drop_failures_after: int = 5000  # updates
    entropy: float = 0.0
    most_norm: float = 1.0  # of the gradient
    standardise: bool = False  # the advantages of a batch, instead of the moving average


class Reinforce:
    """Updates a policy that has `log_probs(actions)` [batch, stages, choices]."""

    def __init__(self, policy: nn.Module, settings: ReinforceSettings, failing: float) -> None:
        self.policy, self.settings = policy, settings
        self.baseline, self.num_updates = failing, 0
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.rate)

    def update(
        self, actions: Tensor, signal: Array, failed: Array, left: float = 1.0
    ) -> dict[str, float]:
        """Learn from actions [batch, stages] with signals [batch], the lower the better; `left` as
        in `Ppo.update`."""
        settings = self.settings
        used = (
            ~failed
            if self.num_updates >= settings.drop_failures_after
            else np.ones(len(signal), dtype=bool)
        )
        told = {"baseline": self.baseline, "failed": float(failed.mean())}
        self.num_updates += 1
        if not used.any():
            return told
        advantage = self.baseline - signal[used]
        if settings.standardise:
            spread = float(signal[used].std())
            advantage = np.clip((signal[used].mean() - signal[used]) / max(spread, 1e-9), -3.0, 3.0)
        taken = actions[torch.from_numpy(used).to(actions.device)]
        new: Tensor = self.policy.log_probs(taken)  # type: ignore[operator]
        chosen = new.gather(-1, taken.unsqueeze(-1)).squeeze(-1)
        entropy = -(new.exp() * new.clamp(min=-50.0)).sum(dim=-1).mean()
        per = chosen.mean(dim=1) if settings.standardise else chosen.sum(dim=1)
        loss = -(per.new_tensor(advantage) * per).mean() - settings.entropy * left * entropy
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), settings.most_norm)
        self.optimizer.step()
        self.baseline = settings.decay * self.baseline + (1 - settings.decay) * float(
            signal[used].mean()
        )
        return told | {"entropy": float(entropy.detach()), "gradient_norm": float(norm)}

    def state(self) -> dict[str, Array]:
        return state_arrays(self.policy, self.optimizer) | {
            "baseline": np.array(self.baseline),
            "num_updates": np.array(self.num_updates),
        }

    def take_up(self, state: Mapping[str, Array]) -> None:
        take_up(self.policy, self.optimizer, state)
        self.baseline, self.num_updates = float(state["baseline"]), int(state["num_updates"])
