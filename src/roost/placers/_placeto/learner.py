"""How Placeto's policy sees, chooses and learns; needs torch, so only a placer that runs imports
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isinf

import numpy as np
import torch

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.learners.episodes import Tried, Update, normalised, returns
from roost.learners.hardware import torch_device
from roost.learners.optimizer_state import state_arrays, take_up
from roost.placers._placeto.episodes import Choose, Episodes, Judge, Record, Rules, Seen, anywhere
from roost.placers._placeto.features import DEVICE, FIXED, MOVING, Moment
from roost.placers.placeto import Settings
from roost.policies.gnn import GraphMaps, GraphPolicy, Shape

# Groups, times devices, times rows, embedded at a time where the network is run at every step: what
# fits into a cache.
_PART = 20_000
_COUNTS = ("num_rounds", "num_trials", "repeats")  # what a learner counts
# Share of the placements of a round that are new trials, below which a policy repeats itself.
_FEW_NEW = 0.25
_MOST_REPEATS = 3  # rounds in which it may do so
_SAMPLED = 16  # episodes side by side of a policy that was trained before
# Share of new trials below which it ends, and how fast old rounds are forgotten.
_NOTHING_NEW, _FORGET = 0.05, 0.1


class Learner:
    """A policy, its optimizer, and how far they are."""

    def __init__(self, settings: Settings, seed: int, trials: float) -> None:
        self.first, self.seed = settings, seed
        self.device = torch_device(settings.train_on)
        self.horizon = settings.horizon if isinf(trials) else max(1, int(trials))
        self.num_rounds = self.num_trials = 0
        self.fresh = 1.0  # share of new trials in the last rounds
        self._new_phase(0)

    def _new_phase(self, phase: int) -> None:
        """A policy that knows nothing."""
        self.phase, self.repeats = phase, 0
        settings = self.first
        if phase % 2 and settings.refine is not None:
            settings = settings.refine
        self.settings = settings
        features = len(MOVING) if settings.embed == "step" else len(FIXED)
        parts = (
            settings.width,
            settings.hidden,
            settings.rounds,
            settings.messages,
            settings.pools,
        )
        shape = Shape(features, len(DEVICE), *parts)
        self.policy = GraphPolicy(shape, (self.seed + phase) % 2**62).to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.rate[0])
        self.update = Update(settings.passes, settings.clip, settings.most_norm, settings.most_kl)

    @property
    def rules(self) -> Rules:
        s = self.settings
        return Rules(
            s.episodes, s.order, s.judged, s.trial_every, s.undo, s.remember, s.relative, s.restart,
            s.penalty,
            s.times_every, s.device_features,
        )  # fmt: skip

    def episodes(self, problem: Problem, judge: Judge) -> Episodes:
        """Episodes on a problem, by the rules of the settings."""
        return Episodes(
            problem, self.rules, self.settings.most_groups, self.settings.baseline_rounds, judge
        )

    @property
    def is_done(self) -> bool:
        """Whether there is hardly anything new to try, also for policies that begin anew."""
        return self.fresh < _NOTHING_NEW

    def renew(self, episodes: Episodes) -> None:
        """Where the policy tries nothing new any more: go on from the best placement with one that
        knows nothing."""
        if self.repeats < _MOST_REPEATS:
            return
        self._new_phase(self.phase + 1)
        episodes.renew(self.rules, self._rng(self.num_rounds))

    def begin(self, episodes: Episodes, starts: Sequence[Placement] = ()) -> None:
        """The first placements: random ones, and in place of the first of them those given."""
        rng = self._rng(-1)
        place = anywhere(episodes.units, rng, self.settings.episodes)
        for row, placement in zip(range(len(place)), starts, strict=False):
            place[row] = episodes.units.unit_devices(placement.device)
        episodes.begin(place, rng)
        self.num_trials += len(place)

    def round(self, episodes: Episodes) -> dict[str, float]:
        """Some steps and an update; what there is to say of them."""
        rng = self._rng(self.num_rounds)
        if episodes.step >= episodes.num_steps:
            episodes.restart(rng)
        record = self._run(episodes, rng, self.settings.steps or episodes.num_steps)
        self.num_rounds += 1
        self.num_trials += record.new_trials
        share = record.new_trials / (len(record.reward) * len(record.chosen[0]))
        self.fresh += _FORGET * (share - self.fresh)
        self.repeats = self.repeats + 1 if share < _FEW_NEW else 0
        told = self._learn(episodes, record)
        mean, best = episodes.outcome[:, 1].mean(), episodes.best_outcome[1]
        return {
            **told,
            "reward": float(np.mean(record.reward)),
            "mean": float(mean),
            "best": float(best),
        }

    def sample(self, episodes: Episodes, count: int) -> None:
        """So many episodes of a policy that was trained before, from a random placement, without
        learning.

        A few at a time, which go on from the best so far; one of them always takes the likeliest
        device.
        """
        rng = self._rng(-1)
        episodes.begin(anywhere(episodes.units, rng, 1), rng)
        episodes.num_greedy = 1
        for first in range(0, count, _SAMPLED):
            episodes.renew(replace(self.rules, episodes=min(_SAMPLED, count - first)), rng)
            self.num_trials += self._run(episodes, rng, episodes.num_steps).new_trials
        episodes.num_greedy = 0
        episodes.renew(self.rules, rng)

    def _run(self, episodes: Episodes, rng: np.random.Generator, num_steps: int) -> Record:
        with torch.no_grad():
            return episodes.run(self._chooser(episodes), rng, num_steps)

    def state(self) -> dict[str, Array]:
        """All that it takes to go on from here."""
        found = state_arrays(self.policy, self.optimizer)
        numbers = [self.seed, self.phase, *(getattr(self, name) for name in _COUNTS)]
        found["fresh"] = np.array(self.fresh)
        found["learned"] = np.array(numbers, dtype=np.int64)
        return found

    def resume(self, state: Mapping[str, Array]) -> None:
        self.seed, phase, *numbers = (int(n) for n in state["learned"])
        self._new_phase(phase)
        self.fresh = float(state["fresh"])
        for count, value in zip(_COUNTS, numbers, strict=True):
            setattr(self, count, value)
        take_up(self.policy, self.optimizer, state)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its weights, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.policy.named_parameters()}

    @property
    def tensors(self) -> dict[str, Array]:
        return {
            name: tensor.detach().cpu().numpy().copy()
            for name, tensor in self.policy.named_parameters()
        }

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take weights by name."""
        self.policy.load_state_dict(
            {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        )

    def _rng(self, number: int) -> np.random.Generator:
        """Chance of one round: a search that goes on from a journal needs to know nothing of the
        rounds before."""
        return np.random.default_rng([self.seed, number + 1])

    def _share(self, ends: tuple[float, float]) -> float:
        done = min(1.0, self.num_trials / self.horizon)
        return ends[0] + done * (ends[1] - ends[0])

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _maps(self, episodes: Episodes) -> GraphMaps:
        """Of the graph, on the device of the policy."""
        if episodes.maps is None:
            episodes.maps = episodes.sight.maps.to(self.device)
        return episodes.maps

    def _chooser(self, episodes: Episodes) -> Choose:
        if self.settings.embed == "step":
            return lambda seen: self._anew(episodes, [seen])[0].cpu().numpy()
        contexts, policy = self._contexts(episodes), self.policy
        allowed = self._tensor(episodes.units.allowed)

        def choose(seen: Seen) -> Array:
            logs = policy.log_probs(
                contexts[:, seen.at, None, None], self._tensor(seen.devices), allowed[seen.at]
            )
            return logs.cpu().numpy()

        return choose

    def _contexts(self, episodes: Episodes) -> torch.Tensor:
        """[hidden, groups] from what does not change."""
        maps = self._maps(episodes)
        embedded = self.policy.embed(maps, self._tensor(episodes.sight.fixed)[:, None])
        return self.policy.contexts(maps, embedded)[:, 0]

    def _anew(self, episodes: Episodes, seen: Sequence[Seen]) -> torch.Tensor:
        """Log-probabilities [steps, episodes, devices], from features of the whole placement at
        each step."""
        maps, sight = self._maps(episodes), episodes.sight
        steps, rows = len(seen), len(seen[0].moment.place)
        at = np.repeat([each.at for each in seen], rows)
        done = np.repeat([each.done for each in seen], rows, axis=0)
        features = sight.moving(Moment.joined([each.moment for each in seen]), at, done)
        embedded = self.policy.embed(maps, self._tensor(features).flatten(1, 2))
        context = self.policy.contexts_at(
            maps, embedded, self._tensor(np.repeat(at, sight.num_devices))
        )
        of_devices = self._tensor(np.stack([each.devices for each in seen], axis=1))
        allowed = self._tensor(np.stack([each.allowed for each in seen]))[:, None].expand(
            of_devices.shape[1:]
        )
        return self.policy.log_probs(
            context.view(-1, steps, rows, sight.num_devices), of_devices, allowed
        )

    def _learn(self, episodes: Episodes, record: Record) -> dict[str, float]:
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self._share(s.rate)
        advantage = self._advantage(episodes, record)
        steps, rows = advantage.shape
        if s.embed == "step":
            size = max(1, _PART // (episodes.num_steps * episodes.sight.num_devices * rows))
            parts = [slice(first, first + size) for first in range(0, steps, size)]

            def score(part: slice) -> torch.Tensor:
                return self._anew(episodes, record.seen[part])
        else:
            parts = [slice(0, steps)]
            at = self._tensor(np.array([seen.at for seen in record.seen]))
            of_devices = self._tensor(np.stack([seen.devices for seen in record.seen], axis=1))
            allowed = self._tensor(episodes.units.allowed)[at, None].expand(of_devices.shape[1:])

            def score(part: slice) -> torch.Tensor:
                return self.policy.log_probs(
                    self._contexts(episodes)[:, at, None, None], of_devices, allowed
                )

        tried = Tried.of(np.stack(record.chosen), np.stack(record.logs), advantage).to(self.device)
        return self.update.apply(self.optimizer, score, parts, tried, self._share(s.entropy))

    def _advantage(self, episodes: Episodes, record: Record) -> Array:  # [steps, episodes]
        s = self.settings
        reward, kept = np.stack(record.reward), np.stack(record.kept)
        steps = np.array([seen.step for seen in record.seen])
        if s.rewards == "terminal":
            # All the reward comes with the last step: minus the value that the episode ends with.
            found = np.broadcast_to(-episodes.value(episodes.outcome), reward.shape)
        else:
            # What was tried counts at once, what comes of it only where it was not undone.
            found = reward + returns(kept, s.discount) - kept
        found = found[record.trial]
        advantage = found - episodes.baseline.at(steps)[:, None]
        episodes.baseline.add(steps, found)
        return normalised(advantage) if s.normalise else advantage
