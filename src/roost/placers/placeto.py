"""Placeto (Addanki et al. 2019): a graph network that improves a placement group by group, trained
with REINFORCE.

An episode visits every group once, in topological order, and puts it on a device; every placement
on the way is a trial, and the reward of a step is by how much the penalised step time falls.

Differs in: devices are scored one by one with one shared network, each from an embedding that says
which groups are there, so that a policy runs on any number of any devices; messages and pools are
means. The released code has one return only that runs (the best still to come); here it is the
paper's. Parameters that several groups read are groups, fetched once a step where they live
elsewhere.

`setting="paper"` is otherwise as published: the network is run anew at every step on features of
the whole placement (8 rounds of messages, 8 episodes side by side), every step is a trial, one
update at the end of each episode with returns to its end, less the mean return of that step in the
last 10 rounds; every episode begins at the same random placements; Adam from 1e-3 to 1e-4, entropy
weight from 1 to 0, gradient norm 1.25.

`setting="tuned"` needs far fewer trials, and is this instead. Only the placement at the end of an
episode is tried, in an order made for its devices; all 32 episodes begin at the best placement so
far; rewards are of the logarithm of the step time, normalised over the episodes; four passes with a
clipped ratio (PPO) over each round; rate 1e-2 to 3e-3, entropy weight 0.02 to 0. Groups are
embedded once for each update from what does not change; what the placement changes is in features
of the devices, with start times as of the beginning of the episode. A placement tried before is no
new trial. A policy that repeats itself is followed by a new one; every second of these tries every
step, as the paper does, undoes what makes things worse, and learns from the reward of each step
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.learners.threads import one_thread
from roost.placers import Evaluate
from roost.placers._shared.checkpoints import restore

if TYPE_CHECKING:  # whoever lists placers needs no torch
    from roost.placers._placeto.learner import Learner


@dataclass(frozen=True)
class Settings:
    """How Placeto learns."""

    most_groups: int = 300
    episodes: int = 8  # side by side
    steps: int | None = None  # between two updates; None: an episode
    start: str = "random"  # or "best": of what `starts` find
    starts: tuple[str, ...] = ("single", "expert", "scotch")
    # Of an episode: at the "start" of the run, the "best" so far, or "go_on".
    restart: str = "start"
    order: str = "topological"  # of the visits; or reversed, or random
    # Order that placements are tried in; "listed": one that is made for their devices.
    judged: str = "rank"
    trial_every: int | None = 1  # steps; None: one trial at the end of an episode
    undo: bool = False  # the moves since the last trial, where they make the placement worse
    remember: bool = False  # what was tried before is not tried again, and is no trial
    rewards: str = "improvement"  # or terminal
    relative: bool = False  # rewards are of the logarithm of the step time
    penalty: float = 24.0  # step times for as many bytes over as a device has
    discount: float = 1.0
    baseline_rounds: int = 10
    normalise: bool = False  # advantages
    # Or "update": once for all steps between two updates, from features that do not change.
    embed: str = "step"
    # What a device would mean for the group, given to the head beside the embedding.
    device_features: bool = False
    times_every: int = 1  # steps between two looks at when the groups run
    rounds: int = 8  # of messages
    messages: bool = True
    pools: bool = True
    width: int = 8
    hidden: int = 32
    passes: int = 1  # over what was tried; from 2 on with a clipped ratio
    clip: float = 0.2
    most_norm: float = 1.25  # of a gradient
    most_kl: float = inf  # from the policy that tried it: beyond, no further pass is made
    rate: tuple[float, float] = (1e-3, 1e-4)  # at the beginning, and after `horizon`
    entropy: tuple[float, float] = (1.0, 0.0)
    horizon: int = 5000  # trials, where the budget does not say how many there will be
    train_on: str = "cpu"  # cuda, cuda:N, or auto: a GPU where there is one
    # For every second policy, where those that repeat themselves are followed by new ones.
    refine: Settings | None = None

    def __post_init__(self) -> None:
        allowed = {
            "start": ("random", "best"), "restart": ("start", "best", "go_on"),
            "order": ("topological", "reversed", "random"), "rewards": ("improvement", "terminal"),
            "embed": ("step", "update"),
        }  # fmt: skip
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )
        for name in (
            "most_groups",
            "episodes",
            "times_every",
            "width",
            "hidden",
            "passes",
            "horizon",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")


_TUNED = Settings(
    episodes=32, judged="listed", trial_every=None, restart="best", remember=True, relative=True,
    normalise=True,
    embed="update", device_features=True, times_every=1000, rounds=4, width=16, passes=4,
    rate=(1e-2, 3e-3),
    entropy=(0.02, 0.0),
)  # fmt: skip
_REFINE = replace(
    _TUNED, episodes=4, steps=16, trial_every=1, undo=True, discount=0.0, times_every=8, rate=(1e-3,
    1e-3),
    entropy=(0.1, 0.02),
)  # fmt: skip
SETTINGS = {"paper": Settings(), "tuned": replace(_TUNED, refine=_REFINE)}


@dataclass(frozen=True)
class Placeto:
    """Learns until the budget is spent, from nothing or from weights in a file."""

    setting: str | Settings = "tuned"  # tuned, paper, or any other
    weights: str | None = None  # a file that `roost learn` wrote
    samples: int = 64  # episodes before it begins to learn, where it has weights
    tune: bool = True  # whether it then goes on learning, until the budget is spent
    baselines: tuple[str, ...] = ("single", "expert")  # asked first, where it has weights

    def __post_init__(self) -> None:
        if isinstance(self.setting, str) and self.setting not in SETTINGS:
            raise InputError(
                f"setting is {self.setting!r}; it must be one of {', '.join(SETTINGS)}, or Settings"
            )
        if self.weights is not None:  # what is wrong with them is told before any time is spent
            from roost.placers._placeto.learner import Learner

            self._taught(Learner(self.settings, 0, 1))

    @classmethod
    def paper(cls) -> Placeto:
        """Nearest to what is known of the paper."""
        return cls(setting="paper")

    @property
    def settings(self) -> Settings:
        return SETTINGS[self.setting] if isinstance(self.setting, str) else self.setting

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        from roost.placers._placeto.learner import Learner

        with one_thread():
            starts = self._starts(problem, evaluate)
            learner = Learner(
                self.settings, int(evaluate.rng.integers(2**62)), evaluate.trials_left
            )
            if self.weights is not None:
                learner = self._taught(learner)
            episodes = learner.episodes(problem, evaluate)
            state = evaluate.kept()
            if state is not None:
                learner.resume(state)
                episodes.resume(state, learner.rules)
            elif self.weights is not None:
                learner.sample(episodes, self.samples)
            else:
                learner.begin(episodes, starts)
            while (
                (self.tune or self.weights is None)
                and not (learner.is_done or episodes.has_tried_all)
                and evaluate.seconds_left > 0
                and evaluate.trials_left >= 1
            ):
                evaluate.note(learner.round(episodes))
                learner.renew(episodes)
                evaluate.keep(lambda: {**learner.state(), **episodes.state()})
        return episodes.placement(episodes.best)

    def _taught(self, learner: Learner) -> Learner:
        """The learner with the weights of the file, with which it goes on learning."""
        from roost.policies.weights import load_weights

        assert self.weights is not None
        tensors, _ = load_weights(self.weights, "placeto", learner.shapes)
        learner.load(tensors)
        return learner

    def learn(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        on_note: Callable[[Mapping[str, float]], object],
        checkpoint: Any,
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Weights for problems like these, about so many seconds' work; and what the card is to say
        of them.

        `checkpoint` has `load() -> state or None` and `save(state)`, where a state is a dict of
        arrays.
        """
        import torch

        from roost.placers._placeto.training import Course

        with one_thread():
            course = Course(problems, seconds, seed, self.settings, on_note)
            state = checkpoint.load()
            if state is not None:
                restore(course, state, checkpoint)
            course.run(checkpoint.save)
        card = {
            "rounds": course.plan,
            "most_groups": self.settings.most_groups,
            "torch": str(torch.__version__),
        }
        return course.learner.tensors, card

    def _starts(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """Where the episodes begin, besides random placements."""
        names = self.settings.starts if self.settings.start == "best" else ()
        if self.weights is not None:
            names = tuple(dict.fromkeys((*self.baselines, *names)))
        from roost.placers._starts.starting_points import ask, distinct

        found = [trial for name in names for trial in ask(name, problem, evaluate.named(name))]
        return [trial.placement for trial in distinct(found)]
