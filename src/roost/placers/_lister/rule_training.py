"""How the rules of `lister` are learned on many problems: rules are varied, and those that are best
together are kept.

After portfolios of solvers (Hydra: Xu, Hoos and Leyton-Brown 2010), with evolution instead of a
configurator. New rules are tried on some of the problems, and the promising ones on all. A rule is
worth what it adds to the others, and as it may fail on a problem it has not seen, what counts is
the mean step time if each rule were there with a chance of `_CARRIES` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers._lister.portable_rules import COLUMNS, Bench, are_valid, drawn, varied
from roost.placers._lister.rollouts import PORTFOLIO, cost_of
from roost.placers._lister.visiting_orders import ORDERS

FIRST = 48  # rules that are drawn for each order
CHILDREN, NEW = 72, 24  # rules of a generation that are varied, and that are drawn
_KEPT = 128  # rules from which the next generation comes
_MOST_ORDERS = 4  # each has to be made ready on every problem
_CARRIES = 0.3
_FAVOUR = 1.5  # how much more often the first of those kept have children
_LEVELS = 6
# A generation is tried on a share of the problems first, drawn anew each time, and a share of it
# then on all of them.
_FIRST_SHARE, _GO_ON = 0.25, 0.33
TRIED = _FIRST_SHARE + _GO_ON  # what a generation costs, over trying all of it on all problems


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
            self._add(self._promising(np.concatenate([children, drawn(self.rng, NEW, orders)])))
            self._keep(best_together(self.cost, _KEPT, _CARRIES))
        return {
            "rules": float(len(self.rows)),
            "mean_cost": float(self.cost[:PORTFOLIO].min(axis=0).mean()),
        }

    def _order(self) -> Array:
        return self.rows[:, COLUMNS.index("order")].astype(int)

    def _promising(self, rows: Array) -> Array:
        """Those that add most to what is there on some of the problems: trying all of them on all
        costs too much."""
        count = max(1, round(_FIRST_SHARE * len(self.benches)))
        some = self.rng.permutation(len(self.benches))[:count]
        merit = added(self.cost[:, some], self._cost(rows, some), _CARRIES)
        return rows[np.sort(np.argsort(-merit, kind="stable")[: round(_GO_ON * len(rows))])]

    def _cost(self, rows: Array, problems: Sequence[int] | Array) -> Array:  # [rules, problems]
        return np.stack(
            [cost_of(self.benches[n].roll(rows), self.benches[n].problem) for n in problems], axis=1
        )

    def _add(self, rows: Array) -> None:
        cost = self._cost(rows, range(len(self.benches)))
        self.rows, self.cost = np.concatenate([self.rows, rows]), np.concatenate([self.cost, cost])

    def _keep(self, chosen: Array) -> None:
        self.rows, self.cost = self.rows[chosen], self.cost[chosen]

    def _best_orders(self) -> list[int]:
        """Those orders whose rules are best together."""
        least = np.stack(
            [self.cost[self._order() == order].min(axis=0) for order in range(len(ORDERS))]
        )
        return [int(order) for order in best_together(least, _MOST_ORDERS)]

    def state(self) -> dict[str, Array]:
        return {"rules.rows": self.rows, "rules.cost": self.cost}

    def restore(self, state: Mapping[str, Array]) -> None:
        rows = taken(state, "rules.rows", (None, len(COLUMNS)))
        if not len(rows) or not are_valid(rows):
            raise InputError("tensor 'rules.rows' has no rules, or a setting that cannot be")
        self.rows, self.cost = rows, taken(state, "rules.cost", (len(rows), len(self.benches)))


def best_together(cost: Array, count: int, carries: float = 1.0) -> Array:  # [count]
    """Rows of costs [ways, problems], chosen one after the other: each lowers the mean of what is
    expected most.

    Of each problem that is its least cost, if each way chosen is there with a chance of `carries`.
    """
    levels = _LEVELS if carries < 1.0 else 1
    weight = carries * (1.0 - carries) ** np.arange(levels)
    # The lowest costs of each problem so far; what is not there yet costs more than anything.
    lowest = np.tile(cost.max(axis=0) + 1.0, (levels, 1))
    chosen: list[int] = []
    left = np.ones(len(cost), dtype=bool)
    for _ in range(min(count, len(cost))):
        merit = sum(weight[level] * _with(lowest, level, cost) for level in range(levels)).mean(
            axis=1
        )
        best = int(np.where(left, merit, np.inf).argmin())
        chosen.append(best)
        left[best] = False
        lowest = np.stack([_with(lowest, level, cost[best]) for level in range(levels)])
    return np.array(chosen)


def added(cost: Array, new: Array, carries: float) -> Array:  # [new]
    """By how much each of some new ways would lower the mean of what is expected of those with
    costs [ways, problems].

    What is expected is as in `best_together`.
    """
    weight = carries * (1.0 - carries) ** np.arange(_LEVELS)
    most = max(cost.max(), new.max()) + 1.0
    lowest = np.full((_LEVELS, cost.shape[1]), most)
    lowest[: min(_LEVELS, len(cost))] = np.sort(cost, axis=0)[:_LEVELS]
    after = sum(weight[level] * _with(lowest, level, new) for level in range(_LEVELS))
    return np.asarray((weight @ lowest - after).mean(axis=1))


def _with(lowest: Array, level: int, cost: Array) -> Array:
    """What is at one level of the lowest costs when another joins them."""
    return np.asarray(
        np.minimum(lowest[level], np.maximum(cost, lowest[level - 1]) if level else cost)
    )
