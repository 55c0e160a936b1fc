"""Placeto's episodes: several placements side by side, each of which is changed group by group.

All of them are at the same group at the same time, so that one pass of the network and one call of
the simulator serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.learners.episodes import StepBaseline
from roost.placers._placeto.features import DEVICE, Moment, Sight
from roost.placers._placeto.group_times import group_times
from roost.placers._shared.groups import groups_of
from roost.placers._shared.orders import list_scheduled
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.units import Units
from roost.policies.gnn import GraphMaps

Judge = Callable[[Sequence[Placement]], Sequence[Trial]]
# For one group and the moments of all episodes: log-probabilities [episodes, devices].
Choose = Callable[["Seen"], Array]
_KEPT = (
    "place",
    "outcome",
    "starts",
    "first",
    "best",
    "best_outcome",
    "start",
    "finish",
    "previous",
    "visits",
)
_MOST_REMEMBERED = 50_000


@dataclass(frozen=True, eq=False)
class Seen:
    """What the policy sees at one step."""

    at: int  # group
    step: int  # of the episode
    moment: Moment
    done: Array  # [groups] whether the episode was there
    devices: Array  # [features, episodes, devices]
    allowed: Array  # [devices]


@dataclass(eq=False)
class Record:
    """What was seen, done and gained: one entry for each step."""

    seen: list[Seen] = field(default_factory=list)
    chosen: list[Array] = field(default_factory=list)  # [episodes] device
    logs: list[Array] = field(default_factory=list)  # [episodes] log-probability of it
    trial: list[int] = field(default_factory=list)  # number of the trial that judges the step
    # One for each trial: [episodes] improvement of the value.
    reward: list[Array] = field(default_factory=list)
    # The same, of what lasts: 0 where moves were undone.
    kept: list[Array] = field(default_factory=list)
    new_trials: int = 0


@dataclass(frozen=True)
class Rules:
    """How episodes go."""

    episodes: int  # side by side
    order: str  # of the visits: topological, reversed or random
    # Order in which a placement is tried: rank, program, fifo, or listed, which is made for its
    # devices.
    judged: str
    trial_every: int | None  # steps between two trials; None: one at the end of the episode
    undo: bool  # the moves since the last trial, where they make things worse
    remember: bool  # placements that were tried: they are not simulated again
    relative: bool  # value: the logarithm of the step time, instead of the step time
    # Of an episode: "start" of the run, "best" so far, or "go_on" from where the last ended.
    restart: str
    penalty: float  # step times for as many bytes over as the devices have on average
    times_every: int  # steps between two looks at when groups run
    device_features: bool  # whether the policy is shown them; else they are all 0


class Episodes:
    """The episodes on one problem."""

    def __init__(
        self, problem: Problem, rules: Rules, most_groups: int, rounds: int, judge: Judge
    ) -> None:
        self.rules, self.units, self.judge = rules, groups_of(problem, most_groups), judge
        self.sight = Sight(self.units)
        self.baseline = StepBaseline(self.sight.num_groups, rounds)
        self.problem = problem
        self.memo: dict[bytes, Array] = {}
        # When groups run in the placements seen last.
        self.looked: dict[bytes, tuple[Array, Array]] = {}
        self.step = 0  # of the episode: groups done
        self.visits = self.sight.order
        self.num_greedy = 0  # episodes that take the likeliest device
        self.maps: GraphMaps | None = None  # where the learner keeps those of the graph

    @property
    def num_steps(self) -> int:
        return self.sight.num_groups

    @property
    def has_tried_all(self) -> bool:
        """Whether there is no placement left that is not remembered."""
        return bool(
            np.log(max(1, len(self.memo))) >= np.log(self.units.allowed.sum(axis=1)).sum() - 1e-9
        )

    def begin(self, starts: Array, rng: np.random.Generator) -> None:
        """Evaluate the first placements [episodes, groups], and be before the first group of the
        first episode."""
        self.starts = starts.astype(np.int64)
        # Placements now and when they were last tried; what they cost then: missing bytes, step
        # time, peaks.
        self.place = self.tried = self.starts
        self.outcome = self.first = self._outcomes(self.starts)[0]  # [episodes, 2 + devices]
        self.best, self.best_outcome = _best(self.place, self.outcome)
        self.restart(rng)

    def _new_visits(self, rng: np.random.Generator) -> None:
        self.step = 0
        self.previous = self.place[:, self.sight.order[-1]].copy()
        self.visits = self.sight.order
        if self.rules.order == "random":
            self.visits = rng.permutation(self.num_steps)
        elif self.rules.order == "reversed":
            self.visits = self.visits[::-1]

    def restart(self, rng: np.random.Generator) -> None:
        """Begin the next episodes."""
        if self.rules.restart == "best":
            return self.renew(self.rules, rng)
        if self.rules.restart == "start":
            self.place, self.outcome = self.starts, self.first
        self._go(rng)

    def renew(self, rules: Rules, rng: np.random.Generator) -> None:
        """Begin episodes at the best placement so far, by other rules."""
        self.rules, self.looked = rules, {}
        self.place, self.outcome = (
            np.tile(x, (rules.episodes, 1)) for x in (self.best, self.best_outcome)
        )
        self._go(rng)

    def _go(self, rng: np.random.Generator) -> None:
        self.tried = self.place
        self._look()
        self._new_visits(rng)

    def run(self, choose: Choose, rng: np.random.Generator, num_steps: int) -> Record:
        """So many steps, or as many as are left of the episode."""
        record = Record()
        for _ in range(min(num_steps, self.num_steps - self.step)):
            self._one(choose, rng, record)
        return record

    def _one(self, choose: Choose, rng: np.random.Generator, record: Record) -> None:
        at, rows = int(self.visits[self.step]), np.arange(len(self.place))
        if self.step % self.rules.times_every == 0:
            self._look()
        seen = self._seen(at)
        logs = choose(seen)
        device = _drawn(logs, rng)
        device[: self.num_greedy] = logs[: self.num_greedy].argmax(axis=1)
        self.place = self.place.copy()  # what was seen stays as it was
        self.place[rows, at] = self.previous = device
        self.step += 1
        record.seen.append(seen)
        record.chosen.append(device)
        record.logs.append(logs[rows, device])
        record.trial.append(len(record.reward))
        if (
            self.step == self.num_steps
            or self.step % (self.rules.trial_every or self.num_steps) == 0
        ):
            self._try(record)

    def _try(self, record: Record) -> None:
        """See what the placements cost that were made."""
        outcome, fresh = self._outcomes(self.place, known=(self.tried, self.outcome))
        better = self.value(self.outcome) - self.value(outcome)
        worse = (
            _worse(outcome, self.outcome) if self.rules.undo else np.zeros(len(outcome), dtype=bool)
        )
        self.place = np.where(worse[:, None], self.tried, self.place)
        self.outcome = np.where(worse[:, None], self.outcome, outcome)
        self.tried = self.place
        best = _best(self.place, self.outcome)
        if _worse(self.best_outcome[None], best[1][None])[0]:
            self.best, self.best_outcome = best
        record.reward.append(better)
        record.kept.append(np.where(worse, 0.0, better))
        record.new_trials += fresh

    def _seen(self, at: int) -> Seen:
        moment = Moment(self.place, self.start, self.finish, self.outcome[:, 2:])
        done = np.zeros(self.num_steps, dtype=bool)
        done[self.visits[: self.step]] = True
        devices = np.zeros((len(DEVICE), len(self.place), self.sight.num_devices), dtype=np.float32)
        if self.rules.device_features:
            devices = self.sight.devices(moment, at, self.previous)
        return Seen(at, self.step, moment, done, devices, self.units.allowed[at])

    def value(self, outcome: Array) -> Array:
        """[episodes] what shall get small, in steps of balanced length or as a logarithm; any
        number is finite."""
        balanced = max(self.sight.balanced, 1e-12)
        over = outcome[:, 0] / max(1.0, float(self.sight.memory.mean()))
        value = outcome[:, 1] / balanced * (1.0 + self.rules.penalty * over)
        return np.asarray(
            np.log(np.maximum(value, 1e-9)) if self.rules.relative else np.minimum(value, 1e6)
        )

    def placement(self, place: Array) -> Placement:
        """The placement that groups on these devices make, each parameter fetched once a step."""
        device = self.units.devices(place)
        if self.rules.judged == "listed":
            placement = list_scheduled(self.problem, device)
        else:
            placement = self.problem.placement(device, self.rules.judged)
        return replace(placement, prefetch_bytes=fetched_once(self.problem, device))

    def _outcomes(
        self, place: Array, known: tuple[Array, Array] | None = None
    ) -> tuple[Array, int]:
        """What placements [episodes, groups] cost, and how many of them had to be tried for
        that."""
        found: dict[bytes, Array] = (
            {} if known is None else {p.tobytes(): o for p, o in zip(*known, strict=True)}
        )
        if not self.rules.remember:
            return self._judged(place), len(place)
        found |= {key: self.memo[key] for key in (p.tobytes() for p in place) if key in self.memo}
        unknown = list(
            {
                p.tobytes(): number for number, p in enumerate(place) if p.tobytes() not in found
            }.values()
        )
        if unknown:
            for number, outcome in zip(unknown, self._judged(place[unknown]), strict=True):
                found[place[number].tobytes()] = self.memo[place[number].tobytes()] = outcome
            while len(self.memo) > _MOST_REMEMBERED:
                del self.memo[next(iter(self.memo))]
        return np.stack([found[p.tobytes()] for p in place]), len(unknown)

    def _judged(self, place: Array) -> Array:
        trials = self.judge([self.placement(p) for p in place])
        return np.array([self._outcome(trial) for trial in trials])

    def _outcome(self, trial: Trial) -> Array:
        """A trial without a step time is as bad as any can be."""
        worst = 1e3 * max(self.sight.balanced, 1e-12)
        sound = np.isfinite(trial.step_time) and trial.step_time >= 0
        step = min(trial.step_time, worst) if sound else worst
        return np.concatenate([[float(trial.missing_bytes), step], trial.peak_memory])

    def _look(self) -> None:
        """See when the groups of each placement run."""
        before, cached = self.looked, dict[bytes, tuple[Array, Array]]()
        for key, p in ((p.tobytes(), p) for p in self.place):
            if key not in cached:
                cached[key] = (
                    before[key] if key in before else group_times(self.units, self.placement(p))
                )
        self.looked = cached
        both = [cached[p.tobytes()] for p in self.place]
        self.start, self.finish = (np.stack(part) for part in zip(*both, strict=True))

    def state(self) -> dict[str, Array]:
        """Where the episodes are, between two updates."""
        found = {name: np.array(getattr(self, name)) for name in _KEPT}
        found["baseline"] = self.baseline.past.copy()
        found["counts"] = np.array([self.step])
        groups = self.num_steps
        found["tried"] = np.array(
            [np.frombuffer(key, np.int64) for key in self.memo], np.uint8
        ).reshape(-1, groups)
        found["tried_outcome"] = np.array(list(self.memo.values())).reshape(
            len(self.memo), self.outcome.shape[1]
        )
        return found

    def resume(self, state: Mapping[str, Array], rules: Rules) -> None:
        self.rules = rules
        for name in _KEPT:
            setattr(self, name, np.array(state[name]))
        self.tried = self.place
        self.step = int(state["counts"][0])
        self.baseline.past = np.array(state["baseline"])
        tried = state["tried"].astype(np.int64)
        self.memo = {
            p.tobytes(): np.array(o) for p, o in zip(tried, state["tried_outcome"], strict=True)
        }


def anywhere(units: Units, rng: np.random.Generator, count: int) -> Array:  # [count, groups]
    """Random devices, all that a group allows as likely."""
    choices = units.allowed.sum(axis=1)
    pick = (rng.random((count, units.num_units)) * choices).astype(np.int64)
    return np.asarray((np.cumsum(units.allowed, axis=1)[None] > pick[..., None]).argmax(axis=2))


def _drawn(logs: Array, rng: np.random.Generator) -> Array:  # [episodes]
    """A device for each, as likely as the policy says."""
    share = np.cumsum(np.exp(logs.astype(np.float64)), axis=1)
    pick = rng.random(len(logs)) * share[:, -1]
    return np.asarray((share > pick[:, None]).argmax(axis=1))


def _worse(new: Array, old: Array) -> Array:
    """[episodes] whether outcomes are worse than others: nearer to fitting comes first, then the
    shorter step."""
    return np.asarray(
        (new[:, 0] > old[:, 0]) | ((new[:, 0] == old[:, 0]) & (new[:, 1] > old[:, 1]))
    )


def _best(place: Array, outcome: Array) -> tuple[Array, Array]:
    row = np.lexsort((outcome[:, 1], outcome[:, 0]))[0]
    return place[row].copy(), outcome[row].copy()
