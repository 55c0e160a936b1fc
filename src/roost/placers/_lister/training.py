"""Training of `lister` on many problems, to be read from top to bottom.

1. Rules are learned by evolution; they need no network.
2. Good placements of each problem are found, as targets.
3. The network imitates the targets.
4. It learns by trial and error.
5. Out of many random samplers, those are chosen that are best together on all problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.errors import InputError
from roost.learners.optimizer_state import adam_arrays, load_weight_arrays, restore_adam
from roost.learners.recorded import advantages, clipped, imitate
from roost.placers._lister.compiled_network import SamplingSettings
from roost.placers._lister.imitation_targets import Targets, targets_of
from roost.placers._lister.network_scheduler import (
    ORDERS,
    NetworkScheduler,
    NetworkSchedules,
    network_schedulers,
)
from roost.placers._lister.rule_training import RuleTraining, best_together
from roost.placers._lister.sampling import (
    cost_of,
    decisions_of,
    exploring,
    sampled_by,
    sampling_settings,
    some_choices,
)
from roost.placers._lister.training_plan import PARTS, SHARES, TrainingSettings, plan_of
from roost.placers._lister.weights import (
    NUM_FEATURES,
    PORTFOLIO,
    check_samplers,
    network_of,
    network_only,
    new_tensors,
    random_samplers,
)
from roost.policies.lister_network import ListerPolicy

OnNote = Callable[[Mapping[str, float]], object]
_ONCE = np.ones(1)  # one attempt with all of the memory


class ListerTraining:
    """Rules, network and samplers while they learn."""

    def __init__(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        most_units: int,
        settings: TrainingSettings,
        on_note: OnNote,
    ) -> None:
        self.rng = np.random.default_rng([seed, 17])
        self.settings = settings
        self.on_note = on_note
        self.schedulers = [
            scheduler
            for problem in problems
            for scheduler in network_schedulers(problem, most_units)
        ]
        tensors = new_tensors(self.rng)
        self.tensors = network_only(tensors)
        self.samplers = tensors["ways"]
        self.rules = RuleTraining(problems, self.rng)
        self.policy = ListerPolicy(self.tensors)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.imitation_rate)
        self.targets: list[Targets] = []  # of each scheduler
        self.plan = plan_of(self.schedulers, seconds, settings)
        self.stage, self.done = 0, 0  # number of the part, and pieces of it that are done
        # Pieces of work in each part.
        self.counts = {**self.plan, "targets": len(self.schedulers), "ways": 1}

    def run(self, save: Callable[[Mapping[str, Array]], object]) -> None:
        """Go on to the end; the state is offered to `save` after each piece of work."""
        parts = [
            self._evolve_rules,
            self._find_targets,
            self._imitate,
            self._learn_by_trial,
            self._choose_samplers,
        ]
        while self.stage < len(parts):
            if self.done < self.counts[PARTS[self.stage]]:
                parts[self.stage]()
                self.done += 1
                save(self.state())
            else:
                self.stage = self.stage + 1
                self.done = 0

    def _evolve_rules(self) -> None:
        """The first rules under one order, or a generation of rules."""
        self._note(**self.rules.step(self.done))

    def _find_targets(self) -> None:
        """Targets of one problem under one order."""
        scheduler = self.schedulers[self.done]
        batches = self.plan["targets"]
        targets = targets_of(scheduler, self.rng, self.settings.starts, batches)
        self.targets.append(targets)
        self._note(targets=float(len(targets.unit_device)))

    def _imitate(self) -> None:
        """Updates on schedules that follow targets of some problems, one update for each."""
        self._set_rate(self.settings.imitation_rate, self.plan["imitation"])
        able = [number for number, each in enumerate(self.targets) if len(each.unit_device)]
        if not able:
            return
        count = min(self.settings.graphs, len(able))
        chosen = self.rng.choice(able, count, replace=False).tolist()
        losses = [self._imitate_one(self.schedulers[n], self.targets[n]) for n in chosen]
        self.tensors = self.policy.arrays()
        self._note(loss=float(np.mean(losses)))

    def _imitate_one(self, scheduler: NetworkScheduler, targets: Targets) -> float:
        rng = self.rng
        count = self.settings.schedules
        target = targets.unit_device[rng.integers(0, len(targets.unit_device), count)]
        settings = sampling_settings(
            rng, scheduler, np.zeros((count, NUM_FEATURES)), np.ones(count)
        )
        # The network decides about some units itself, and learns to go on from there.
        astray = rng.random(target.shape) < rng.uniform(0.02, 0.25, (count, 1))
        astray &= rng.random((count, 1)) < self.settings.disturbed
        settings = settings._replace(given=np.where(astray, -1, target).astype(np.int32))
        network = network_of(self.tensors, scheduler)
        schedules = scheduler.schedule(network, settings, _ONCE, record=True)
        picked = some_choices(schedules, self.settings.kept, rng)
        if not picked.any():
            return 0.0
        decisions = decisions_of(scheduler, schedules, settings, picked)
        label = target[np.nonzero(picked)[0], schedules.record.unit[picked]]
        is_possible = decisions.mask.numpy()[np.arange(len(label)), label]
        label = np.where(is_possible, label, -1).astype(np.int64)
        return imitate(self.policy, self.optimizer, decisions, torch.from_numpy(label))

    def _learn_by_trial(self) -> None:
        """Updates on schedules of some problems, by their costs."""
        settings = self.settings
        self._set_rate(settings.trial_rate, self.plan["trial"])
        count = min(settings.graphs, len(self.schedulers))
        chosen = self.rng.choice(len(self.schedulers), count, replace=False).tolist()
        batches = []
        over_target = []
        for number in chosen:
            scheduler = self.schedulers[number]
            sampling = exploring(self.rng, scheduler, settings.schedules)
            network = network_of(self.tensors, scheduler)
            schedules = scheduler.schedule(network, sampling, _ONCE, record=True)
            cost = cost_of(schedules, scheduler.problem)
            batch = batch_of(scheduler, schedules, sampling, cost, self.rng, settings)
            batches += [batch] if batch is not None else []
            targets = self.targets[number]
            if targets.unit_device.size:
                over_target.append(float(np.exp(cost.min())) / max(targets.step_time, 1e-12))
        figures: dict[str, float] = {}
        for _ in range(settings.steps if batches else 0):
            figures = clipped(self.policy, self.optimizer, batches, settings.entropy)
        self.tensors = self.policy.arrays()
        of_target = {"best_over_target": float(np.median(over_target))} if over_target else {}
        self._note(**of_target, **figures)

    def _choose_samplers(self) -> None:
        """Out of many random samplers, those that are best together."""
        samplers = random_samplers(self.rng, self.plan["ways"], len(ORDERS))
        if len(samplers) <= PORTFOLIO:
            return
        pairs = len(self.schedulers) // len(ORDERS)
        cost = np.zeros((len(samplers), pairs))
        for order in range(len(ORDERS)):
            rows = np.flatnonzero(samplers[:, -1] == order)
            for pair in range(pairs):
                scheduler = self.schedulers[pair * len(ORDERS) + order]
                settings = sampled_by(self.rng, scheduler, samplers[rows])
                schedules = scheduler.schedule(network_of(self.tensors, scheduler), settings)
                cost[rows, pair] = cost_of(schedules, scheduler.problem)
        self.samplers = samplers[best_together(cost, PORTFOLIO)]
        self._note(ways=float(len(samplers)))

    def _set_rate(self, first: float, count: int) -> None:
        """Set a learning rate that falls to a twentieth, as half a cosine."""
        share = self.done / max(1, count)
        for group in self.optimizer.param_groups:
            group["lr"] = first * (0.05 + 0.95 * 0.5 * (1.0 + np.cos(np.pi * share)))

    def _note(self, **figures: float) -> None:
        """Tell the figures of a piece of work, and the share of all work that is done with it."""
        part = PARTS[self.stage]
        count = self.counts[part]
        before = sum(SHARES[each] for each in PARTS[: self.stage])
        position = {
            "stage": float(self.stage),
            "done": self.done + 1.0,
            "of": float(count),
            "progress": before + SHARES[part] * (self.done + 1) / count,
        }
        self.on_note({**position, **figures})

    def state(self) -> dict[str, Array]:
        """Everything that the rest of the training depends on."""
        weights = {f"weights.{name}": value for name, value in self.policy.arrays().items()}
        targets = {f"target.{n}": each.unit_device for n, each in enumerate(self.targets)}
        return {
            **weights,
            **adam_arrays(self.optimizer),
            **targets,
            "best": np.array([each.step_time for each in self.targets]),
            "ways": self.samplers,
            "rng": _packed(self.rng),
            **self.rules.state(),
            "at": np.array([self.stage, self.done, *self.plan.values()]),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to where a state was saved; raises InputError if it is of another training.

        The compiled loops check nothing, so everything that they read is checked here.
        """
        stage, done, *plan = taken(state, "at", (2 + len(self.plan),), "iu").tolist()
        if plan != list(self.plan.values()) or not 0 <= stage <= len(plan) or done < 0:
            raise InputError("tensor 'at' is of a training with another plan")
        shapes = {name: value.shape for name, value in self.tensors.items()}
        weights = {name: taken(state, f"weights.{name}", shape) for name, shape in shapes.items()}
        load_weight_arrays(self.policy, weights)
        self.tensors = self.policy.arrays()
        restore_adam(self.optimizer, state)
        self.rules.restore(state)
        self.samplers = taken(state, "ways", self.samplers.shape)
        check_samplers(self.samplers)
        self.rng.bit_generator.state = _unpacked(taken(state, "rng", (6,), "u"))
        self.stage = stage
        self.done = done
        finding = PARTS.index("targets")
        num_targets = len(self.schedulers) if stage > finding else done if stage == finding else 0
        self._restore_targets(state, num_targets)

    def _restore_targets(self, state: Mapping[str, Array], count: int) -> None:
        if count > len(self.schedulers):
            raise InputError("tensor 'at' is of a training with more problems")
        best = np.asarray(state.get("best", np.zeros(0)))
        targets: list[Array] = []
        for number, scheduler in enumerate(self.schedulers[:count]):
            name = f"target.{number}"
            target = taken(state, name, (None, scheduler.units.num_units), "iu")
            if ((target < 0) | (target >= scheduler.problem.cluster.num_devices)).any():
                raise InputError(f"tensor {name!r} names a device that is not there")
            targets.append(target)
        known = [number for number, target in enumerate(targets) if len(target)]
        if best.shape != (count,) or best.dtype.kind != "f" or not np.isfinite(best[known]).all():
            raise InputError(
                f"tensor 'best' is not {count} numbers, finite where there are targets"
            )
        self.targets = [Targets(*pair) for pair in zip(targets, best.tolist(), strict=True)]


