"""The search of `lister` for good rules on one problem: learned, drawn and varied ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.placers import Evaluate, Round
from roost.placers._lister.portable_rules import COLUMN, COLUMNS, drawn_rules, varied_rules
from roost.placers._lister.rule_scheduler import Anchors, RuleScheduler
from roost.placers._lister.sampling import cost_of
from roost.placers._lister.visiting_orders import ORDERS
from roost.placers._listing.list_scheduler import affordable, total_time
from roost.placers._shared.groups import groups_of, may_group

MOST_KEPT = 4  # of the best schedules of a round become trials

_DRAWN_SEED = 12345
_UNLIKE = 1.5  # times as long for everything as another accelerator
# Rules varied at a time among the samples, and after; from how many of the best.
_SOON = 4
_FAMILY = 32
_PARENTS = 6
# Share of the varied rules that keep near the best placement; how firmly, in ops of mean length.
_NEAR = 0.5
_HOLD = (1.0, 30.0)


class _Shares(NamedTuple):
    """Shares of the samples; the rest are varied."""

    learned: float  # rules as they were learned
    drawn: float  # rules drawn alike for every problem


# Chosen on members that were not learned on, and on those of other families
# (benchmarks/results/generalise_*.md).
_ALIKE_SHARES = _Shares(3 / 8, 1 / 8)
# Where accelerators differ in speed, more are drawn: under every order, for whole groups. There
# each graph needs a rule of its own, and orders and units that are good on like devices are not.
_UNLIKE_SHARES = _Shares(1 / 4, 3 / 8)


class FirstRules(NamedTuple):
    """Rules to begin with, and the learned rules to try later."""

    rows: Array  # [rules, columns]
    scheduler: Array  # [rules] i8 the number of the scheduler that takes each
    later: Array  # [rules, columns]


def first_rules(
    learned: Array, samples: int, most_later: int, are_unlike: bool = False
) -> FirstRules:
    """Learned rules and drawn ones.

    Drawn rules have the orders of the learned ones. For unlike accelerators they have all orders,
    and place whole groups.
    """
    shares = _UNLIKE_SHARES if are_unlike else _ALIKE_SHARES
    num_learned = max(1, round(shares.learned * samples))
    num_drawn = round(shares.drawn * samples)
    first = learned[:num_learned]
    later = learned[num_learned:][:most_later]
    orders = sorted(set(first[:, COLUMN["order"]].astype(int).tolist()))
    drawn_orders = range(len(ORDERS)) if are_unlike else orders
    drawn = drawn_rules(np.random.default_rng(_DRAWN_SEED), num_drawn, drawn_orders)
    if are_unlike:
        drawn[:, COLUMN["listed"]] = 1.0
    scheduler = np.repeat([0, int(are_unlike)], [len(first), num_drawn])
    return FirstRules(np.concatenate([first, drawn]), scheduler, later)


def rule_schedulers(problem: Problem) -> list[RuleScheduler]:
    """The scheduler of the units; where accelerators are unlike, also one of whole groups."""
    schedulers = [RuleScheduler(problem)]
    is_accelerator = [device.kind != "cpu" for device in problem.cluster.devices]
    total = total_time(schedulers[0].units)[is_accelerator]
    total = total[np.isfinite(total)]
    are_unlike = len(total) > 1 and total.max() > _UNLIKE * total.min()
    if are_unlike and may_group(problem):
        schedulers.append(RuleScheduler(problem, groups_of(problem)))
    return schedulers


class RuleSearch:
    """Rules tried so far on a problem, and their costs."""

    def __init__(self, problem: Problem, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self.schedulers = rule_schedulers(problem)
        self.rows = np.zeros((0, len(COLUMNS)))  # [rules, columns]
        self.scheduler = np.zeros(0, np.int64)  # [rules] the number of the scheduler of each
        self.cost = np.zeros(0)  # [rules] infinite where it was not tried

    def run(self, learned: Array, samples: int, num_varied: int) -> None:
        """Try samples, then the other learned rules, then rules varied from the best so far."""
        first = first_rules(learned, samples, num_varied, len(self.schedulers) > 1)
        self._try(first.rows, first.scheduler)
        while len(self.rows) < samples + num_varied and self.evaluate.trials_left >= 1:
            samples_left = samples - len(self.rows)
            if samples_left > 0:
                self._vary(min(_SOON, samples_left))
            elif samples_left == 0 and len(first.later):
                self._try(first.later, np.zeros(len(first.later), np.int64))
            else:
                self._vary(min(_FAMILY, samples_left + num_varied))

    def _vary(self, count: int) -> None:
        """Try children of the best rules."""
        parents = np.argsort(self.cost, kind="stable")[:_PARENTS]
        chosen = parents[self.evaluate.rng.integers(0, len(parents), count)]
        rows = varied_rules(self.evaluate.rng, self.rows[chosen], self.rows)
        self._try(rows, self.scheduler[chosen], keep_near=True)

    def _try(self, rows: Array, scheduler: Array, keep_near: bool = False) -> None:
        """Try rules; with `keep_near` some of them keep near the best placement."""
        cost = np.full(len(rows), np.inf)
        for number, each in enumerate(self.schedulers):
            mine = np.flatnonzero(scheduler == number)
            if len(mine):
                anchors = self._anchors(each, len(mine)) if keep_near else None
                cost[mine] = self._round(each, rows[mine], anchors)
        self.rows = np.concatenate([self.rows, rows])
        self.scheduler = np.concatenate([self.scheduler, scheduler])
        self.cost = np.concatenate([self.cost, cost])

    def _anchors(self, scheduler: RuleScheduler, count: int) -> Anchors:
        """Anchors at the best placement for some of so many rules, each held as firmly as drawn."""
        rng = self.evaluate.rng
        best = self.evaluate.best
        assert best is not None
        device = scheduler.problem.check(best.placement).device
        is_held = rng.random(count) < _NEAR
        least, most = np.log(_HOLD)
        hold = np.exp(rng.uniform(least, most, count))
        unit_device = np.tile(scheduler.units.unit_devices(device), (count, 1))
        return Anchors(unit_device, np.where(is_held, hold, 0.0))

    def _round(self, scheduler: RuleScheduler, rows: Array, anchors: Anchors | None) -> Array:
        """One round of rules, as many as there are simulations for; the costs of all rows."""
        left = self.evaluate.simulations_left
        is_tight = scheduler.is_tight
        count, scales = affordable(len(rows), left, is_tight, own_orders=True)
        if is_tight and left <= 1:
            rows = rows.copy()
            rows[:, COLUMN["listed"]] = 0.0

        def run() -> Round:
            near = None if anchors is None else anchors.rows(slice(count))
            schedules = scheduler.schedule(rows[:count], scales, near)
            cost = np.full(len(rows), np.inf)
            cost[:count] = cost_of(schedules, scheduler.problem)
            kept = schedules.ranked()[: min(MOST_KEPT, max(1, len(rows) // 8))]
            placements = [schedules.placement(row) for row in kept]
            return Round(placements, schedules.simulations, {"cost": cost})

        state = self.evaluate.round(run)
        return taken(state, "cost", (len(rows),), finite=False)
