"""A portfolio of random linear rules for list scheduling, each tried in one compiled loop; the best
is kept.

No paper: random rules are what a learned list scheduler (such as Paliwal et al. 2020, REGAL) has to
beat. A rule gives each device a score, which is a weighted sum of some twenty features of the op,
the device and what has been placed so far; a unit goes to the device with the lowest score where it
fits. Most weights of a rule are zero. The first rules are not drawn: the earliest finish, the place
of the biggest input, the fastest device until it is full.
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
    SCALES,
    ListScheduler,
    Rolled,
    bits,
    device_choices,
    fastest_first,
    no_rules,
    total_time,
)
from roost.placers._shared.units import Units

# What is drawn for a feature: how often its weight is not zero, and around which value it then is.
# Seconds are weighed as they are, one of the others like so many ops of mean length.
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
# How often a rule takes only fast devices; where memory is tight all are needed.
_FAST, _FAST_TIGHT = 0.7, 0.25
_SUBSET = 0.12  # and how often only some of them


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
        rolled = portfolio(
            problem, evaluate.rng, self.num_rules, self.orders, evaluate.simulations_left
        )
        kept = best_placements(rolled, self.num_kept)
        evaluate.round(lambda: Round(kept, simulations=sum(part.simulations for part in rolled)))
        return kept


def portfolio(
    problem: Problem,
    rng: np.random.Generator,
    num_rules: int = 64,
    orders: tuple[str, ...] = ("program", "rank"),
    most_simulations: float = inf,
) -> list[Rolled]:
    """What so many rules, or fewer where there are not enough simulations for them, make of a
    problem under each order.

    Where memory is tight three quarters of them are used with early updates.
    """
    units = Units.of(problem)
    found: list[Rolled] = []
    prepared = ListScheduler.all_of(units, orders)
    # What does not fit is simulated again: with few simulations there are fewer rules, and in the
    # end fewer attempts.
    attempts = len(SCALES) if any(under.is_tight for under in prepared) else 1
    num_rules = int(max(1, min(num_rules, most_simulations // attempts)))
    scales = SCALES[: int(max(1, min(attempts, most_simulations // num_rules)))]
    weight = np.array([1.0 if number < len(orders) else 3.0 for number in range(len(prepared))])
    edges = np.round(np.cumsum(weight) / weight.sum() * num_rules).astype(int)
    for under, count in zip(prepared, np.diff(edges, prepend=0).tolist(), strict=True):
        if count:
            found.append(under.schedule(draw(under, rng, count), scales))
    return found


def best_placements(rolled: list[Rolled], count: int) -> list[Placement]:
    """The best distinct placements of all, the best first."""
    order = [
        (part.excess[row], part.step_time[row], n, row)
        for n, part in enumerate(rolled)
        for row in part.ranked()
    ]
    return [
        rolled[n].under.placement(rolled[n].unit_device[row])
        for *_, n, row in sorted(order)[:count]
    ]


def draw(under: ListScheduler, rng: np.random.Generator, count: int) -> LinearRules:
    """So many rules: a few that have names, and random ones."""
    units = under.units
    rules = no_rules(units.problem, count)
    total = total_time(units)
    choices = device_choices(units)
    # Without slower kinds, but not one device alone.
    several = choices[1:][choices[1:].sum(axis=1) > 1]
    choices = several if len(several) else choices[:1]
    usable = _usable(rng, count, choices, _FAST_TIGHT if under.is_tight else _FAST)
    price = float(total.min()) if under.is_tight else 0.0
    weigh(rules.weights, rng, float(units.time.min(axis=1).mean()), price)
    _name(rules.weights, usable, choices)
    memory = units.problem.cluster.memory * usable
    lasting = float(under.listing.lasting.sum())
    rules.usable[:] = bits(usable)
    rules.line[:] = fastest_first(units)
    rules.share[:] = (rng.uniform(0.5, 1.5, count) / (usable / total).sum(axis=1))[:, None]
    shares = memory / np.maximum(1, memory.sum(axis=1, keepdims=True))
    rules.fair[:] = shares * lasting * rng.uniform(0.8, 1.5, (count, 1))
    rules.cautious[:] = rng.random(count) < 0.5
    rules.cautious[0] = True
    return rules


def weigh(weights: Array, rng: np.random.Generator, tick: float, price: float) -> None:
    """Draw the weights [rules, features]; `tick` is the mean time of a unit, `price` the middle of
    that feature."""
    count = len(weights)

    def between(least: float, most: float) -> Array:
        return np.exp(rng.uniform(np.log(least), np.log(most), count))

    def around(times: float) -> Array:
        return between(1 / times, times)

    def drawn(feature: str, share: float, value: Array) -> None:
        weights[:, FEATURES.index(feature)] = np.where(rng.random(count) < share, value, 0.0)

    common = between(*_COMMON)
    for feature, (share, middle) in _SECONDS.items():
        drawn(feature, share, middle * common * around(_SPREAD))
    for feature, (share, middle) in SHARES.items():
        drawn(feature, share, middle * common * around(_SPREAD) * tick)
    drawn("in_way", 0.4, 3.0 * around(9.0))
    drawn("price", 0.65, around(10.0) * price)
    start = rng.random(count) * rng.integers(0, 2, count)
    timed = rng.random(count) >= 0.03
    weights[:, FEATURES.index("start")] = np.where(timed, start, 0.0)
    weights[:, FEATURES.index("finish")] = np.where(timed, 1.0 - start, 0.0)


def _name(weights: Array, usable: Array, choices: Array) -> None:
    """Make the first rules those with names; of few rules only half."""
    everything = np.ones_like(choices[0])
    named: list[tuple[dict[str, float], Array]] = [
        ({"finish": 1.0}, choice) for choice in (everything, choices[-1])
    ]
    named += [({"finish": 1.0, "in_way": 1.0, "outgoing": 0.5}, choices[-1])]
    named += [({"in_line": 1.0}, choices[-1]), ({"not_home": 1.0, "finish": 1e-6}, choices[-1])]
    for row, (rule, choice) in enumerate(named[: len(weights) // 2]):
        weights[row] = 0.0
        usable[row] = choice
        for feature, weight in rule.items():
            weights[row, FEATURES.index(feature)] = weight


# [rules, devices] bool.
def _usable(rng: np.random.Generator, count: int, choices: Array, share: float) -> Array:
    """Which devices each rule takes: all, without slower kinds, or some of those."""
    usable = np.ones((count, choices.shape[1]), dtype=bool)
    fast = choices[rng.integers(0, len(choices), count)]
    kind = rng.random(count)
    usable[kind < share] = fast[kind < share]
    # The device with the highest number is always among them.
    some = rng.random(usable.shape) * fast
    some = fast & (some >= rng.random((count, 1)) * some.max(axis=1, keepdims=True))
    usable[kind < _SUBSET] = some[kind < _SUBSET]
    return usable
