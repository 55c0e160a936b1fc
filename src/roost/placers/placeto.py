"""Placeto (Addanki et al. 2019): a graph network that improves a placement group by group, trained
with REINFORCE.

An episode visits every group once, in topological order, and puts it on a device. Every placement
on the way is a trial, and the reward of a step is by how much the penalised step time falls.

Differs in: devices are scored one by one with one shared network, each from an embedding that says
which groups are there, so that a policy runs on any number of any devices; messages and pools are
means. The released code has only one return that runs (the best still to come); here it is the
paper's. Parameters that several groups read are groups, fetched once a step from their home.

`setting="paper"` is otherwise the paper as far as known. The network is run anew at every step on
features of the whole placement (8 rounds of messages, 8 episodes side by side), and every step is a
trial. There is one update at the end of each episode, with returns to its end, less the mean return
of that step in the last 10 rounds. Every episode begins at the same random placements. Adam goes
from 1e-3 to 1e-4, the entropy weight from 1 to 0; the gradient norm is 1.25.

`setting="tuned"` needs far fewer trials. It differs from the paper:

- Only the placement at the end of an episode is tried, in an order made for its devices.
- All 32 episodes begin at the best placement so far.
- Rewards are of the logarithm of the step time, normalised over the episodes.
- Each round makes four passes with a clipped ratio (PPO), at rate 1e-2 to 3e-3 and entropy weight
  0.02 to 0.
- Groups are embedded once for each update, from features that do not change. Features of the
  devices describe the placement, with start times as of the beginning of the episode.
- A placement that was tried before is no new trial.
- A policy that repeats itself is followed by a new one. Every second new one tries every step, as
  the paper does, undoes what makes things worse, and learns from the reward of each step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.learners.threads import one_thread
from roost.placers import Evaluate
from roost.placers._placeto.settings import SETTINGS, PlacetoSettings
from roost.placers._shared.checkpoints import restore
from roost.placers._starts.starting_points import ask, distinct

if TYPE_CHECKING:  # whoever lists placers needs no torch
    from roost.placers._placeto.learner import PlacetoLearner


@dataclass(frozen=True)
class Placeto:
    """Learns until the budget is spent, from nothing or from weights in a file."""

    setting: str | PlacetoSettings = "tuned"  # or "paper", or any other settings
    weights: str | None = None  # a file that `roost learn` wrote
    samples: int = 64  # episodes before it begins to learn, if it has weights
    tune: bool = True  # with weights: go on learning after the samples, until the budget is spent
    baselines: tuple[str, ...] = ("single", "expert")  # asked first, if it has weights

    def __post_init__(self) -> None:
        if isinstance(self.setting, str) and self.setting not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise InputError(
                f"setting is {self.setting!r}; it must be one of {known}, or PlacetoSettings"
            )
        if self.weights is not None:  # raise for wrong weights before any time is spent
            self._learner(seed=0, trials=1)

    @classmethod
    def paper(cls) -> Placeto:
        """Nearest to what is known of the paper."""
        return cls(setting="paper")

    @property
    def settings(self) -> PlacetoSettings:
        return SETTINGS[self.setting] if isinstance(self.setting, str) else self.setting

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        from roost.placers._placeto import training
        from roost.placers._placeto.episodes import PlacetoEpisodes

        with one_thread():
            starts = self._starts(problem, evaluate)
            learner = self._learner(int(evaluate.rng.integers(2**62)), evaluate.trials_left)
            episodes = PlacetoEpisodes(problem, self.settings, evaluate)
            state = evaluate.kept()
            if state is not None:
                learner.resume(state)
                episodes.resume(state, learner.settings)
            elif self.weights is not None:
                training.sample(learner, episodes, self.samples)
            else:
                training.begin(learner, episodes, starts)
            if self.tune or self.weights is None:
                training.train(learner, episodes, evaluate)
        return episodes.placement(episodes.best)

    def learn(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        on_note: Callable[[Mapping[str, float]], object],
        checkpoint: Any,
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Weights for problems like these, from about so many seconds of work, and the entries of
        their card.

        `checkpoint` has `load() -> state or None` and `save(state)`; a state is a dict of arrays.
        """
        import torch

        from roost.placers._placeto.many_problems import ManyProblems

        with one_thread():
            learning = ManyProblems(problems, seconds, seed, self.settings, on_note)
            state = checkpoint.load()
            if state is not None:
                restore(learning, state, checkpoint)
            learning.run(checkpoint.save)
        card = {
            "rounds": learning.num_rounds,
            "most_groups": self.settings.most_groups,
            "torch": str(torch.__version__),
        }
        return learning.learner.weights, card

    def _learner(self, seed: int, trials: float) -> PlacetoLearner:
        """A learner, with the weights of the file if there is one."""
        from roost.placers._placeto.learner import PlacetoLearner
        from roost.policies.weights import load_weights

        learner = PlacetoLearner(self.settings, seed, trials)
        if self.weights is not None:
            shapes = {name: array.shape for name, array in learner.weights.items()}
            learner.load(load_weights(self.weights, "placeto", shapes)[0])
        return learner

    def _starts(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """Placements of other placers, where episodes begin besides random placements."""
        names = self.settings.starts if self.settings.start == "best" else ()
        if self.weights is not None:
            names = tuple(dict.fromkeys((*self.baselines, *names)))
        trials = [trial for name in names for trial in ask(name, problem, evaluate.named(name))]
        return [trial.placement for trial in distinct(trials)]
