"""Spotlight (Gao, Chen, Li 2018): placement in many stages, by proximal policy optimisation.

Stage i gives a device to group i, knowing the devices of the groups before it. Each update
maximises the ratio of new to old probability times the advantage, less a penalty on the change of
the policy. The paper proves that this never makes the policy worse; `learners/ppo.py` reports after
each update how much that proof guarantees.

Differs in: we do not have the paper's network and settings, so `paper` takes those of `seq2seq`
with ten samples a batch and ten steps on each. The default learned best here. In place of attention
it has the encoder's state of the current group. A batch has 8 samples, standardised advantages and
four steps. The rate is higher, and there is no entropy bonus. Exchangeable devices have a fixed
order of first use, fast devices have a prior. The end of the budget goes into refining the best
placement op by op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.learners.rewards import standardised
from roost.learners.threads import one_thread
from roost.placers import Evaluate
from roost.placers._learning.group_choices import FAR, GroupChoices, check_learning, until_spent
from roost.placers._learning.sequence_policy import (
    SequenceNetwork,
    check_network,
    restore_search,
    search_state,
)
from roost.placers._shared.setting_checks import check_number, check_whole

if TYPE_CHECKING:
    import torch

    from roost.learners.ppo import Ppo


@dataclass(frozen=True)
class Spotlight:
    """Learns until its part of the budget is spent, then refines the best placement."""

    num_groups: int = 300  # at most
    order: str = "best"  # or listed, program, rank, fifo
    network: SequenceNetwork = field(default_factory=SequenceNetwork)
    batch: int = 8
    rate: float = 1e-2
    epochs: int = 4
    target_kl: float = 0.01
    entropy: float = 0.0
    refine: float = 0.3  # fraction of the budget

    def __post_init__(self) -> None:
        check_learning(self)
        check_network(self.network)
        check_whole(self, 1, "epochs")
        check_number(self, 1 / FAR, FAR, "target_kl")
        check_number(self, 0.0, FAR, "entropy")

    @classmethod
    def paper(cls) -> Spotlight:
        """Settings of the paper, as far as known."""
        network = SequenceNetwork(
            attention="additive", aligned=False, speed_prior=0.0, twins=False, spread=1.0
        )
        return cls(
            network=network,
            batch=10,
            rate=1e-3,
            epochs=10,
            target_kl=0.02,
            entropy=0.01,
            refine=0.0,
            order="rank",
        )

    @classmethod
    def heuristic(cls) -> Spotlight:
        """Settings that try the best heuristic first; learning may find something better.

        The heuristic is not a prior: on RNNLM and four devices, a prior kept policies near the
        heuristic, 15 % above their result without one, with some seeds even at a logit of 1
        (benchmarks/results/learning_tuning_x86_64_2core_202611.md).
        """
        return cls(network=SequenceNetwork(heuristic_first=True))

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Draw batches of placements, evaluate them, and update the policy by PPO."""
        import torch

        choices = GroupChoices(problem, evaluate, self.num_groups, self.order, self.refine)
        with one_thread(), until_spent(evaluate):
            generator = torch.Generator().manual_seed(int(evaluate.rng.integers(2**62)))
            learner = self._new_learner(choices, generator)
            if (kept := evaluate.kept()) is not None:
                restore_search(learner, choices, generator, kept)
            while choices.budget_left > 0:
                actions, log_probs = learner.policy.sample(self.batch, generator)
                costs = choices.try_batch(actions.cpu().numpy())
                advantage = log_probs.new_tensor(standardised(-np.sqrt(costs.seconds)))
                bonus = self.entropy * choices.budget_left
                figures = learner.update(actions, log_probs, advantage, bonus)
                evaluate.note(figures | costs.figures())
                if choices.is_stale:
                    learner = self._new_learner(choices, generator)
                evaluate.keep(partial(search_state, learner, choices, generator))
        return choices.refined()

    def _new_learner(self, choices: GroupChoices, generator: torch.Generator) -> Ppo:
        """A learner whose policy knows nothing."""
        from roost.learners.ppo import Ppo

        policy = self.network.build(choices, generator)
        return Ppo(policy, self.rate, self.epochs, self.target_kl)
