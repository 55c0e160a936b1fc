"""Placeto's episodes on one problem: placements side by side, each changed group by group.

All episodes are at the same group at the same time, so that one pass of the network and one call of
the simulator serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from roost.core.arrays import Array, taken, taken_devices, wrong_array
from roost.core.graph import FORWARD
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.learners.episodes import StepBaseline
from roost.learners.hardware import torch_device
from roost.placers._episodes.group_episodes import GroupEpisodes
from roost.placers._placeto.features import DEVICE, ProblemFeatures, SimulatedPlacements
from roost.placers._placeto.settings import PlacetoSettings
from roost.placers._shared.groups import groups_of
from roost.placers._shared.orders import list_scheduled
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator

Judge = Callable[[Sequence[Placement]], Sequence[Trial]]
# Log-probabilities [episodes, devices] for the current group.
Choose = Callable[["PolicyInput"], Array]
# Columns of an outcome; from the third on, the peak memory of each device.
MISSING_BYTES = 0
STEP_TIME = 1
_PEAKS = slice(2, None)
# Attributes that a state keeps.
_KEPT = (
    *GroupEpisodes.ARRAYS,
    "outcome",
    "previous",
    "group_start",
    "group_finish",
    "starts",
    "first_outcome",
    "best",
    "best_outcome",
)
_MOST_REMEMBERED = 50_000  # placements
_WORST = 1e3  # balanced steps: the step time of a trial that has none


@dataclass(frozen=True, eq=False)
class PolicyInput:
    """The input of the policy for one step of all episodes."""

    group: int
    step: int  # of the episode
    placements: SimulatedPlacements
    done: Array  # [episodes, groups] bool: the group had its turn
    devices: Array  # [features, episodes, devices]


@dataclass(frozen=True, eq=False)
class EpisodeStep:
    """One step of all episodes."""

    input: PolicyInput
    device: Array  # [episodes] drawn for the current group
    log_prob: Array  # [episodes] of that device
    trial: int  # number of the trial that judges the step


@dataclass(frozen=True, eq=False)
class EpisodeTrial:
    """The rewards of one trial of all episodes."""

    reward: Array  # [episodes] cost before less cost after
    lasting: Array  # [episodes] the same, but 0 if the moves were undone
    num_new: int  # placements that were never tried before


class PlacetoEpisodes(GroupEpisodes):
    """The episodes on one problem."""

    def __init__(self, problem: Problem, settings: PlacetoSettings, judge: Judge) -> None:
        self.problem = problem
        self.settings = settings
        self.judge = judge
        self.units = groups_of(problem, settings.most_groups)
        self.features = ProblemFeatures(self.units)
        self.num_steps = self.units.num_units  # of an episode
        self.baseline = StepBaseline(self.num_steps, settings.baseline_rounds)
        self.remembered: dict[bytes, Array] = {}  # outcomes of the placements that were tried
        # Start and finish of the groups in the placements that were looked at last.
        self.group_times: dict[bytes, tuple[Array, Array]] = {}
        self.num_greedy = 0  # episodes that take the likeliest device
        self.maps = self.features.maps.to(torch_device(settings.train_on))

    @property
    def turn(self) -> int:
        """The step that all episodes are at."""
        return int(self.step[0])

    @property
    def has_tried_all(self) -> bool:
        """True if every placement is remembered."""
        choices: list[int] = self.units.allowed.sum(axis=1).tolist()
        return max(1, len(self.remembered)) >= prod(choices)

    @property
    def best_step_time(self) -> float:
        return float(self.best_outcome[STEP_TIME])

    @property
    def mean_step_time(self) -> float:
        """The mean of the episodes now."""
        return float(self.outcome[:, STEP_TIME].mean())

    def begin(self, starts: Array, rng: np.random.Generator) -> None:
        """Try the first placements [episodes, groups], and begin the first episodes."""
        self.starts = self.device = starts.astype(np.int32)
        self.outcome = self.first_outcome = self._outcomes(self.starts, {})[0]
        self.best, self.best_outcome = _best(self.starts, self.outcome)
        self.restart(rng)

    def restart(self, rng: np.random.Generator) -> None:
        """Begin the next episodes where the settings say."""
        match self.settings.restart:
            case "best":
                self.restart_at_best(self.settings, rng)
            case "start":
                self._restart_at(self.starts, self.first_outcome, rng)
            case _:
                self._restart_at(self.device, self.outcome, rng)

    def restart_at_best(self, settings: PlacetoSettings, rng: np.random.Generator) -> None:
        """Begin episodes at the best placement so far, by other settings."""
        self.settings = settings
        self.group_times = {}
        copies = settings.episodes, 1
        outcome = np.tile(self.best_outcome, copies)
        self._restart_at(np.tile(self.best, copies), outcome, rng)

    def _restart_at(self, device: Array, outcome: Array, rng: np.random.Generator) -> None:
        self.tried, self.outcome = device, outcome  # what was tried last in each episode
        visits = self.features.visits
        self.previous = device[:, visits[-1]].copy()
        if self.settings.order == "random":
            visits = rng.permutation(self.num_steps)
        elif self.settings.order == "reversed":
            visits = visits[::-1]
        self.make_room(*device.shape)
        self.start(slice(None), device, visits)
        self._simulate_groups()

    def run(
        self, choose: Choose, rng: np.random.Generator, num_steps: int
    ) -> tuple[list[EpisodeStep], list[EpisodeTrial]]:
        """Take so many steps, or as many as are left of the episode."""
        steps: list[EpisodeStep] = []
        trials: list[EpisodeTrial] = []
        rows = np.arange(len(self.device))
        trial_every = self.settings.trial_every or self.num_steps
        for _ in range(min(num_steps, self.num_steps - self.turn)):
            if self.turn % self.settings.times_every == 0:
                self._simulate_groups()
            policy_input = self._policy_input()
            log_probs = choose(policy_input)
            device = _drawn(log_probs, rng)
            device[: self.num_greedy] = log_probs[: self.num_greedy].argmax(axis=1)
            self.put(rows, device)
            self.previous = device
            steps.append(EpisodeStep(policy_input, device, log_probs[rows, device], len(trials)))
            if self.turn == self.num_steps or self.turn % trial_every == 0:
                trials.append(self._try())
        return steps, trials

    def _policy_input(self) -> PolicyInput:
        group = int(self.current[0])
        peaks = self.outcome[:, _PEAKS]
        device = self.device.copy()
        placements = SimulatedPlacements(device, self.group_start, self.group_finish, peaks)
        shape = len(DEVICE), len(device), self.features.num_devices
        devices = np.zeros(shape, dtype=np.float32)
        if self.settings.device_features:
            devices = self.features.devices(placements, group, self.previous)
        return PolicyInput(group, self.turn, placements, self.visited.copy(), devices)

    def _try(self) -> EpisodeTrial:
        """Try the placements, and undo the moves that made them worse if the settings say so."""
        known = {p.tobytes(): o for p, o in zip(self.tried, self.outcome, strict=True)}
        outcome, num_new = self._outcomes(self.device, known)
        reward = self.cost(self.outcome) - self.cost(outcome)
        undone = _worse(outcome, self.outcome) & self.settings.undo
        self.device[undone] = self.tried[undone]
        self.outcome = np.where(undone[:, None], self.outcome, outcome)
        self.tried = self.device.copy()
        best, best_outcome = _best(self.tried, self.outcome)
        if _worse(self.best_outcome[None], best_outcome[None])[0]:
            self.best = best
            self.best_outcome = best_outcome
        return EpisodeTrial(reward, np.where(undone, 0.0, reward), num_new)

    def cost(self, outcome: Array) -> Array:
        """[episodes] penalised step time, in balanced steps or as a logarithm; always finite."""
        missing = outcome[:, MISSING_BYTES] / max(1.0, float(self.features.memory.mean()))
        penalty = 1.0 + self.settings.penalty * missing
        cost = outcome[:, STEP_TIME] / self.features.balanced * penalty
        if self.settings.relative:
            return np.asarray(np.log(np.maximum(cost, 1e-9)))
        return np.asarray(np.minimum(cost, 1e6))

    def placement(self, group_device: Array) -> Placement:
        """The placement of groups on these devices; each parameter is fetched once a step."""
        device = self.units.devices(group_device)
        if self.settings.judged == "listed":
            placement = list_scheduled(self.problem, device)
        else:
            placement = self.problem.placement(device, self.settings.judged)
        return replace(placement, prefetch_bytes=fetched_once(self.problem, device))

    def _outcomes(self, group_device: Array, known: dict[bytes, Array]) -> tuple[Array, int]:
        """Outcomes [episodes, 2 + devices] of placements [episodes, groups], and the number of
        trials that they took. Known and remembered ones take none."""
        if not self.settings.remember:
            return self._judged(group_device), len(group_device)
        keys = [row.tobytes() for row in group_device]
        known |= {key: self.remembered[key] for key in keys if key in self.remembered}
        new = {key: row for key, row in zip(keys, group_device, strict=True) if key not in known}
        if new:
            judged = dict(zip(new, self._judged(new.values()), strict=True))
            known |= judged
            self.remembered |= judged
        while len(self.remembered) > _MOST_REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        return np.stack([known[key] for key in keys]), len(new)

    def _judged(self, group_devices: Iterable[Array]) -> Array:
        worst = _WORST * self.features.balanced
        outcomes = []
        for trial in self.judge([self.placement(row) for row in group_devices]):
            sound = np.isfinite(trial.step_time) and trial.step_time >= 0
            step_time = min(trial.step_time, worst) if sound else worst
            outcomes.append([float(trial.missing_bytes), step_time, *trial.peak_memory])
        return np.array(outcomes)

    def _simulate_groups(self) -> None:
        """Find out when the groups of each placement run."""
        times: dict[bytes, tuple[Array, Array]] = {}
        keys = [row.tobytes() for row in self.device]
        for key, row in zip(keys, self.device, strict=True):
            if key not in times:
                before = self.group_times.get(key)
                times[key] = before or group_times(self.units, self.placement(row))
        self.group_times = times
        self.group_start = np.stack([times[key][0] for key in keys])
        self.group_finish = np.stack([times[key][1] for key in keys])

    def state(self) -> dict[str, Array]:
        """The state of the episodes between two updates."""
        tried = [np.frombuffer(key, self.device.dtype) for key in self.remembered]
        outcomes = np.array(list(self.remembered.values()))
        return {
            **{name: np.array(getattr(self, name)) for name in _KEPT},
            "baseline": self.baseline.past.copy(),
            "tried": np.array(tried, np.uint8).reshape(-1, self.num_steps),
            "tried_outcome": outcomes.reshape(len(tried), self.outcome.shape[1]),
        }

    def resume(self, state: Mapping[str, Array], settings: PlacetoSettings) -> None:
        """Go on from a state."""
        self.settings = settings
        for name, array in self._checked(state).items():
            setattr(self, name, array)
        self.tried = self.device.copy()
        past = np.asarray(state.get("baseline"))
        if past.dtype.kind != "f" or past.shape != self.baseline.past.shape or np.isinf(past).any():
            raise wrong_array(state, "baseline", "is missing, infinite, or of another shape")
        self.baseline.past = np.array(past)
        tried = taken_devices(state, "tried", self.units.allowed, (None,))
        outcomes = np.array(
            taken(state, "tried_outcome", (len(tried), 2 + self.features.num_devices), least=0)
        )
        self.remembered = {p.tobytes(): o for p, o in zip(tried, outcomes, strict=True)}

    def _checked(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """The kept arrays of a saved state. Raises InputError if they are not of these episodes."""
        num_groups, num_devices = self.num_steps, self.features.num_devices
        allowed = self.units.allowed
        devices = taken_devices(state, "device", allowed, (None,))
        rows = len(devices)
        grid, outcome = (rows, num_groups), (rows, 2 + num_devices)
        starts = taken_devices(state, "starts", allowed, (None,))
        kept = {
            "device": devices,
            "visited": taken(state, "visited", grid, "b"),
            "visits": taken(state, "visits", grid, "i", least=0, most=num_groups - 1),
            "num_groups": taken(state, "num_groups", (rows,), "i", least=1, most=num_groups),
            "step": taken(state, "step", (rows,), "i", least=-1),
            "length": taken(state, "length", (rows,), "i", least=0),
            "outcome": taken(state, "outcome", outcome, least=0),
            "previous": taken(state, "previous", (rows,), "i", least=0, most=num_devices - 1),
            "group_start": taken(state, "group_start", grid, least=0),
            "group_finish": taken(state, "group_finish", grid, least=0),
            "starts": starts,
            "first_outcome": taken(state, "first_outcome", (len(starts), 2 + num_devices), least=0),
            "best": taken_devices(state, "best", allowed),
            "best_outcome": taken(state, "best_outcome", outcome[1:], least=0),
        }
        assert set(kept) == set(_KEPT)
        return {name: np.array(array) for name, array in kept.items()}


def group_times(units: Units, placement: Placement) -> tuple[Array, Array]:  # [groups] seconds
    """The start of the first op of each group, and the finish of its last forward op (of its last
    op, if it has no forward op that takes time)."""
    start, finish = Simulator.of(units.problem).op_times(placement)
    last_forward = np.zeros(units.num_units)
    last = np.zeros(units.num_units)
    forward = units.problem.graph.phase == FORWARD
    np.maximum.at(last_forward, units.unit[forward], finish[forward])
    np.maximum.at(last, units.unit, finish)
    return start[units.leader], np.where(last_forward > 0, last_forward, last)


def anywhere(units: Units, rng: np.random.Generator, count: int) -> Array:  # [count, groups]
    """Random devices: each device that a group allows is equally likely."""
    choices = units.allowed.sum(axis=1)
    pick = rng.random((count, units.num_units)) * choices
    return _first_beyond(np.cumsum(units.allowed, axis=1), pick.astype(np.int64))


def _drawn(log_probs: Array, rng: np.random.Generator) -> Array:  # [episodes]
    """A device for each episode, drawn with its probability."""
    share = np.cumsum(np.exp(log_probs.astype(np.float64)), axis=1)
    return _first_beyond(share, rng.random(len(log_probs)) * share[:, -1])


def _first_beyond(total: Array, pick: Array) -> Array:
    """The first device at which the running total exceeds the pick."""
    return np.asarray((total > pick[..., None]).argmax(axis=-1))


def _worse(new: Array, old: Array) -> Array:  # [episodes] bool
    """More bytes are missing; or as many, and the step is longer."""
    more = new[:, MISSING_BYTES] - old[:, MISSING_BYTES]
    longer = new[:, STEP_TIME] > old[:, STEP_TIME]
    return np.asarray((more > 0) | ((more == 0) & longer))


def _best(group_device: Array, outcome: Array) -> tuple[Array, Array]:
    row = np.lexsort((outcome[:, STEP_TIME], outcome[:, MISSING_BYTES]))[0]
    return group_device[row].copy(), outcome[row].copy()
