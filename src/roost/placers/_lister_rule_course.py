"""How the rules of `lister` are learned on many problems: rules are varied, and those that are best together are kept.

After portfolios of solvers (Hydra: Xu, Hoos and Leyton-Brown 2010), with evolution instead of a configurator. All rules
are tried on all problems. A rule is worth what it adds to the others, and as it may fail on a problem it has not seen,
what counts is the mean step time if each rule were there with a chance of `_CARRIES` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers._list_orders import ORDERS
from roost.placers._lister_rolls import PORTFOLIO, cost_of
from roost.placers._portable_rules import COLUMNS, Bench, are_valid, drawn, varied

FIRST = 48  # rules that are drawn for each order
CHILDREN, NEW = 72, 24  # rules of a generation that are varied, and that are drawn
_KEPT = 128  # rules from which the next generation comes
_MOST_ORDERS = 4  # each has to be made ready on every problem
_CARRIES = 0.3
_FAVOUR = 1.5  # how much more often the first of those kept have children
_LEVELS = 6


class RuleCourse:
    """The rules so far, and what they cost on each problem."""

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        self.benches, self.rng = [Bench(problem) for problem in problems], rng
        self.rows, self.cost = np.zeros((0, len(COLUMNS))), np.zeros((0, len(problems)))

    @property
    def rules(self) -> Array:  # [rules, columns]
        """The best together, of which the first are best without the others."""
        return self.rows[:PORTFOLIO]

    def step(self, done: int) -> dict[str, float]:
        """The next piece of work: first rules under one of the orders, or a generation."""
        if done < len(ORDERS):
            self._add(drawn(self.rng, FIRST, [done]))
        else:
            if done == len(ORDERS):
                self._keep(np.isin(self._order(), self._best_orders()))
                self._keep(best_together(self.cost, _KEPT, _CARRIES))
            rank = self.rng.random(CHILDREN) ** _FAVOUR * len(self.rows)
            children = varied(self.rng, self.rows[rank.astype(int)], self.rows)
            orders = sorted(set(self._order().tolist()))
            self._add(np.concatenate([children, drawn(self.rng, NEW, orders)]))
            self._keep(best_together(self.cost, _KEPT, _CARRIES))
        return {"rules": float(len(self.rows)), "mean_cost": float(self.cost[:PORTFOLIO].min(axis=0).mean())}

    def _order(self) -> Array:
        return self.rows[:, COLUMNS.index("order")].astype(int)

    def _add(self, rows: Array) -> None:
        cost = np.stack([cost_of(bench.roll(rows), bench.problem) for bench in self.benches], axis=1)
        self.rows, self.cost = np.concatenate([self.rows, rows]), np.concatenate([self.cost, cost])

    def _keep(self, chosen: Array) -> None:
        self.rows, self.cost = self.rows[chosen], self.cost[chosen]

    def _best_orders(self) -> list[int]:
        """Those orders whose rules are best together."""
        least = np.stack([self.cost[self._order() == order].min(axis=0) for order in range(len(ORDERS))])
        return [int(order) for order in best_together(least, _MOST_ORDERS)]

    def state(self) -> dict[str, Array]:
        return {"rules.rows": self.rows, "rules.cost": self.cost}

    def restore(self, state: Mapping[str, Array]) -> None:
        rows = taken(state, "rules.rows", (None, len(COLUMNS)))
        if not len(rows) or not are_valid(rows):
            raise InputError("tensor 'rules.rows' has no rules, or a setting that cannot be")
        self.rows, self.cost = rows, taken(state, "rules.cost", (len(rows), len(self.benches)))


def best_together(cost: Array, count: int, carries: float = 1.0) -> Array:  # [count]
    """Rows of costs [ways, problems], chosen one after the other: each lowers the mean of what is expected most.

    Of each problem that is its least cost, if each way chosen is there with a chance of `carries`.
    """
    levels = _LEVELS if carries < 1.0 else 1
    weight = carries * (1.0 - carries) ** np.arange(levels)
    # The lowest costs of each problem so far; what is not there yet costs more than anything.
    lowest = np.tile(cost.max(axis=0) + 1.0, (levels, 1))
    chosen: list[int] = []
    left = np.ones(len(cost), dtype=bool)
    for _ in range(min(count, len(cost))):
        merit = sum(weight[level] * _with(lowest, level, cost) for level in range(levels)).mean(axis=1)
        best = int(np.where(left, merit, np.inf).argmin())
        chosen.append(best)
        left[best] = False
        lowest = np.stack([_with(lowest, level, cost[best]) for level in range(levels)])
    return np.array(chosen)


def _with(lowest: Array, level: int, cost: Array) -> Array:
    """What is at one level of the lowest costs when another joins them."""
    return np.asarray(np.minimum(lowest[level], np.maximum(cost, lowest[level - 1]) if level else cost))
