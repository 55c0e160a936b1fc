"""What the placers that learn on one problem share: choices for groups in, what they cost out,
within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import isinf
from typing import Any

import numpy as np

from roost.bounds.alike import alike
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.learners.rewards import penalised
from roost.placers import Evaluate
from roost.placers._annealing.downhill import go_downhill
from roost.placers._annealing.population import Heat, Population
from roost.placers._shared.groups import groups_of
from roost.placers._shared.orders import all_orders, list_schedule
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole
from roost.placers._starts.starting_points import starting_points

LISTED = "listed"  # an order made for the devices of each placement, by list scheduling
HEURISTICS = ("single", "expert", "etf", "rules")
HEURISTIC_LOGIT = 5.0  # at first one group in fifty goes elsewhere, on four devices
# Rank or listed: the first placements are tried in both, and those after them in what was better.
BEST = "best"
_FIRST = 64  # placements that are tried in both

_ORDERS = (BEST, LISTED, "program", "rank", "fifo")
_MOST_REFINE = 0.99  # something must be left to learn with
RATES = (1e-12, 1e3)  # of learning: below, nothing changes; above, weights soon are no numbers
FAR = 1e6  # a logit, or a weight, beyond which nothing is gained and roundings spoil all

# Batches in a row with next to nothing new, and with nothing: begin again, or end.
_STALE, _EXHAUSTED = 10, 20
_FEW = 40  # trials: too few to learn from or to refine with


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What a batch of choices costs."""

    seconds: Array  # [batch] step times, penalised where they do not fit
    failed: Array  # [batch] bool
    num_new: int  # trials; the others were known

    def figures(self) -> dict[str, float]:
        return {
            "mean": float(self.seconds.mean()),
            "failed": float(self.failed.mean()),
            "new": self.num_new / len(self.seconds),
        }


def check_lesson(settings: Any, least_batch: int = 2) -> None:
    """Raise InputError for settings of a lesson that cannot be."""
    check_whole(settings, 1, "num_groups")
    check_choice(settings, "order", _ORDERS)
    check_whole(settings, least_batch, "batch")
    check_number(settings, *RATES, "rate")
    check_number(settings, 0.0, _MOST_REFINE, "refine")


