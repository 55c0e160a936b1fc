"""Training of the rules of `lister`: rules are varied, and those that are best together are kept.

After portfolios of solvers (Hydra: Xu, Hoos and Leyton-Brown 2010), with evolution instead of a
configurator. New rules are tried on some of the problems, and the promising ones on all. The merit
of a rule is what it adds to the others. It may fail on a problem it has not seen. So the mean step
time is that expected if each rule were there with a chance of `_CARRIES` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers._lister.portable_rules import (
    COLUMN,
    COLUMNS,
    are_valid,
    drawn_rules,
    varied_rules,
)
from roost.placers._lister.rule_scheduler import RuleScheduler
from roost.placers._lister.sampling import cost_of
from roost.placers._lister.visiting_orders import ORDERS
from roost.placers._lister.weights import PORTFOLIO

FIRST = 48  # rules that are drawn for each order
CHILDREN, NEW = 72, 24  # rules of a generation that are varied, and that are drawn
_KEPT = 128  # rules from which the next generation comes
_MOST_ORDERS = 4  # each takes time to prepare on every problem
_CARRIES = 0.3
_FAVOUR = 1.5  # how much more often the first of those kept have children
_LEVELS = 6
# A generation is tried on a share of the problems first, drawn anew each time, and a share of it
# then on all of them.
_FIRST_SHARE = 0.25
_GO_ON = 0.33
TRIED = _FIRST_SHARE + _GO_ON  # cost of a generation, over that of all its rules on all problems


class RuleTraining:
    """The rules so far, and their costs on each problem."""

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        self.rng = rng
        self.schedulers = [RuleScheduler(problem) for problem in problems]
        self.rows = np.zeros((0, len(COLUMNS)))  # [rules, columns]
        self.cost = np.zeros((0, len(problems)))  # [rules, problems]

    @property
    def rules(self) -> Array:  # [rules, columns]
        """The rules that are best together; the first ones are best without the others."""
        return self.rows[:PORTFOLIO]

    def step(self, done: int) -> dict[str, float]:
        """Do the next piece of work: first rules under one of the orders, or a generation."""
        if done < len(ORDERS):
            self._add(drawn_rules(self.rng, FIRST, [done]))
        else:
            if done == len(ORDERS):
                self._keep(np.isin(self._order(), self._best_orders()))
                self._keep(best_together(self.cost, _KEPT, _CARRIES))
            self._add(self._promising(self._generation()))
            self._keep(best_together(self.cost, _KEPT, _CARRIES))
        least_cost = self.cost[:PORTFOLIO].min(axis=0)
        return {"rules": float(len(self.rows)), "mean_cost": float(least_cost.mean())}

    def _generation(self) -> Array:  # [rules, columns]
        """Children of the best rules, and some new rules."""
        rank = self.rng.random(CHILDREN) ** _FAVOUR * len(self.rows)
        children = varied_rules(self.rng, self.rows[rank.astype(int)], self.rows)
        orders = sorted(set(self._order().tolist()))
        return np.concatenate([children, drawn_rules(self.rng, NEW, orders)])

    def _order(self) -> Array:  # [rules]
        return self.rows[:, COLUMN["order"]].astype(int)

    def _promising(self, rows: Array) -> Array:
        """The new rules that add most on some of the problems: all problems would take too long."""
        count = max(1, round(_FIRST_SHARE * len(self.schedulers)))
        some = self.rng.permutation(len(self.schedulers))[:count]
        merit = added(self.cost[:, some], self._cost(rows, some), _CARRIES)
        best = np.argsort(-merit, kind="stable")[: round(_GO_ON * len(rows))]
        return rows[np.sort(best)]

    def _cost(self, rows: Array, problems: Sequence[int] | Array) -> Array:  # [rules, problems]
        schedulers = [self.schedulers[number] for number in problems]
        costs = [cost_of(each.schedule(rows), each.problem) for each in schedulers]
        return np.stack(costs, axis=1)

    def _add(self, rows: Array) -> None:
        cost = self._cost(rows, range(len(self.schedulers)))
        self.rows, self.cost = np.concatenate([self.rows, rows]), np.concatenate([self.cost, cost])

    def _keep(self, chosen: Array) -> None:
        self.rows = self.rows[chosen]
        self.cost = self.cost[chosen]

    def _best_orders(self) -> Array:
        """The orders whose rules are best together."""
        order = self._order()
        least = [self.cost[order == number].min(axis=0) for number in range(len(ORDERS))]
        return best_together(np.stack(least), _MOST_ORDERS)

    def state(self) -> dict[str, Array]:
        """The tensors of a checkpoint."""
        return {"rules.rows": self.rows, "rules.cost": self.cost}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to where a state was saved; raises InputError if it is invalid."""
        rows = taken(state, "rules.rows", (None, len(COLUMNS)))
        if not len(rows) or not are_valid(rows):
            raise InputError("tensor 'rules.rows' has no rules, or an invalid setting")
        self.rows, self.cost = rows, taken(state, "rules.cost", (len(rows), len(self.schedulers)))


def best_together(cost: Array, count: int, carries: float = 1.0) -> Array:  # [count]
    """Rows of costs [rows, problems], chosen one after the other.

    Each lowers the mean over the problems of the expected least cost most. That is expected if each
    chosen row is there with a chance of `carries`.
    """
    levels = _LEVELS if carries < 1.0 else 1
    weight = carries * (1.0 - carries) ** np.arange(levels)
    # The lowest costs of each problem so far; a row that is not chosen yet costs more than any.
    lowest = np.tile(cost.max(axis=0) + 1.0, (levels, 1))
    chosen: list[int] = []
    left = np.ones(len(cost), dtype=bool)
    for _ in range(min(count, len(cost))):
        expected = sum(weight[level] * _with(lowest, level, cost) for level in range(levels))
        best = int(np.where(left, expected.mean(axis=1), np.inf).argmin())
        chosen.append(best)
        left[best] = False
        lowest = np.stack([_with(lowest, level, cost[best]) for level in range(levels)])
    return np.array(chosen)


def added(cost: Array, new: Array, carries: float) -> Array:  # [new]
    """The merit of new rows beside those with costs [rows, problems].

    By how much each lowers the mean of the expected least cost, as in `best_together`.
    """
    weight = carries * (1.0 - carries) ** np.arange(_LEVELS)
    most = max(cost.max(), new.max()) + 1.0
    lowest = np.full((_LEVELS, cost.shape[1]), most)
    lowest[: min(_LEVELS, len(cost))] = np.sort(cost, axis=0)[:_LEVELS]
    after = sum(weight[level] * _with(lowest, level, new) for level in range(_LEVELS))
    return np.asarray((weight @ lowest - after).mean(axis=1))


def _with(lowest: Array, level: int, cost: Array) -> Array:
    """One level of the lowest costs when another cost joins them."""
    joining = np.maximum(cost, lowest[level - 1]) if level else cost
    return np.asarray(np.minimum(lowest[level], joining))
