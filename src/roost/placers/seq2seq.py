"""Sequence-to-sequence policy with REINFORCE (Mirhoseini et al. 2017): the first learned placer.

An encoder reads the groups, a decoder gives a device to each in turn; after each batch of
placements the probability of each is raised or lowered by how much better or worse it is than the
moving average of what was seen before.

`paper` is the paper as far as it is known: K samples, the square root of the step time as signal,
100 s for what fails, a baseline that begins at that, failing samples dropped after 5,000 updates,
additive attention, tanh constant 5 and temperature 10, Adam at 0.1, gradients clipped to norm 1
(the figures of the authors' next paper).

Differs in: the default differs from `paper` in its rate, in advantages standardised in each batch,
in the encoder's state fed to the decoder instead of attention, in a prior for fast devices, in
telling like devices apart by their first use, in an entropy bonus, and in refining the best
placement op by op with the end of the budget. What fails counts the more, the more memory is
missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roost.core.cluster import MOST_SECONDS
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.placers import Evaluate
from roost.placers._lessons.lesson import FAR, HEURISTIC_LOGIT, Lesson, Outcomes, check_lesson
from roost.placers._lessons.sequence_learner import Network, check_network, learn
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole

if TYPE_CHECKING:
    from torch import Tensor

    from roost.learners.reinforce import Reinforce
    from roost.policies.seq2seq import Seq2Seq


@dataclass(frozen=True)
class Seq2seq:
    """Learns until its share of the budget is spent, then refines."""

    num_groups: int = 300  # at most
    order: str = "best"  # as `_lesson.py` has it
    network: Network = field(default_factory=Network)
    batch: int = 16  # samples for each update
    rate: float = 3e-3
    decay: float = 0.9  # of the baseline
    entropy: float = 0.01
    standardise: bool = True
    # What a placement counts that fails; by how much is missing where None.
    failing_seconds: float | None = None
    drop_failures_after: int = 5000  # updates
    refine: float = 0.2  # share of the budget

    def __post_init__(self) -> None:
        check_choice(self, "standardise", (True, False))
        check_lesson(self, least_batch=2 if self.standardise else 1)
        check_network(self.network)
        check_number(self, 0.0, 1.0, "decay")
        check_number(self, 0.0, FAR, "entropy")
        check_whole(self, 0, "drop_failures_after")
        if self.failing_seconds is not None:
            check_number(self, 1e-12, MOST_SECONDS, "failing_seconds")

    @classmethod
    def paper(cls) -> Seq2seq:
        """Nearest to what is known of the paper."""
        network = Network(
            hidden=256, attention="additive", aligned=False, temperature=10.0, tanh=5.0, spread=1.0,
            speed_prior=0.0,
            twins=False,
        )  # fmt: skip
        return cls(
            network=network, order="rank", batch=8, rate=0.1, entropy=0.0, standardise=False,
            failing_seconds=100.0,
            refine=0.0,
        )  # fmt: skip

    @classmethod
    def heuristic(cls) -> Seq2seq:
        """From the best heuristic instead of from nothing."""
        return cls(network=Network(heuristic_prior=HEURISTIC_LOGIT))

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        lesson = Lesson(problem, evaluate, self.num_groups, self.order, self.refine)
        begin = lambda policy: self._begin(policy, lesson)  # noqa: E731
        try:
            learn(
                lesson, self.network, self.batch, begin, lambda *given: self._teach(lesson, *given)
            )
        except BudgetSpent:
            if evaluate.best is None:
                raise
        return lesson.finish()

    def _begin(self, policy: Seq2Seq, lesson: Lesson) -> Reinforce:
        from roost.learners.reinforce import Reinforce, ReinforceSettings

        failing = self.failing_seconds if self.failing_seconds is not None else 2 * lesson.worst
        settings = ReinforceSettings(
            self.rate,
            self.decay,
            self.drop_failures_after,
            self.entropy,
            standardise=self.standardise,
        )
        return Reinforce(policy, settings, float(np.sqrt(failing)))

    def _teach(
        self,
        lesson: Lesson,
        learner: Reinforce,
        actions: Tensor,
        log_probs: Tensor,
        found: Outcomes,
    ) -> dict[str, float]:
        seconds = found.seconds
        if self.failing_seconds is not None:
            seconds = np.where(found.failed, self.failing_seconds, seconds)
        return learner.update(actions, np.sqrt(seconds), found.failed, lesson.left)
