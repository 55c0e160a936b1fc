"""Linear rules in numbers without units, so that one rule means the same on every problem.

`rules` draws its rules for the problem at hand. Here a rule is a row of numbers. It can be kept in
a file, varied, and tried on other graphs and clusters. Shares count in ops of mean length, prices
in the time of everything, and devices are named by how fast they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._lister.visiting_orders import ORDERS
from roost.placers._listing.linear_rules import FEATURES
from roost.placers.rules import draw_weights


class _Setting(NamedTuple):
    """The range of a setting."""

    least: float
    most: float


_SETTINGS = {
    "share": _Setting(0.1, 10.0),  # of the work that is fair, as a factor
    "fair": _Setting(0.1, 10.0),  # of the memory that is fair, as a factor
    # 0: all devices; else without slower kinds, up to 1: the fastest kind alone.
    "fast": _Setting(0.0, 1.0),
    "part": _Setting(0.01, 1.0),  # of those devices, the fastest first
    # Above a half: outputs count where they were made until their last use anywhere.
    "cautious": _Setting(0.0, 1.0),
    "order": _Setting(0.0, len(ORDERS) - 1.0),  # its number
    "eager": _Setting(0.0, 1.0),  # above a half: early updates, where memory is tight
    # Above a half: in the end its devices run in an order that is made for them.
    "listed": _Setting(0.0, 1.0),
}
SETTINGS = tuple(_SETTINGS)  # in a row after the weights of the features
COLUMNS = (*FEATURES, *SETTINGS)
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
_FIRST_CHOICE = COLUMN["cautious"]  # this and later settings are choices, not amounts

# Differences of a child from its parent: the chance to take numbers from another rule and their
# share, the chance and the size of a change, and the chance to draw a number anew.
_CROSSED = 0.5
_FROM_OTHER = 0.4
_CHANGED = 0.35
_STEP = 0.5
_NEW = 0.06


def drawn_rules(
    rng: np.random.Generator, count: int, orders: Sequence[int] = range(len(ORDERS))
) -> Array:
    """[rules, columns] random rules, as `rules` draws them, under these orders in turn."""
    rows = np.zeros((count, len(COLUMNS)))
    draw_weights(rows[:, : len(FEATURES)], rng, 1.0, 1.0)
    settings = {
        "share": rng.uniform(0.5, 1.5, count),
        "fair": rng.uniform(0.8, 1.5, count),
        "fast": (rng.random(count) < 0.7) * rng.random(count),
        "part": np.where(rng.random(count) < 0.12, rng.uniform(0.01, 1.0, count), 1.0),
        "cautious": rng.random(count) < 0.5,
        "order": np.resize(np.asarray(orders), count),
        "eager": rng.random(count) < 0.75,
        "listed": rng.random(count) < 0.5,
    }
    for name, values in settings.items():
        rows[:, COLUMN[name]] = values
    return rows


def varied_rules(rng: np.random.Generator, parents: Array, others: Array) -> Array:
    """[rules, columns] a child of each parent.

    Some of its numbers are those of another rule, some are changed, a few are drawn anew.
    """
    count, width = parents.shape
    crossed = (rng.random((count, 1)) < _CROSSED) & (rng.random((count, width)) < _FROM_OTHER)
    rows = np.where(crossed, others[rng.integers(0, len(others), count)], parents)
    new = rng.random((count, width)) < _NEW
    new[:, COLUMN["order"]] = False  # few orders, since each takes time to prepare
    rows = np.where(new, drawn_rules(rng, count), rows)
    factor = np.exp(rng.normal(0.0, _STEP, (count, width)))
    is_changed = rng.random((count, width)) < _CHANGED
    is_changed[:, _FIRST_CHOICE:] = False
    return within_ranges(np.where(is_changed, rows * factor, rows))


def within_ranges(rows: Array) -> Array:
    """The rows with every setting clipped to its range."""
    rows = rows.copy()
    for name, setting in _SETTINGS.items():
        rows[:, COLUMN[name]] = np.clip(rows[:, COLUMN[name]], setting.least, setting.most)
    return rows


def are_valid(rows: Array) -> bool:
    """True if all numbers are finite, orders are whole numbers and settings are in their ranges."""
    order = rows[:, COLUMN["order"]]
    is_whole = (order == np.round(order)).all()
    return bool(np.isfinite(rows).all() and is_whole and np.allclose(within_ranges(rows), rows))
