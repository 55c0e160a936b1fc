"""How `lister` learns on many problems: its rules by evolution, its network by imitation and then
trial and error.

Before that its rules are learned, which need no network. At the end, the ways in which schedules
are drawn from the network are chosen together: each is the one that adds most to the best of those
before it, over all the problems. The amount of work is fixed before the first step, so a course
that was stopped and goes on, or is given again, ends with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.errors import InputError
from roost.learners.optimizer_state import adam_arrays, load_weight_arrays, restore_adam
from roost.learners.recorded import advantages, clipped, imitate
from roost.placers._lister.imitation_targets import targets_of
from roost.placers._lister.problem_view import Framed
from roost.placers._lister.rollouts import (
    NUM_SEEN,
    ORDERS,
    PORTFOLIO,
    checked_ways,
    choices_in,
    cost_of,
    decisions_of,
    drawn_ways,
    framed,
    free_rolls,
    masks_of,
    network_of,
    new_tensors,
    rolls_of,
)
from roost.placers._lister.rule_training import (
    CHILDREN,
    FIRST,
    NEW,
    TRIED,
    RuleCourse,
    best_together,
)
from roost.placers._lister.visiting_orders import ORDERS as LIST_ORDERS
from roost.policies.lister_network import ListerPolicy

# About what the parts of a course cost, in seconds: for planning, and never looked at again.
_PER_ROW = 1.2e-6  # of a device in a decision, forward and backward
_PER_ROLL = 2.5e-6  # of a unit in a schedule
_PER_BATCH = 60e-9  # of an op in a batch of annealing
# Of an op and of a unit in a schedule by a rule, in an order made for its devices.
_PER_RULE = 120e-9, 200e-9
_PER_CHOICE = 0.05  # of those rules that are best together
_SHARES = {"rules": 0.8, "targets": 0.03, "imitation": 0.03, "trial": 0.1, "ways": 0.04}
PARTS = tuple(_SHARES)

Note = Callable[[Mapping[str, float]], object]


@dataclass(frozen=True)
class Rates:
    """How it learns."""

    imitation_rate: float = 2e-3
    trial_rate: float = 2e-3
    entropy: float = 0.005
    graphs: int = 8  # problems in an update
    rolls: int = 12  # schedules of each
    kept: int = 160  # decisions of a schedule that are learned from, drawn anew each time
    best_of: int = 4
    starts: int = 4  # annealed for targets, under each order
    disturbed: float = 0.6  # share of the schedules that are led astray, and told the way back
    steps: int = 3  # on the same schedules


class Course:
    """Weights and all that belongs to them while they learn."""

    def __init__(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        most_units: int,
        rates: Rates,
        note: Note,
    ) -> None:
        self.rng, self.rates, self.note = np.random.default_rng([seed, 17]), rates, note
        self.frames: list[Framed] = [
            each for problem in problems for each in framed(problem, most_units, ORDERS)
        ]
        self.tensors = new_tensors(self.rng)
        self.ways = self.tensors.pop("ways")
        self.tensors.pop("rules")
        self.rules = RuleCourse(problems, self.rng)
        self.policy = ListerPolicy(self.tensors)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=rates.imitation_rate)
        self.targets: list[Array] = []
        self.best: list[float] = []  # step time of the best target of each frame
        self.stage, self.done = 0, 0
        self.plan = self._plan(seconds)
        self.counts = {**self.plan, "targets": len(self.frames), "ways": 1}  # pieces of work

    def _plan(self, seconds: float) -> dict[str, int]:
        """How often each part is done."""
        count = max(1, len(self.frames))
        ops = sum(frame.units.problem.graph.num_ops for frame in self.frames) / count
        num_units = sum(frame.units.num_units for frame in self.frames) / count
        rows = sum(frame.units.problem.cluster.num_devices for frame in self.frames) / count
        decisions = self.rates.graphs * self.rates.rolls * min(self.rates.kept, num_units)
        per_op, per_unit = _PER_RULE
        rule = count / len(ORDERS) * (ops * per_op + num_units * per_unit)
        each = {
            "rules": _PER_CHOICE + TRIED * (CHILDREN + NEW) * rule,
            "targets": count * self.rates.starts * ops * _PER_BATCH,
            "imitation": decisions * rows * _PER_ROW
            + self.rates.graphs * self.rates.rolls * num_units * _PER_ROLL,
            "ways": count * num_units * _PER_ROLL,
        }
        each["trial"] = each["imitation"] * 1.5
        found = {part: int(max(1, share * seconds / each[part])) for part, share in _SHARES.items()}
        first = len(LIST_ORDERS) * FIRST / (TRIED * (CHILDREN + NEW))  # generations' worth of work
        found["rules"] = len(LIST_ORDERS) + int(max(1, found["rules"] - first))
        found["targets"] = int(np.clip(found["targets"], 20, 4000))
        found["ways"] = int(np.clip(found["ways"], PORTFOLIO, 1024))
        return found

    def run(self, save: Callable[[Mapping[str, Array]], object]) -> None:
        """Go on to the end; the state is offered after each piece of work."""
        parts = [self._vary_rules, self._find_targets, self._imitate, self._try, self._choose_ways]
        while self.stage < len(parts):
            work = parts[self.stage]
            if self.done >= self.counts[PARTS[self.stage]]:
                self.stage, self.done = self.stage + 1, 0
                continue
            work()
            self.done += 1
            save(self.state())

    def _tell(self, **figures: float) -> None:
        """What there is to say of a piece of work, and how much of all work is done with it."""
        part = PARTS[self.stage]
        count, before = self.counts[part], sum(_SHARES[each] for each in PARTS[: self.stage])
        progress = before + _SHARES[part] * (self.done + 1) / count
        where = {
            "stage": float(self.stage),
            "done": self.done + 1.0,
            "of": float(count),
            "progress": progress,
        }
        self.note({**where, **figures})

    def _vary_rules(self) -> None:
        self._tell(**self.rules.step(self.done))

    def _find_targets(self) -> None:
        frame = self.frames[self.done]
        found, best = targets_of(frame, self.rng, self.rates.starts, self.plan["targets"])
        self.targets.append(found)
        self.best.append(best)
        self._tell(targets=float(len(found)))

    def _rate(self, first: float, count: int) -> None:
        """Set a rate that falls to a twentieth, as half a cosine."""
        share = self.done / max(1, count)
        for group in self.optimizer.param_groups:
            group["lr"] = first * (0.05 + 0.95 * 0.5 * (1.0 + np.cos(np.pi * share)))

    def _imitate(self) -> None:
        count = self.plan["imitation"]
        self._rate(self.rates.imitation_rate, count)
        able = [number for number, found in enumerate(self.targets) if len(found)]
        if not able:
            return
        losses = []
        for number in self.rng.choice(
            able, min(self.rates.graphs, len(able)), replace=False
        ).tolist():
            losses.append(self._imitate_one(self.frames[number], self.targets[number]))
        self.tensors = self.policy.arrays()
        self._tell(loss=float(np.mean(losses)))

    def _imitate_one(self, frame: Framed, targets: Array) -> float:
        rng, count = self.rng, self.rates.rolls
        clean = targets[rng.integers(0, len(targets), count)]
        rolls = rolls_of(rng, frame, np.zeros((count, NUM_SEEN)), np.ones(count))
        astray = rng.random(clean.shape) < rng.uniform(0.02, 0.25, (count, 1))
        astray &= rng.random((count, 1)) < self.rates.disturbed
        rolls = rolls._replace(given=np.where(astray, -1, clean).astype(np.int32))
        rolled = frame.roll(network_of(self.tensors, frame), rolls, np.ones(1), record=True)
        picked = self._some(choices_in(rolled))
        if not picked.any():
            return 0.0
        rows = decisions_of(frame, rolled, rolls, picked)
        label = clean[np.nonzero(picked)[0], rolled.record.unit[picked]]
        masks = masks_of(rolled.record.mask[picked], frame.units.problem.cluster.num_devices)
        label = np.where(masks[np.arange(len(label)), label], label, -1)
        return imitate(self.policy, self.optimizer, rows, torch.from_numpy(label.astype(np.int64)))

    def _some(self, several: Array) -> Array:
        """Some of the decisions in which there was a choice."""
        share = self.rates.kept * len(several) / max(1, int(several.sum()))
        return np.asarray(several & (self.rng.random(several.shape) < share))

    def _try(self) -> None:
        count, rates = self.plan["trial"], self.rates
        self._rate(rates.trial_rate, count)
        chosen = self.rng.choice(
            len(self.frames), min(rates.graphs, len(self.frames)), replace=False
        ).tolist()
        tried = [try_out(self.frames[n], self.tensors, self.rng, rates) for n in chosen]
        batches = [batch for batch, _ in tried if batch is not None]
        known = [
            (self.best[n], cost.min())
            for n, (_, cost) in zip(chosen, tried, strict=True)
            if self.targets[n].size
        ]
        figures: dict[str, float] = {}
        for _ in range(rates.steps if batches else 0):
            figures = clipped(self.policy, self.optimizer, batches, rates.entropy)
        self.tensors = self.policy.arrays()
        ratio = [float(np.exp(least)) / max(best, 1e-12) for best, least in known]
        of_target = {"best_over_target": float(np.median(ratio))} if ratio else {}
        self._tell(**of_target, **figures)

    def _choose_ways(self) -> None:
        """Out of many random ways to draw schedules, those that are best together."""
        ways = drawn_ways(self.rng, self.plan["ways"], len(ORDERS))
        if len(ways) <= PORTFOLIO:
            return
        pairs = len(self.frames) // len(ORDERS)
        cost = np.zeros((len(ways), pairs))
        for order in range(len(ORDERS)):
            rows = np.flatnonzero(ways[:, -1] == order)
            for pair in range(pairs):
                frame = self.frames[pair * len(ORDERS) + order]
                rolls = rolls_of(self.rng, frame, ways[rows, :NUM_SEEN], ways[rows, NUM_SEEN])
                cost[rows, pair] = cost_of(
                    frame.roll(network_of(self.tensors, frame), rolls), frame.units.problem
                )
        chosen = best_together(cost, PORTFOLIO)
        self.ways = ways[chosen]
        self._tell(ways=float(len(ways)))

    def state(self) -> dict[str, Array]:
        """Everything that the rest of the course depends on."""
        found = {f"weights.{name}": value for name, value in self.policy.arrays().items()}
        found |= adam_arrays(self.optimizer)
        for number, target in enumerate(self.targets):
            found[f"target.{number}"] = target
        found |= {
            "best": np.array(self.best),
            "ways": self.ways,
            "rng": _packed(self.rng),
            **self.rules.state(),
        }
        found["at"] = np.array([self.stage, self.done, *self.plan.values()])
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to where a state was saved; raises InputError where it is not one of this course.

        The compiled loops check nothing: what they read is looked at here.
        """
        at = taken(state, "at", (2 + len(self.plan),), "iu").tolist()
        if at[2:] != list(self.plan.values()) or not 0 <= at[0] <= len(self.plan) or at[1] < 0:
            raise InputError("tensor 'at' is of a course with another plan")
        shapes = {name: value.shape for name, value in self.tensors.items()}
        weights = {name: taken(state, f"weights.{name}", shape) for name, shape in shapes.items()}
        load_weight_arrays(self.policy, weights)
        self.tensors = self.policy.arrays()
        restore_adam(self.optimizer, state)
        self.rules.restore(state)
        self.ways = checked_ways(taken(state, "ways", self.ways.shape))
        self.rng.bit_generator.state = _unpacked(taken(state, "rng", (6,), "u"))
        self.stage, self.done = at[0], at[1]
        self._restore_targets(
            state, 0 if self.stage == 0 else self.done if self.stage == 1 else len(self.frames)
        )

    def _restore_targets(self, state: Mapping[str, Array], count: int) -> None:
        """Those of the first so many frames; where nothing fitted there are none, and the best is
        infinite."""
        if count > len(self.frames):
            raise InputError("tensor 'at' is of a course with more problems")
        self.targets, best = [], np.asarray(state.get("best", np.zeros(0)))
        for number, frame in enumerate(self.frames[:count]):
            name = f"target.{number}"
            found = taken(state, name, (None, frame.units.num_units), "iu")
            if ((found < 0) | (found >= frame.units.problem.cluster.num_devices)).any():
                raise InputError(f"tensor {name!r} names a device that is not there")
            self.targets.append(found)
        known = [number for number, found in enumerate(self.targets) if len(found)]
        if best.shape != (count,) or best.dtype.kind != "f" or not np.isfinite(best[known]).all():
            raise InputError(
                f"tensor 'best' is not {count} numbers, finite where there are targets"
            )
        self.best = best.tolist()


