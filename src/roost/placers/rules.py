"""The best of a portfolio of random linear rules for list scheduling.

No paper: random rules are a baseline for a learned list scheduler (such as Paliwal et al. 2020,
REGAL). A rule gives each device a score, which is a weighted sum of some twenty features of the op,
the device and the units placed so far. A unit goes to the device with the lowest score where it
fits. Most weights of a rule are zero. The first rules are not drawn: earliest finish, the device of
the biggest input, the fastest device until it is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers import Evaluate, Round
from roost.placers._listing.linear_rules import FEATURES, LinearRules
from roost.placers._listing.list_scheduler import (
    ListScheduler,
    RuleSchedules,
    affordable,
    device_choices,
    several_fast,
    total_time,
)
from roost.placers._shared.units import Units

# Of each feature: the chance that its weight is not zero, and the middle of its weights then.
# Seconds are weighed as they are; one of the other features weighs as much as so many ops of mean
# length.
_SECONDS = {
    "load": (0.1, 0.03),
    "over_share": (0.15, 0.3),
    "unit_time": (0.3, 0.5),
    "inbound": (0.5, 0.5),
    "outgoing": (0.6, 0.7),
    "partner": (0.5, 1.0),
}
SHARES = {
    "absent": (0.15, 0.5),
    "not_home": (0.25, 0.5),
    "not_previous": (0.2, 0.3),
    "not_module": (0.35, 0.5),
    "not_parent": (0.2, 0.3),
    "not_role": (0.25, 0.4),
    "in_line": (0.2, 0.3),
    "memory": (0.15, 3.0),
    "over_fair": (0.15, 100.0),
    "unused": (0.15, 1.0),
}
_SPREAD = 3.0  # each weight is drawn up to so many times more or less
_COMMON = (1 / 15, 6.0)  # and all weights of a rule together by a factor between these
# Share of the rules that take only fast devices; where memory is tight all are needed.
_FAST = 0.7
_FAST_TIGHT = 0.25
_SUBSET = 0.12  # share of the rules that take only some of the fast devices


@dataclass(frozen=True)
class Rules:
    """The best of many random rules."""

    num_rules: int = 64
    orders: tuple[str, ...] = ("program", "rank")
    num_kept: int = 8  # of the best are evaluated

    def __post_init__(self) -> None:
        if self.num_rules < 1 or self.num_kept < 1:
            raise InputError(
                f"num_rules and num_kept are {self.num_rules} and {self.num_kept}; both must be "
                f"above 0"
            )
        if not self.orders or set(self.orders) - {"program", "rank"}:
            raise InputError(f"orders are {self.orders}; they must be program, rank or both")

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        kept = self.several(problem, evaluate)
        best = evaluate.best
        return best.placement if best is not None and best.placement in kept else kept[0]

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """The best placements of the portfolio, the best first, each a trial by now."""
        simulations_left = evaluate.simulations_left
        made = portfolio(problem, evaluate.rng, self.num_rules, self.orders, simulations_left)
        kept = made.best(self.num_kept)
        evaluate.round(lambda: Round(kept, made.simulations))
        return kept


@dataclass(frozen=True, eq=False)
class Portfolio:
    """Schedules of many rules, under several orders."""

    schedules: list[RuleSchedules]  # one for each order

    @property
    def simulations(self) -> int:
        return sum(each.simulations for each in self.schedules)

    def best(self, count: int) -> list[Placement]:
        """The best placements, the best first; of the same order each once."""
        ranked = sorted(
            (each.excess[row], each.step_time[row], number, row)
            for number, each in enumerate(self.schedules)
            for row in each.ranked()
        )
        return [self.schedules[number].placement(row) for *_, number, row in ranked[:count]]


def portfolio(
    problem: Problem,
    rng: np.random.Generator,
    num_rules: int = 64,
    orders: tuple[str, ...] = ("program", "rank"),
    most_simulations: float = inf,
) -> Portfolio:
    """Schedules of so many random rules, or fewer where there are few simulations for them.

    Where memory is tight, three quarters of the rules have early updates.
    """
    schedulers = ListScheduler.all_of(Units.of(problem), orders)
    is_tight = any(scheduler.is_tight for scheduler in schedulers)
    num_rules, scales = affordable(num_rules, most_simulations, is_tight)
    weight = np.ones(len(schedulers))
    weight[len(orders) :] = 3.0
    edges = np.round(np.cumsum(weight) / weight.sum() * num_rules).astype(int)
    schedules = [
        scheduler.schedule(random_rules(scheduler, rng, count), scales)
        for scheduler, count in zip(schedulers, np.diff(edges, prepend=0).tolist(), strict=True)
        if count
    ]
    return Portfolio(schedules)


def random_rules(scheduler: ListScheduler, rng: np.random.Generator, count: int) -> LinearRules:
    """So many rules: a few that have names, and random ones."""
    units = scheduler.units
    choices = several_fast(device_choices(units))
    usable = _usable(rng, count, choices, _FAST_TIGHT if scheduler.is_tight else _FAST)
    price = float(total_time(units).min()) if scheduler.is_tight else 0.0
    weights = np.zeros((count, len(FEATURES)))
    draw_weights(weights, rng, float(units.time.min(axis=1).mean()), price)
    _name(weights, usable, choices)
    share = rng.uniform(0.5, 1.5, count)
    fair = rng.uniform(0.8, 1.5, count)
    cautious = rng.random(count) < 0.5
    cautious[0] = True
    return scheduler.linear_rules(weights, usable, share, fair, cautious)


def draw_weights(weights: Array, rng: np.random.Generator, tick: float, price: float) -> None:
    """Draw the weights [rules, features].

    `tick` is the mean time of a unit. `price` is the middle of the weights of that feature.
    """
    count = len(weights)

    def between(least: float, most: float) -> Array:
        return np.exp(rng.uniform(np.log(least), np.log(most), count))

    def around(times: float) -> Array:
        return between(1 / times, times)

    def draw(feature: str, share: float, value: Array) -> None:
        is_there = rng.random(count) < share
        weights[:, FEATURES.index(feature)] = np.where(is_there, value, 0.0)

    common = between(*_COMMON)
    for feature, (share, middle) in _SECONDS.items():
        draw(feature, share, middle * common * around(_SPREAD))
    for feature, (share, middle) in SHARES.items():
        draw(feature, share, middle * common * around(_SPREAD) * tick)
    draw("in_way", 0.4, 3.0 * around(9.0))
    draw("price", 0.65, around(10.0) * price)
    start = rng.random(count) * rng.integers(0, 2, count)
    is_timed = rng.random(count) >= 0.03
    weights[:, FEATURES.index("start")] = np.where(is_timed, start, 0.0)
    weights[:, FEATURES.index("finish")] = np.where(is_timed, 1.0 - start, 0.0)


def _name(weights: Array, usable: Array, choices: Array) -> None:
    """Replace the first rules by those with names; of few rules only half."""
    named: list[tuple[dict[str, float], Array]] = [
        ({"finish": 1.0}, np.ones_like(choices[0])),
        ({"finish": 1.0}, choices[-1]),
        ({"finish": 1.0, "in_way": 1.0, "outgoing": 0.5}, choices[-1]),
        ({"in_line": 1.0}, choices[-1]),
        ({"not_home": 1.0, "finish": 1e-6}, choices[-1]),
    ]
    for row, (rule, choice) in enumerate(named[: len(weights) // 2]):
        weights[row] = 0.0
        usable[row] = choice
        for feature, weight in rule.items():
            weights[row, FEATURES.index(feature)] = weight


def _usable(rng: np.random.Generator, count: int, choices: Array, share: float) -> Array:
    """[rules, devices] bool: the devices of each rule.

    All, those without slower kinds, or some of these.
    """
    usable = np.ones((count, choices.shape[1]), dtype=bool)
    fast = choices[rng.integers(0, len(choices), count)]
    kind = rng.random(count)
    usable[kind < share] = fast[kind < share]
    # The device with the highest number is always among them.
    some = rng.random(usable.shape) * fast
    some = fast & (some >= rng.random((count, 1)) * some.max(axis=1, keepdims=True))
    usable[kind < _SUBSET] = some[kind < _SUBSET]
    return usable
