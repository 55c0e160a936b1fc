"""Spotlight (Gao, Chen, Li 2018): placement as a decision of many stages, learned by proximal
policy optimisation.

Stage i gives a device to group i, knowing those before it. Each update maximises the ratio of new
to old probability times the advantage, less a penalty on how far the policy moves, which the paper
proves not to make things worse; what that proof is worth here is told after each update
(`learners/ppo.py`).

Differs in: the paper's network and figures were not recovered. `paper` takes those of `seq2seq`,
ten samples a batch and ten steps on each. The default is what learned best here: no attention but
the encoder's state of the group at hand, advantages standardised in each batch of 8, four steps, a
higher rate, no bonus for entropy; like devices told apart by their first use, a prior for fast
devices, and the end of the budget spent on refining the best placement op by op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.placers import Evaluate
from roost.placers._lessons.lesson import FAR, Lesson, Outcomes, check_lesson
from roost.placers._lessons.sequence_learner import Network, check_network, learn
from roost.placers._shared.setting_checks import check_number, check_whole

if TYPE_CHECKING:
    from torch import Tensor

    from roost.learners.ppo import Ppo
    from roost.policies.seq2seq import Seq2Seq


@dataclass(frozen=True)
class Spotlight:
    """Learns until its share of the budget is spent, then refines."""

    num_groups: int = 300  # at most
    order: str = "best"  # as `_lesson.py` has it
    network: Network = field(default_factory=Network)
    batch: int = 8
    rate: float = 1e-2
    epochs: int = 4
    target_kl: float = 0.01
    entropy: float = 0.0
    refine: float = 0.3  # share of the budget

    def __post_init__(self) -> None:
        check_lesson(self)
        check_network(self.network)
        check_whole(self, 1, "epochs")
        check_number(self, 1 / FAR, FAR, "target_kl")
        check_number(self, 0.0, FAR, "entropy")

    @classmethod
    def paper(cls) -> Spotlight:
        """Nearest to what is known of the paper."""
        network = Network(
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
        """The best heuristic is tried first, and refined at the end where learning finds nothing
        better.

        It is no prior: on RNNLM and four devices one kept policies near the heuristic, 15 % above
        what they learn from nothing, with some seeds even at 1 on the logit
        (benchmarks/results/learning_tuning_x86_64_2core_202611.md).
        """
        return cls(network=Network(heuristic_first=True))

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        lesson = Lesson(problem, evaluate, self.num_groups, self.order, self.refine)
        try:
            learn(
                lesson,
                self.network,
                self.batch,
                self._begin,
                lambda *given: self._teach(lesson, *given),
            )
        except BudgetSpent:
            if evaluate.best is None:
                raise
        return lesson.finish()

    def _begin(self, policy: Seq2Seq) -> Ppo:
        from roost.learners.ppo import Ppo, PpoSettings

        return Ppo(
            policy, PpoSettings(self.rate, self.epochs, self.target_kl, entropy=self.entropy)
        )

    def _teach(
        self, lesson: Lesson, learner: Ppo, actions: Tensor, old: Tensor, found: Outcomes
    ) -> dict[str, float]:
        from roost.learners.rewards import standardised

        advantage = old.new_tensor(standardised(-np.sqrt(found.seconds)))
        return learner.update(actions, old, advantage, lesson.left)
