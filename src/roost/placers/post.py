"""Post (Gao, Chen, Li 2018): cross-entropy minimisation and proximal policy optimisation.

The policy is no network but a table of logits, with an independent softmax for each group. Each
batch of samples gives some steps of PPO. After several batches, the probabilities are refitted to
the fastest tenth of the samples and mixed with equal probabilities.

Differs in: `paper` has the known settings of the paper and guesses the rest (12 samples a step, 60
a refit, a mix of a tenth). With hundreds of groups, that mix alone moves dozens of groups at random
in every sample. So the default mixes a hundredth, refits to more samples and by half, begins with a
prior for fast devices, and spends the end of the budget on refining the best placement op by op.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from roost.core.arrays import Array, taken, taken_devices, wrong_array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.learners.rewards import standardised
from roost.learners.softmaxes import Softmaxes
from roost.placers import Evaluate
from roost.placers._learning.group_choices import FAR, GroupChoices, check_learning, until_spent
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole


@dataclass(frozen=True)
class Post:
    """Learns until its part of the budget is spent, then refines the best placement."""

    num_groups: int = 300  # at most
    order: str = "best"  # or listed, program, rank, fifo
    batch: int = 20  # samples for each round of steps
    refit_every: int = 10  # batches
    elite: float = 0.1
    refit_step: float = 0.5
    mix: float = 0.01
    steps: int = 10
    rate: float = 3.0
    clip: float = 0.2
    speed_prior: float = 1.0
    # The logit of the best heuristic's device starts higher by this; above 0, it is tried first.
    heuristic_prior: float = 0.0
    heuristic_first: bool = False  # try the heuristics first, also without a prior
    refine: float = 0.2  # fraction of the budget

    def __post_init__(self) -> None:
        check_learning(self)
        check_choice(self, "heuristic_first", (True, False))
        check_whole(self, 1, "refit_every")
        check_whole(self, 0, "steps")
        check_number(self, 0.0, 1.0, "elite", "refit_step", "mix")
        check_number(self, 0.0, FAR, "clip", "speed_prior", "heuristic_prior")

    @classmethod
    def paper(cls) -> Post:
        """Settings of the paper, as far as known."""
        return cls(
            batch=12,
            refit_every=5,
            refit_step=1.0,
            mix=0.1,
            speed_prior=0.0,
            refine=0.0,
            order="rank",
        )

    @classmethod
    def heuristic(cls) -> Post:
        """Settings that try the best heuristic first; learning may find something better.

        `Spotlight.heuristic` says why the heuristic is not a prior.
        """
        return cls(heuristic_first=True)

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Draw batches of placements, evaluate them, and improve or refit the table."""
        choices = GroupChoices(problem, evaluate, self.num_groups, self.order, self.refine)
        with until_spent(evaluate):
            prior = choices.prior(self, np.float64)
            table = Softmaxes(prior, choices.groups.allowed)
            rng = np.random.default_rng(int(evaluate.rng.integers(2**62)))
            samples: list[tuple[Array, Array]] = []  # choices and seconds of batches since a refit
            if (kept := evaluate.kept()) is not None:
                choices.restore(kept)
                table.logits = np.array(taken(kept, "logits", prior.shape))
                samples = self._samples(kept, choices.groups.allowed)
                _restore_chance(rng, kept)
            while choices.budget_left > 0:
                batch = table.sample(rng, self.batch)
                costs = choices.try_batch(batch)
                samples.append((batch, costs.seconds))
                figures = {}
                if len(samples) < self.refit_every:
                    advantage = standardised(-np.sqrt(costs.seconds))
                    figures["kl"] = table.improve(
                        batch, advantage, self.steps, self.rate, self.clip
                    )
                else:
                    self._refit(table, samples)
                    samples = []
                evaluate.note(figures | costs.figures() | {"entropy": table.entropy})
                if choices.is_stale:
                    table.logits = prior
                    samples = []
                evaluate.keep(partial(self._state, choices, table, samples, rng))
        return choices.refined()

    def _samples(self, state: Mapping[str, Array], allowed: Array) -> list[tuple[Array, Array]]:
        """The samples in a saved state."""
        batches = taken_devices(state, "choices", allowed, (None, self.batch))
        seconds = taken(state, "seconds", batches.shape[:2], least=0)
        return list(zip(batches.astype(np.asarray(state["choices"]).dtype), seconds, strict=True))

    def _refit(self, table: Softmaxes, samples: list[tuple[Array, Array]]) -> None:
        """Refit the table to the fastest samples."""
        choices = np.concatenate([batch for batch, _ in samples])
        seconds = np.concatenate([seconds for _, seconds in samples])
        num_elite = max(1, int(self.elite * len(seconds)))
        best = np.argsort(seconds, kind="stable")[:num_elite]
        table.refit(choices[best], self.refit_step, self.mix)

    def _state(
        self,
        choices: GroupChoices,
        table: Softmaxes,
        samples: list[tuple[Array, Array]],
        rng: np.random.Generator,
    ) -> dict[str, Array]:
        """All arrays that a search needs to continue exactly where it was."""
        batches = np.array([batch for batch, _ in samples])
        seconds = np.array([seconds for _, seconds in samples])
        rng_text = json.dumps(rng.bit_generator.state).encode()
        return choices.state() | {
            "logits": table.logits,
            "choices": batches.reshape(-1, self.batch, len(table.logits)),
            "seconds": seconds.reshape(-1, self.batch),
            "rng": np.frombuffer(rng_text, dtype=np.uint8),
        }


def _restore_chance(rng: np.random.Generator, state: Mapping[str, Array]) -> None:
    """Give a generator the state that `Post._state` wrote."""
    text = taken(state, "rng", (None,), "u").tobytes()
    try:
        rng.bit_generator.state = json.loads(text)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise wrong_array(state, "rng", "is not the state of a generator") from None