def batch_of(
    scheduler: NetworkScheduler,
    schedules: NetworkSchedules,
    sampling: SamplingSettings,
    cost: Array,
    rng: np.random.Generator,
    settings: TrainingSettings,
) -> Any:
    """Decisions, log-probabilities and advantages for `clipped`; None if all costs are equal."""
    advantage = advantages(cost, settings.best_of)
    picked = some_choices(schedules, settings.kept, rng)
    if not picked.any() or not advantage.any():
        return None
    decisions = decisions_of(scheduler, schedules, sampling, picked)
    before = schedules.record.log_prob[picked].astype(np.float32)
    gain = advantage[np.nonzero(picked)[0]].astype(np.float32)
    return decisions, torch.from_numpy(before), torch.from_numpy(gain)


def _packed(rng: np.random.Generator) -> Array:
    """The state of a generator as numbers."""
    state: Any = rng.bit_generator.state
    words = [state["state"]["state"], state["state"]["inc"]]
    halves = [half for word in words for half in (word & (2**64 - 1), word >> 64)]
    return np.array([*halves, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def _unpacked(words: Array) -> dict[str, Any]:
    low, high, inc_low, inc_high, has, left = (int(word) for word in words)
    state = {"state": low | high << 64, "inc": inc_low | inc_high << 64}
    return {"bit_generator": "PCG64", "state": state, "has_uint32": has, "uinteger": left}
