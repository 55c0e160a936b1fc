"""One problem as a choice of a device for each group, with a budget for learning.

`seq2seq`, `spotlight` and `post` draw choices. `GroupChoices` makes placements of them, evaluates
each once, remembers the costs, and keeps a part of the budget for refining the best placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import isinf
from typing import Any

import numpy as np

from roost.bounds.alike import alike
from roost.core.arrays import Array, taken
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent
from roost.learners.rewards import penalised
from roost.placers import Evaluate
from roost.placers._learning.refinement import refine_best
from roost.placers._shared.groups import groups_of
from roost.placers._shared.orders import list_schedule
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole
from roost.placers._starts.starting_points import starting_points
from roost.policies.features import speed_prior

LISTED = "listed"  # an order that list scheduling makes for the devices of each placement
BEST = "best"  # rank or listed: the first placements are tried in both, the rest in the better one
_ORDERS = (BEST, LISTED, "program", "rank", "fifo")
_IN_BOTH_ORDERS = 64  # placements

HEURISTICS = ("single", "expert", "etf", "rules")
HEURISTIC_LOGIT = 5.0  # on four devices, one group in fifty first goes elsewhere

RATES = (1e-12, 1e3)  # learning rates: lower ones change nothing, higher ones break the weights
FAR = 1e6  # largest logit or weight: a larger one only adds rounding errors
_MOST_REFINE = 0.99  # some of the budget must be left for learning

# Batches in a row. After `_STALE` batches with few new choices, a new policy begins. After
# `_EXHAUSTED` batches without any new choice, learning ends.
_STALE = 10
_EXHAUSTED = 20
_BATCH_PER_NEW = 10  # with fewer new choices than one in so many, a batch counts as stale


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """Costs of a batch of choices."""

    seconds: Array  # [batch] step times, with a penalty where a placement does not fit
    failed: Array  # [batch] bool
    num_new: int  # choices that no batch had before
    best: float  # seconds of the best trial so far

    def figures(self) -> dict[str, float]:
        """Figures of the batch, for the notes of a search."""
        return {
            "mean": float(self.seconds.mean()),
            "failed": float(self.failed.mean()),
            "new": self.num_new / len(self.seconds),
            "best": self.best,
        }


def check_learning(settings: Any, least_batch: int = 2) -> None:
    """Raise InputError if a setting that the learned placers share has a wrong value."""
    check_whole(settings, 1, "num_groups")
    check_choice(settings, "order", _ORDERS)
    check_whole(settings, least_batch, "batch")
    check_number(settings, *RATES, "rate")
    check_number(settings, 0.0, _MOST_REFINE, "refine")


@contextmanager
def until_spent(evaluate: Evaluate) -> Iterator[None]:
    """Leave the block without an error when the budget is spent and there is a placement."""
    try:
        yield
    except BudgetSpent:
        if evaluate.best is None:
            raise


class GroupChoices:
    """Choices for the groups of one problem, their costs, and the budget for learning."""

    def __init__(
        self, problem: Problem, evaluate: Evaluate, num_groups: int, order: str, refine: float
    ) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.refine = refine
        self.groups = groups_of(problem, num_groups)
        all_ops = problem.op_time.sum(axis=0)  # [devices]
        self.worst = float(all_ops.min())  # seconds of all ops on the fastest device
        self._memory = float(max(1, problem.cluster.memory.min()))
        self._first_trials = evaluate.trials_left
        self._first_seconds = evaluate.seconds_left

        self.orders: tuple[str, ...] = (order,)
        if order == BEST:
            is_small = evaluate.trials_left < 4 * _IN_BOTH_ORDERS
            self.orders = (LISTED,) if is_small else ("rank", LISTED)
        self._num_compared = 0  # choices that were tried in both orders
        self._log_seconds = np.zeros(2)  # [orders] sums over these choices

        self.known: dict[bytes, tuple[float, float]] = {}  # seconds and failure (1), by choice
        self._num_stale = self._num_exhausted = 0  # batches in a row

    @property
    def budget_left(self) -> float:
        """Fraction of the learning budget that is left, between 0 and 1."""
        if self.evaluate.best is None:
            return 1.0  # even a late search needs one placement
        if self._num_exhausted >= _EXHAUSTED:
            return 0.0
        trials = self.evaluate.trials_left
        seconds = self.evaluate.seconds_left
        left = 1.0
        for now, first in ((trials, self._first_trials), (seconds, self._first_seconds)):
            if not isinf(first):
                left = min(left, now / first if first > 0 else 0.0)
        return max(0.0, (left - self.refine) / max(1e-9, 1 - self.refine))

    @property
    def is_stale(self) -> bool:
        """True when the policy has repeated itself for so long that a new one must begin."""
        return self._num_stale > 0 and self._num_stale % _STALE == 0

    @cached_property
    def heuristic(self) -> Array:  # [groups]
        """Device of each group in the best placement of placers that do not learn.

        The placements of these placers are the first trials. A group that they split goes where
        most of its work is.
        """
        evaluate = self.evaluate.named("group_rules")
        best = starting_points(self.problem, evaluate, HEURISTICS)[0]
        work = self.problem.op_time.min(axis=1)
        votes = np.zeros(self.groups.allowed.shape)
        least = 1e-9 * max(1e-30, float(work.sum()))
        np.add.at(votes, (self.groups.unit, np.asarray(best.device)), work + least)
        choice = np.where(self.groups.allowed, votes, -1.0).argmax(axis=1)
        return named_by_use(self.problem, choice)

    def prior(self, settings: Any, dtype: type[np.floating]) -> Array:  # [groups, devices]
        """Logits to begin with, by the settings `speed_prior`, `heuristic_prior` and
        `heuristic_first`."""
        speed = speed_prior(self.problem, self.groups.unit).astype(dtype)
        logits: Array = settings.speed_prior * speed
        if settings.heuristic_prior > 0 or settings.heuristic_first:
            logits[np.arange(len(logits)), self.heuristic] += settings.heuristic_prior
        return logits

    def try_batch(self, choices: Array) -> BatchCosts:
        """Costs of choices [batch, groups]; only choices that no batch had before are trials."""
        rows = np.ascontiguousarray(choices, dtype=np.int8)
        keys = [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
        new = {key: row for row, key in enumerate(keys) if key not in self.known}
        affordable = int(min(len(new), self.evaluate.trials_left // len(self.orders)))
        tried = list(new)[:affordable]
        costs = self._try([choices[new[key]] for key in tried])
        self.known.update(zip(tried, costs, strict=True))
        if affordable < len(new):
            raise BudgetSpent("the budget ended within a batch")
        self._num_stale = self._num_stale + 1 if _BATCH_PER_NEW * len(new) < len(keys) else 0
        self._num_exhausted = 0 if new else self._num_exhausted + 1
        seconds, failed = np.ascontiguousarray(np.transpose([self.known[key] for key in keys]))
        assert self.evaluate.best is not None
        return BatchCosts(seconds, failed > 0, len(new), self.evaluate.best.step_time)

    def _try(self, choices: list[Array]) -> list[tuple[float, float]]:
        """Seconds and failure of each choice, in its best order."""
        orders = self.orders
        placements = [self._placement(choice, order) for order in orders for choice in choices]
        trials = self.evaluate(placements)
        excess = np.array([trial.missing_bytes for trial in trials]) / self._memory
        step_time = np.array([trial.step_time for trial in trials])
        seconds = penalised(step_time, excess, self.worst).reshape(len(orders), len(choices))
        if len(orders) > 1:
            self._num_compared += len(choices)
            self._log_seconds += np.log(np.maximum(seconds, 1e-30)).sum(axis=1)
            self._choose_order()
        costs = []
        for number, order in enumerate(seconds.argmin(axis=0)):
            trial = trials[order * len(choices) + number]
            costs.append((float(seconds[order, number]), float(not trial.feasible)))
        return costs

    def _choose_order(self) -> None:
        """Keep the better order once enough choices were tried in both."""
        if len(self.orders) > 1 and self._num_compared >= _IN_BOTH_ORDERS:
            self.orders = (self.orders[int(self._log_seconds.argmin())],)

    def _placement(self, choice: Array, order: str) -> Placement:
        """The placement of a choice [groups]; each device fetches a parameter once a step."""
        device = self.groups.devices(choice)
        window = fetched_once(self.problem, device)
        prefetch_bytes = window if window.any() else 0
        if order != LISTED:
            return self.problem.placement(device, order, None, prefetch_bytes)
        priority = list_schedule(self.problem, device).priority
        return self.problem.placement(device, "priority", priority, prefetch_bytes)

    def refined(self) -> Placement:
        """The best placement, after the rest of the budget was spent on refining it."""
        if self.refine > 0 or self.budget_left > 0:
            with suppress(BudgetSpent):
                refine_best(self.problem, self.evaluate)
        assert self.evaluate.best is not None
        return self.evaluate.best.placement

    def state(self) -> dict[str, Array]:
        """Arrays from which `restore` continues."""
        return {
            "known": np.frombuffer(b"".join(self.known), dtype=np.uint64).reshape(-1, 2),
            "found": np.array([*self.known.values()], dtype=np.float64).reshape(-1, 2),
            "stale": np.array([self._num_stale, self._num_exhausted]),
            "compared": np.array([self._num_compared, *self._log_seconds]),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from `state()` of an earlier search."""
        known = taken(state, "known", (None, 2), "u")
        costs = taken(state, "found", (len(known), 2), least=0)
        self.known = {
            row.tobytes(): (seconds, failed)
            for row, (seconds, failed) in zip(known, costs.tolist(), strict=True)
        }
        self._num_stale, self._num_exhausted = taken(state, "stale", (2,), "i", least=0).tolist()
        num_compared, *log_seconds = taken(state, "compared", (1 + len(self._log_seconds),))
        self._num_compared = int(num_compared)
        self._log_seconds = np.array(log_seconds)
        self._choose_order()


def named_by_use(problem: Problem, choice: Array) -> Array:  # [groups]
    """The same choice, with exchangeable devices renamed in the order of their first use."""
    name: dict[int, int] = {}
    for members in alike(problem):
        used = [device for device in dict.fromkeys(choice.tolist()) if device in members]
        unused = [device for device in members if device not in used]
        name |= dict(zip([*used, *unused], members, strict=True))
    return np.array([name.get(device, device) for device in choice.tolist()], dtype=np.int64)
