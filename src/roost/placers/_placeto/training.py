"""Placeto over many problems: one policy, one problem after the other, for as much work as was
planned."""

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
from roost.placers._placeto.episodes import Episodes, Judge, anywhere
from roost.placers._placeto.learner import Learner
from roost.placers.placeto import Settings
from roost.simulator.compiled import Simulator

_STEP_SECONDS = 1e-3  # of a step of all episodes, learning included, on a core of today
_OP_SECONDS = 1e-6  # of simulating an op once, under an order of its own
_EPISODES = 16  # side by side, at most
# At the rate of one problem, a policy of many broke down and did not recover.
_RATE, _MOST_KL = (3e-3, 1e-3), 0.03
# Of the rounds begin at a random placement; the others where the last on that problem ended.
_AFRESH = 0.5


class Course:
    """A policy that learns over problems, and how far it is."""

    def __init__(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        settings: Settings,
        on_note: Callable[[Mapping[str, float]], object],
    ) -> None:
        # Nothing is remembered: there are many problems, and trials cost little here.
        few = min(_EPISODES, settings.episodes)
        settings = replace(
            settings, remember=False, refine=None, episodes=few, rate=_RATE, most_kl=_MOST_KL
        )
        self.learner, self.on_note, self.done = Learner(settings, seed, inf), on_note, 0
        self.walks = [self.learner.episodes(problem, simulated(problem)) for problem in problems]
        self.reached: list[Array | None] = [None] * len(problems)
        self.plan = max(1, int(seconds / np.mean([self._seconds(walk) for walk in self.walks])))
        self.learner.horizon = max(1, int(self.plan * settings.episodes))

    def _seconds(self, walk: Episodes) -> float:
        simulations = 2 * self.learner.settings.episodes * walk.problem.graph.num_ops
        return walk.num_steps * _STEP_SECONDS + simulations * _OP_SECONDS

    def run(self, save: Callable[[dict[str, Array]], object]) -> None:
        """Learn until the plan is done; `save` is offered the state after each round."""
        while self.done < self.plan:
            rng = np.random.default_rng([self.learner.seed, 7, self.done])
            number = int(rng.integers(len(self.walks)))
            walk, start = self.walks[number], self.reached[number]
            if start is None or rng.random() < _AFRESH:
                start = anywhere(walk.units, rng, 1)[0]
            walk.begin(np.tile(start, (self.learner.settings.episodes, 1)), rng)
            told = self.learner.round(walk)
            self.reached[number] = walk.best
            self.done += 1
            share = walk.best_outcome[1] / max(walk.sight.balanced, 1e-12)
            where = {
                "done": float(self.done),
                "of": float(self.plan),
                "progress": self.done / self.plan,
            }
            self.on_note({**told, **where, "problem": float(number), "over_balanced": float(share)})
            save(self.state())

    def state(self) -> dict[str, Array]:
        found = {**self.learner.state(), "done": np.array(self.done)}
        for number, (walk, place) in enumerate(zip(self.walks, self.reached, strict=True)):
            found[f"baseline.{number}"] = walk.baseline.past.copy()
            if place is not None:
                found[f"reached.{number}"] = place
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to where a state was saved; raises InputError where it is not one of this
        course."""
        taken(state, "learned", self.learner.state()["learned"].shape, "i")
        taken(state, "fresh", ())
        self.learner.resume(state)
        self.done = int(taken(state, "done", (), "i"))
        for number, walk in enumerate(self.walks):
            walk.baseline.past = np.array(
                _past(state, f"baseline.{number}", walk.baseline.past.shape)
            )
            if (name := f"reached.{number}") in state:
                reached = taken(state, name, (walk.units.num_units,), "i")
                if not ((reached >= 0) & (reached < walk.problem.cluster.num_devices)).all():
                    raise InputError(f"tensor {name!r} names a device that is not there")
                self.reached[number] = np.array(reached)


def _past(state: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Rewards of past rounds; what is not a number there is not known yet."""
    found = np.asarray(state.get(name))
    if found.dtype.kind != "f" or found.shape != shape or np.isinf(found).any():
        raise InputError(f"tensor {name!r} is missing, infinite, or not of shape {list(shape)}")
    return found


def simulated(problem: Problem) -> Judge:
    """Trials by the simulator that nobody counts: for learning beforehand, not for a search."""
    simulator = Simulator.of(problem)

    def judge(placements: Sequence[Placement]) -> list[Trial]:
        found = []
        for placement in placements:
            timeline = simulator.simulate(placement)
            missing = int(timeline.missing.sum())
            found.append(
                Trial(
                    placement,
                    timeline.step_time,
                    timeline.peak_memory,
                    missing == 0,
                    missing_bytes=missing,
                )
            )
        return found

    return judge