def try_out(
    frame: Framed, tensors: Mapping[str, Array], rng: np.random.Generator, rates: Rates
) -> tuple[Any, Array]:
    """Schedules of one problem: what `clipped` takes, or None where none was better than another;
    and their costs."""
    rolls = free_rolls(rng, frame, rates.rolls)
    rolled = frame.roll(network_of(tensors, frame), rolls, np.ones(1), record=True)
    cost = cost_of(rolled, frame.units.problem)
    return batch_of(frame, rolled, rolls, cost, rng, rates), cost


def batch_of(
    frame: Framed, rolled: Any, rolls: Any, cost: Array, rng: np.random.Generator, rates: Rates
) -> Any:
    """What `clipped` takes of these schedules, or None where there is nothing to learn."""
    gain = advantages(cost, rates.best_of)
    several = choices_in(rolled)
    share = rates.kept * len(several) / max(1, int(several.sum()))
    picked = several & (rng.random(several.shape) < share)
    if not picked.any() or not gain.any():
        return None
    rows = decisions_of(frame, rolled, rolls, picked)
    before = torch.from_numpy(rolled.record.log_prob[picked].astype(np.float32))
    return rows, before, torch.from_numpy(gain[np.nonzero(picked)[0]].astype(np.float32))


def _packed(rng: np.random.Generator) -> Array:
    """The state of a generator as numbers."""
    state: Any = rng.bit_generator.state
    words = [state["state"]["state"], state["state"]["inc"]]
    found = [part for word in words for part in (word & (2**64 - 1), word >> 64)]
    return np.array([*found, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def _unpacked(words: Array) -> dict[str, Any]:
    low, high, inc_low, inc_high, has, left = (int(word) for word in words)
    state = {"state": low | high << 64, "inc": inc_low | inc_high << 64}
    return {"bit_generator": "PCG64", "state": state, "has_uint32": has, "uinteger": left}
