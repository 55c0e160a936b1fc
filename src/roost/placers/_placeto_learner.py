"""How Placeto's policy sees, chooses and learns; needs torch, so only a placer that runs imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf

import numpy as np
import torch

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.learners.episodes import Update, normalised, returns
from roost.placers._episodes import Choose, Episodes, Judge, Record, Rules, Seen, anywhere
from roost.placers._sight import DEVICE, FIXED, MOVING, Moment
from roost.placers.placeto import Settings
from roost.policies.gnn import GraphPolicy, Shape

_PART = 200_000  # groups, times devices, times rows, that are embedded at a time when the network is run at every step


_COUNTS = ("num_rounds", "num_trials", "repeats")  # what a learner counts
_FEW_NEW = 0.25  # share of the placements of a round that are new trials, below which a policy repeats itself
_MOST_REPEATS = 3  # rounds in which it may do so
_GREEDY_ROUNDS = 2  # of a policy that was trained before: one of its episodes always takes the likeliest device
_NOTHING_NEW, _FORGET = 0.05, 0.1  # share of new trials below which it ends, and how fast old rounds are forgotten


class Learner:
    """A policy, its optimizer, and how far they are."""

    def __init__(self, settings: Settings, seed: int, trials: float) -> None:
        self.first, self.seed = settings, seed
        self.horizon = settings.horizon if isinf(trials) else max(1, int(trials))
        self.num_rounds = self.num_trials = 0
        self.fresh = 1.0  # share of new trials in the last rounds
        self.knows = False  # whether its weights were learned before
        self._new_phase(0)

    def _new_phase(self, phase: int) -> None:
        """A policy that knows nothing."""
        self.phase, self.repeats = phase, 0
        settings = self.first
        if phase % 2 and settings.refine is not None:
            settings = settings.refine
        self.settings = settings
        features = len(MOVING) if settings.embed == "step" else len(FIXED)
        parts = (settings.width, settings.hidden, settings.rounds, settings.messages, settings.pools)
        self.policy = GraphPolicy(Shape(features, len(DEVICE), *parts), (self.seed + phase) % 2**62)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.rate[0])
        self.update = Update(settings.passes, settings.clip, settings.most_norm)

    @property
    def rules(self) -> Rules:
        s = self.settings
        return Rules(
            s.episodes, s.order, s.judged, s.trial_every, s.undo, s.remember, s.relative, s.restart, s.penalty,
            s.times_every,
        )  # fmt: skip

    def episodes(self, problem: Problem, judge: Judge) -> Episodes:
        """Episodes on a problem, by the rules of the settings."""
        return Episodes(problem, self.rules, self.settings.most_groups, self.settings.baseline_rounds, judge)

    @property
    def is_done(self) -> bool:
        """Whether there is hardly anything new to try, also for policies that begin anew."""
        return self.fresh < _NOTHING_NEW

    def renew(self, episodes: Episodes) -> None:
        """Where the policy tries nothing new any more: go on from the best placement with one that knows nothing."""
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
        episodes.num_greedy = int(self.knows and self.num_rounds < _GREEDY_ROUNDS)
        with torch.no_grad():
            record = episodes.run(self._chooser(episodes), rng, self.settings.steps or episodes.num_steps)
        self.num_rounds += 1
        self.num_trials += record.new_trials
        share = record.new_trials / (len(record.reward) * len(record.chosen[0]))
        self.fresh += _FORGET * (share - self.fresh)
        self.repeats = self.repeats + 1 if share < _FEW_NEW else 0
        told = self._learn(episodes, record)
        reward = np.stack(record.reward)
        return {**told, "reward": float(reward.mean()), "best": float(episodes.best_outcome[1])}

    def state(self) -> dict[str, Array]:
        """All that it takes to go on from here."""
        found = {f"weight.{name}": array for name, array in self.tensors.items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"adam.{number}.{name}": tensor.numpy().copy() for name, tensor in moments.items()}
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
        self.load({n.removeprefix("weight."): a for n, a in state.items() if n.startswith("weight.")})
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, array in state.items():
            if name.startswith("adam."):
                _, number, kind = name.split(".")
                moments.setdefault(int(number), {})[kind] = torch.from_numpy(np.array(array))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its weights, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.policy.named_parameters()}

    @property
    def tensors(self) -> dict[str, Array]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.policy.named_parameters()}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take weights by name."""
        self.policy.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})

    def _rng(self, number: int) -> np.random.Generator:
        """Chance of one round: a search that goes on from a journal needs to know nothing of the rounds before."""
        return np.random.default_rng([self.seed, number + 1])

    def _share(self, ends: tuple[float, float]) -> float:
        done = min(1.0, self.num_trials / self.horizon)
        return ends[0] + done * (ends[1] - ends[0])

    def _chooser(self, episodes: Episodes) -> Choose:
        policy = self.policy
        if self.settings.embed == "update":
            contexts = self._fixed_contexts(episodes)

            def choose(seen: Seen) -> Array:
                allowed = torch.from_numpy(np.broadcast_to(seen.allowed, seen.devices.shape[:2]).copy())
                return policy.log_probs(contexts[seen.at][None], torch.from_numpy(seen.devices), allowed).numpy()

            return choose

        def choose_anew(seen: Seen) -> Array:
            return self._anew(episodes, [seen], np.zeros(len(seen.devices), int), np.arange(len(seen.devices))).numpy()

        return choose_anew

    def _fixed_contexts(self, episodes: Episodes) -> torch.Tensor:
        """[groups, 1, context] from what does not change."""
        sight = episodes.sight
        embedded = self.policy.embed(sight.maps, torch.from_numpy(sight.fixed)[:, None])
        return self.policy.contexts(sight.maps, embedded)

    def _anew(self, episodes: Episodes, seen: list[Seen], step: Array, row: Array) -> torch.Tensor:
        """Log-probabilities [rows, devices] for some episodes at some steps, from features of the whole placement."""
        sight = episodes.sight
        at = np.array([seen[s].at for s in step])
        moment = Moment(
            *(
                np.stack([getattr(seen[s].moment, name)[r] for s, r in zip(step, row, strict=True)])
                for name in ("place", "start", "finish", "peak")
            )
        )
        done = np.stack([seen[s].done for s in step])
        features = torch.from_numpy(sight.moving(moment, at, done))  # [groups, rows, devices, features]
        groups, count, devices, _ = features.shape
        embedded = self.policy.embed(sight.maps, features.reshape(groups, count * devices, -1))
        each = torch.from_numpy(np.repeat(at, devices))
        context = self.policy.contexts_at(sight.maps, embedded, each).view(count, devices, -1)
        allowed = torch.from_numpy(np.stack([seen[s].allowed for s in step]))
        of_devices = torch.from_numpy(np.stack([seen[s].devices[r] for s, r in zip(step, row, strict=True)]))
        return self.policy.log_probs(context, of_devices, allowed)

    def _learn(self, episodes: Episodes, record: Record) -> dict[str, float]:
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self._share(s.rate)
        advantage = self._advantage(episodes, record)
        step, row = np.divmod(np.arange(advantage.size), advantage.shape[1])
        if s.embed == "step":
            size = max(1, _PART // (episodes.num_steps * episodes.sight.num_devices))
            parts = np.split(np.arange(advantage.size), range(size, advantage.size, size))

            def score(rows: Array) -> torch.Tensor:
                return self._anew(episodes, record.seen, step[rows], row[rows])
        else:
            parts = [np.arange(advantage.size)]
            at = np.array([seen.at for seen in record.seen])[step]
            of_devices = torch.from_numpy(np.concatenate([seen.devices for seen in record.seen]))
            allowed = torch.from_numpy(episodes.units.allowed[at])

            def score(rows: Array) -> torch.Tensor:
                contexts = self._fixed_contexts(episodes)[torch.from_numpy(at[rows])]
                return self.policy.log_probs(contexts, of_devices[rows], allowed[rows])

        chosen, logs = np.concatenate(record.chosen), np.concatenate(record.logs)
        return self.update.apply(self.optimizer, score, parts, chosen, logs, advantage.ravel(), self._share(s.entropy))

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
