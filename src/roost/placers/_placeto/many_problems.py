"""Placeto over many problems: one policy learns on one problem after the other, for as much work as
was planned. `roost learn` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.errors import InputError
from roost.placers._placeto.episodes import Judge, PlacetoEpisodes, anywhere
from roost.placers._placeto.learner import PlacetoLearner
from roost.placers._placeto.settings import PlacetoSettings
from roost.placers._placeto.training import train_round
from roost.simulator.compiled import Simulator

_STEP_SECONDS = 1e-3  # of a step of all episodes, learning included, on a core of today
_OP_SECONDS = 1e-6  # of simulating an op once, under an order of its own
_EPISODES = 16  # side by side, at most
# At the rate of one problem, a policy of many broke down and did not recover.
_RATE = (3e-3, 1e-3)
_MOST_KL = 0.03
# Share of rounds that begin at a random placement. The others go on from the last round on that
# problem.
_AFRESH = 0.5


class ManyProblems:
    """A policy that learns over problems, and how far it is."""

    def __init__(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        settings: PlacetoSettings,
        on_note: Callable[[Mapping[str, float]], object],
    ) -> None:
        settings = replace(
            settings,
            remember=False,  # there are many problems, and trials cost little here
            refine=None,
            episodes=min(_EPISODES, settings.episodes),
            rate=_RATE,
            most_kl=_MOST_KL,
        )
        self.learner = PlacetoLearner(settings, seed, inf)
        self.on_note = on_note
        self.num_done = 0
        self.all_episodes = [
            PlacetoEpisodes(problem, settings, simulated(problem)) for problem in problems
        ]
        self.reached: list[Array | None] = [None] * len(problems)  # where the last round ended
        mean_seconds = np.mean([_round_seconds(episodes) for episodes in self.all_episodes])
        self.num_rounds = max(1, int(seconds / mean_seconds))
        self.learner.horizon = max(1, int(self.num_rounds * settings.episodes))

    def run(self, save: Callable[[dict[str, Array]], object]) -> None:
        """Learn until the planned rounds are done; `save` is offered the state after each round."""
        num_episodes = self.learner.settings.episodes
        while self.num_done < self.num_rounds:
            rng = np.random.default_rng([self.learner.seed, 7, self.num_done])
            number = int(rng.integers(len(self.all_episodes)))
            episodes = self.all_episodes[number]
            start = self.reached[number]
            if start is None or rng.random() < _AFRESH:
                start = anywhere(episodes.units, rng, 1)[0]
            episodes.begin(np.tile(start, (num_episodes, 1)), rng)
            figures = train_round(self.learner, episodes)
            self.reached[number] = episodes.best
            self.num_done += 1
            figures |= {
                "done": float(self.num_done),
                "of": float(self.num_rounds),
                "progress": self.num_done / self.num_rounds,
                "problem": float(number),
                "over_balanced": episodes.best_step_time / episodes.features.balanced,
            }
            self.on_note(figures)
            save(self.state())

    def state(self) -> dict[str, Array]:
        """All that is needed to go on from here."""
        state = {**self.learner.state(), "done": np.array(self.num_done)}
        for number, (episodes, device) in enumerate(
            zip(self.all_episodes, self.reached, strict=True)
        ):
            state[f"baseline.{number}"] = episodes.baseline.past.copy()
            if device is not None:
                state[f"reached.{number}"] = device.astype(np.int64)
        return state

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to a saved state; raises InputError if it is not one of this learning."""
        taken(state, "learned", self.learner.state()["learned"].shape, "i")
        taken(state, "fresh", ())
        self.learner.resume(state)
        self.num_done = int(taken(state, "done", (), "i"))
        for number, episodes in enumerate(self.all_episodes):
            shape = episodes.baseline.past.shape
            episodes.baseline.past = _past_returns(state, f"baseline.{number}", shape)
            if (name := f"reached.{number}") in state:
                reached = taken(state, name, (episodes.num_steps,), "i")
                if not ((reached >= 0) & (reached < episodes.features.num_devices)).all():
                    raise InputError(f"tensor {name!r} names a device that is not there")
                self.reached[number] = np.array(reached)


def _round_seconds(episodes: PlacetoEpisodes) -> float:
    """Seconds of a round on this problem, about."""
    simulated_ops = 2 * episodes.settings.episodes * episodes.problem.graph.num_ops
    return episodes.num_steps * _STEP_SECONDS + simulated_ops * _OP_SECONDS


def _past_returns(state: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Returns of past rounds; NaN where none is known yet."""
    past = np.array(state.get(name))
    if past.dtype.kind != "f" or past.shape != shape or np.isinf(past).any():
        raise InputError(f"tensor {name!r} is missing, infinite, or not of shape {list(shape)}")
    return past


def simulated(problem: Problem) -> Judge:
    """A judge that simulates, and counts no trials: for learning beforehand, not for a search."""
    simulator = Simulator.of(problem)

    def judge(placements: Sequence[Placement]) -> list[Trial]:
        return [Trial.simulated(each, simulator.simulate(each)) for each in placements]

    return judge
