"""Sequence-to-sequence policy with REINFORCE (Mirhoseini et al. 2017): the first learned placer.

An encoder reads the groups. A decoder gives a device to one group after the other. After each batch
of placements, REINFORCE makes those that beat the expected step time more likely.

`paper` has the settings of the paper as far as known: K samples, the square root of the step time
as signal, 100 s for a placement that fails, a baseline that begins at that signal, failing samples
dropped after 5,000 updates. Additive attention, tanh constant 5, temperature 10, Adam at 0.1 and
gradients clipped to norm 1 come from the authors' next paper.

Differs in: the default has a lower rate, advantages standardised in each batch, the encoder's state
in place of attention, a prior for fast devices, and an entropy bonus. Exchangeable devices have a
fixed order of first use. A placement that fails costs more, the more memory is missing. The end of
the budget goes into refining the best placement op by op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from roost.core.cluster import MOST_SECONDS
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.learners.threads import one_thread
from roost.placers import Evaluate
from roost.placers._learning.group_choices import (
    FAR,
    HEURISTIC_LOGIT,
    GroupChoices,
    check_learning,
    until_spent,
)
from roost.placers._learning.sequence_policy import (
    SequenceNetwork,
    check_network,
    restore_search,
    search_state,
)
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole

if TYPE_CHECKING:
    import torch

    from roost.learners.reinforce import Reinforce


@dataclass(frozen=True)
class Seq2seq:
    """Learns until its part of the budget is spent, then refines the best placement."""

    num_groups: int = 300  # at most
    order: str = "best"  # or listed, program, rank, fifo
    network: SequenceNetwork = field(default_factory=SequenceNetwork)
    batch: int = 16  # samples for each update
    rate: float = 3e-3
    decay: float = 0.9  # of the baseline
    entropy: float = 0.01
    standardise: bool = True
    # Seconds that a failing placement counts. None: the more, the more memory is missing.
    failing_seconds: float | None = None
    drop_failures_after: int = 5000  # updates
    refine: float = 0.2  # fraction of the budget

    def __post_init__(self) -> None:
        check_choice(self, "standardise", (True, False))
        check_learning(self, least_batch=2 if self.standardise else 1)
        check_network(self.network)
        check_number(self, 0.0, 1.0, "decay")
        check_number(self, 0.0, FAR, "entropy")
        check_whole(self, 0, "drop_failures_after")
        if self.failing_seconds is not None:
            check_number(self, 1e-12, MOST_SECONDS, "failing_seconds")

    @classmethod
    def paper(cls) -> Seq2seq:
        """Settings of the paper, as far as known."""
        network = SequenceNetwork(
            hidden=256,
            attention="additive",
            aligned=False,
            temperature=10.0,
            tanh=5.0,
            spread=1.0,
            speed_prior=0.0,
            twins=False,
        )
        return cls(
            network=network,
            order="rank",
            batch=8,
            rate=0.1,
            entropy=0.0,
            standardise=False,
            failing_seconds=100.0,
            refine=0.0,
        )

    @classmethod
    def heuristic(cls) -> Seq2seq:
        """Settings that begin at the best heuristic."""
        return cls(network=SequenceNetwork(heuristic_prior=HEURISTIC_LOGIT))

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Draw batches of placements, evaluate them, and update the policy by REINFORCE."""
        import torch

        choices = GroupChoices(problem, evaluate, self.num_groups, self.order, self.refine)
        with one_thread(), until_spent(evaluate):
            generator = torch.Generator().manual_seed(int(evaluate.rng.integers(2**62)))
            learner = self._new_learner(choices, generator)
            if (kept := evaluate.kept()) is not None:
                restore_search(learner, choices, generator, kept)
            while choices.budget_left > 0:
                actions, _ = learner.policy.sample(self.batch, generator)
                costs = choices.try_batch(actions.cpu().numpy())
                seconds = costs.seconds
                if self.failing_seconds is not None:
                    seconds = np.where(costs.failed, self.failing_seconds, seconds)
                signal = np.sqrt(seconds)
                bonus = self.entropy * choices.budget_left
                figures = learner.update(actions, signal, costs.failed, bonus)
                evaluate.note(figures | costs.figures())
                if choices.is_stale:
                    learner = self._new_learner(choices, generator)
                evaluate.keep(partial(search_state, learner, choices, generator))
        return choices.refined()

    def _new_learner(self, choices: GroupChoices, generator: torch.Generator) -> Reinforce:
        """A learner whose policy knows nothing; its baseline is the signal of a failure."""
        from roost.learners.reinforce import Reinforce

        failing = 2 * choices.worst if self.failing_seconds is None else self.failing_seconds
        return Reinforce(
            policy=self.network.build(choices, generator),
            baseline=float(np.sqrt(failing)),
            rate=self.rate,
            decay=self.decay,
            drop_failures_after=self.drop_failures_after,
            standardise=self.standardise,
        )