class Lesson:
    """One problem to learn on, and the part of the budget that goes into learning; the rest is for
    refining."""

    def __init__(
        self, problem: Problem, evaluate: Evaluate, num_groups: int, order: str, refine: float
    ) -> None:
        self.problem, self.evaluate = problem, evaluate
        few = evaluate.trials_left < 4 * _FIRST  # then there is nothing to spare for trying both
        self.orders = (order,) if order != BEST else (LISTED,) if few else ("rank", LISTED)
        # In how many placements, and logarithms of seconds in each order, added up.
        self._compared = np.zeros(3)
        self.groups = groups_of(problem, num_groups)
        self.worst = float(
            np.where(np.isfinite(problem.op_time), problem.op_time, 0.0).sum(axis=0).min()
        )
        self.memory = float(max(1, problem.cluster.memory.min()))
        self.known: dict[bytes, tuple[float, bool]] = {}
        # Batches in a row that were known for the most part, and altogether.
        self.num_stale = self.num_known = 0
        self._trials, self._seconds = evaluate.trials_left, evaluate.seconds_left
        self._refine = refine
        self._heuristic: Array | None = None

    @property
    def left(self) -> float:
        """The share of what is there for learning that is left: above 0 as long as it goes on."""
        if self.evaluate.best is None:
            return 1.0  # however late it is: one placement is a better answer than none
        shares = [
            now / whole if whole > 0 else 0.0
            for now, whole in (
                (self.evaluate.trials_left, self._trials),
                (self.evaluate.seconds_left, self._seconds),
            )
            if not isinf(whole)
        ]
        left = min(shares, default=1.0)
        if self.num_known >= _EXHAUSTED:
            return 0.0
        return max(0.0, (left - self._refine) / max(1e-9, 1 - self._refine))

    def is_stale(self) -> bool:
        """Whether the policy does little more than repeat itself; if so, that is forgotten."""
        stale = self.num_stale >= _STALE
        if stale:
            self.num_stale = 0
        return stale

    @property
    def twins(self) -> list[int]:
        """For each device the one that can be exchanged with it and comes before it, or -1."""
        found = [-1] * self.problem.cluster.num_devices
        for members in alike(self.problem):
            for one, other in pairwise(members):
                found[other] = one
        return found

    def heuristic(self) -> Array:  # [groups]
        """The device of each group in the best of what placers find that learn nothing; these are
        the first trials.

        A group that they split goes where most of its work is.
        """
        if self._heuristic is not None:
            return self._heuristic
        found = starting_points(self.problem, self.evaluate.named("group_rules"), HEURISTICS)[0]
        work = np.where(np.isfinite(self.problem.op_time), self.problem.op_time, np.inf).min(axis=1)
        votes = np.zeros(self.groups.allowed.shape)
        np.add.at(
            votes,
            (self.groups.unit, np.asarray(found.device)),
            work + 1e-9 * max(1e-30, float(work.sum())),
        )
        self._heuristic = named_by_use(
            self.problem, np.where(self.groups.allowed, votes, -1.0).argmax(axis=1)
        )
        return self._heuristic

    def outcomes(self, choices: Array) -> Outcomes:
        """What devices of groups [batch, groups] cost; those that were tried before are not tried
        again."""
        keys = [
            blake2b(row.tobytes(), digest_size=16).digest()
            for row in np.ascontiguousarray(choices, dtype=np.int8)
        ]
        new = {key: row for row, key in enumerate(keys) if key not in self.known}
        most = int(min(len(new), self.evaluate.trials_left // len(self.orders)))
        rows = list(new.items())[:most]
        seconds, failed = self._tried([choices[row] for _, row in rows])
        for number, (key, _) in enumerate(rows):
            best = int(seconds[:, number].argmin())
            self.known[key] = (float(seconds[best, number]), bool(failed[best, number]))
        if most < len(new):
            raise BudgetSpent("not all of the batch were evaluated")
        self.num_stale = self.num_stale + 1 if len(new) * 10 < len(keys) else 0
        self.num_known = 0 if new else self.num_known + 1
        found = [self.known[key] for key in keys]
        return Outcomes(
            np.array([seconds for seconds, _ in found]),
            np.array([bad for _, bad in found]),
            len(new),
        )

    def _tried(self, choices: list[Array]) -> tuple[Array, Array]:
        """Seconds, and whether they failed, of each order and each choice."""
        placements = [self.placement(choice, order) for order in self.orders for choice in choices]
        trials = self.evaluate(placements)
        excess = np.array([trial.missing_bytes for trial in trials]) / self.memory
        found = penalised(np.array([trial.step_time for trial in trials]), excess, self.worst)
        seconds = found.reshape(len(self.orders), len(choices))
        failed = np.array([not trial.feasible for trial in trials], dtype=bool).reshape(
            seconds.shape
        )
        if len(self.orders) > 1:
            self._compared += [len(choices), *np.log(np.maximum(seconds, 1e-30)).sum(axis=1)]
            self._settle()
        return seconds, failed

    def _settle(self) -> None:
        """Stay with one order, once enough was tried in both."""
        if len(self.orders) > 1 and self._compared[0] >= _FIRST:
            self.orders = (self.orders[int(self._compared[1:].argmin())],)

    def placement(self, choice: Array, order: str) -> Placement:
        """The placement for devices of groups [groups]; parameters are sent once to each device
        that needs them."""
        device = self.groups.devices(choice)
        window = fetched_once(self.problem, device)
        priority = list_schedule(self.problem, device).priority if order == LISTED else None
        order = "priority" if order == LISTED else order
        names, graph = self.problem.cluster.device_names, self.problem.graph.digest
        return Placement(device, order, priority, window if window.any() else 0, names, graph)

    def refine(self) -> None:
        """Spend the rest of the budget on the order of the best placement, and on moving it op by
        op.

        Where trials are few that is downhill, and annealing where downhill has come to its end.
        """
        best = self.evaluate.best
        if best is None or self.evaluate.trials_left < _FEW:
            return
        device, window = np.asarray(best.placement.device), best.placement.prefetch_bytes
        others = all_orders(self.problem, device)
        self.evaluate(
            [Placement(p.device, p.order, p.priority, window, p.devices, p.graph) for p in others]
        )
        best = self.evaluate.best or best
        if not isinf(self.evaluate.simulations_left):
            go_downhill(self.problem, self.evaluate.named("descent"), best.placement)
            best = self.evaluate.best or best
        if self.evaluate.trials_left >= _FEW:
            Population(self.problem, self.evaluate.named("annealing"), Heat(members=1), None).run(
                [best.placement]
            )

    def finish(self) -> Placement:
        """The best placement, after refining where there is something left for it."""
        if self._refine > 0 or self.left > 0:
            with suppress(BudgetSpent):
                self.refine()
        best = self.evaluate.best
        assert best is not None
        return best.placement

    def state(self) -> dict[str, Array]:
        """What is known by now."""
        keys = np.frombuffer(b"".join(self.known), dtype=np.uint64).reshape(-1, 2)
        values = np.array([*self.known.values()], dtype=np.float64).reshape(-1, 2)
        stale = np.array([self.num_stale, self.num_known])
        return {"known": keys, "found": values, "stale": stale, "compared": self._compared}

    def take_up(self, state: Mapping[str, Array]) -> None:
        rows = [row.tobytes() for row in state["known"]]
        self.known = {
            key: (float(s), bool(bad)) for key, (s, bad) in zip(rows, state["found"], strict=True)
        }
        self.num_stale, self.num_known = (int(number) for number in state["stale"])
        self._compared = np.array(state["compared"])
        self._settle()


def named_by_use(problem: Problem, choice: Array) -> Array:  # [groups]
    """The same choice with devices that can be exchanged named in the order of their first use."""
    name: dict[int, int] = {}
    for members in alike(problem):
        used = [device for device in dict.fromkeys(choice.tolist()) if device in members]
        unused = [device for device in members if device not in used]
        name |= dict(zip([*used, *unused], members, strict=True))
    return np.array([name.get(device, device) for device in choice.tolist()], dtype=np.int64)
