"""Post (Gao, Chen, Li 2018): cross-entropy minimisation and proximal policy optimisation over
independent softmaxes.

No network: a table of logits, one row for each group. After every few samples some steps of PPO;
after every so many, the probabilities are refitted to the fastest tenth and mixed with equal ones.

Differs in: `paper` has the figures that are known, and guesses for the others (12 samples a step,
60 a refit, mixed by a tenth). With hundreds of groups that mix alone moves dozens of them at random
in every sample. So the default mixes a hundredth, refits to more samples and by half, begins with a
prior for fast devices, and spends the end of the budget on refining the best placement op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.learners.rewards import standardised
from roost.learners.softmaxes import Softmaxes
from roost.placers import Evaluate
from roost.placers._lessons.lesson import FAR, Lesson, check_lesson
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole


@dataclass(frozen=True)
class Post:
    """Learns until its share of the budget is spent, then refines."""

    num_groups: int = 300  # at most
    order: str = "best"  # as `_lesson.py` has it
    batch: int = 20  # samples for each round of steps
    refit_every: int = 10  # batches
    elite: float = 0.1
    refit_step: float = 0.5
    mix: float = 0.01
    steps: int = 10
    rate: float = 3.0
    clip: float = 0.2
    speed_prior: float = 1.0
    # What the logit of the best heuristic's device gets; above 0, that is tried first.
    heuristic_prior: float = 0.0
    heuristic_first: bool = False  # it is tried first without such a prior too
    refine: float = 0.2  # share of the budget

    def __post_init__(self) -> None:
        check_lesson(self)
        check_choice(self, "heuristic_first", (True, False))
        check_whole(self, 1, "refit_every")
        check_whole(self, 0, "steps")
        check_number(self, 0.0, 1.0, "elite", "refit_step", "mix")
        check_number(self, 0.0, FAR, "clip", "speed_prior", "heuristic_prior")

    @classmethod
    def paper(cls) -> Post:
        """Nearest to what is known of the paper."""
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
        """The best heuristic is tried first, and refined at the end where learning finds nothing
        better.

        It is no prior, for the reason that `Spotlight.heuristic` has.
        """
        return cls(heuristic_first=True)

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        lesson = Lesson(problem, evaluate, self.num_groups, self.order, self.refine)
        try:
            self._learn(problem, evaluate, lesson)
        except BudgetSpent:
            if evaluate.best is None:
                raise
        return lesson.finish()

    def _learn(self, problem: Problem, evaluate: Evaluate, lesson: Lesson) -> None:
        from roost.policies.features import speed_prior

        prior = self.speed_prior * speed_prior(problem, lesson.groups.unit).astype(np.float64)
        if self.heuristic_prior > 0 or self.heuristic_first:
            prior[np.arange(len(prior)), lesson.heuristic()] += self.heuristic_prior
        table = Softmaxes(prior, lesson.groups.allowed)
        rng = np.random.default_rng(int(evaluate.rng.integers(2**62)))
        samples: list[tuple[Array, Array]] = []
        if (kept := evaluate.kept()) is not None:
            table.logits = np.array(kept["logits"])
            samples = list(zip(kept["choices"], kept["seconds"], strict=True))
            lesson.take_up(kept)
            rng = _rng_from(kept["rng"])
        while lesson.left > 0:
            choices = table.sample(rng, self.batch)
            found = lesson.outcomes(choices)
            samples.append((choices, found.seconds))
            told: dict[str, float] = {}
            if len(samples) == self.refit_every:
                self._refit(table, samples)
                samples = []
            else:
                advantage = standardised(-np.sqrt(found.seconds))
                told["kl"] = table.improve(choices, advantage, self.steps, self.rate, self.clip)
            assert evaluate.best is not None
            evaluate.note(
                told | found.figures() | {"entropy": table.entropy, "best": evaluate.best.step_time}
            )
            if lesson.is_stale():
                table.logits, samples = prior, []
            evaluate.keep(partial(_state, lesson, table, samples, rng, choices.shape))

    def _refit(self, table: Softmaxes, samples: list[tuple[Array, Array]]) -> None:
        choices = np.concatenate([some for some, _ in samples])
        seconds = np.concatenate([some for _, some in samples])
        best = np.argsort(seconds, kind="stable")[: max(1, int(self.elite * len(seconds)))]
        table.refit(choices[best], self.refit_step, self.mix)


def _state(
    lesson: Lesson,
    table: Softmaxes,
    samples: list[tuple[Array, Array]],
    rng: np.random.Generator,
    shape: tuple[int, ...],
) -> dict[str, Array]:
    return lesson.state() | {
        "logits": table.logits,
        "choices": np.array([choices for choices, _ in samples]).reshape(-1, *shape),
        "seconds": np.array([seconds for _, seconds in samples]).reshape(-1, shape[0]),
        "rng": _rng_state(rng),
    }


def _rng_state(rng: np.random.Generator) -> Array:
    """The state of a PCG64 as 64-bit words."""
    state = rng.bit_generator.state
    words = [state["state"]["state"], state["state"]["inc"]]
    parts = [part for word in words for part in (word >> 64, word & (2**64 - 1))]
    return np.array([*parts, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def _rng_from(words: Array) -> np.random.Generator:
    high, low, inc_high, inc_low, has, last = (int(word) for word in words)
    rng = np.random.default_rng(0)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has,
        "uinteger": last,
    }
    return rng
