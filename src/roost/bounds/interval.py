"""Interval bound: ops that can only start late and must end early share the time in between.

Fernandez, Bussell 1973. Differs in: heads and tails know of transfers, and work is weighed for
unlike devices.
"""

from __future__ import annotations

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.bounds.heads_tails import Ends
from roost.bounds.work import best_weights, weighed
from roost.core.arrays import Array

_THRESHOLDS = 256  # of heads, and of tails
_ROUNDS = 3


def interval(relaxed: Relaxed, ends: Ends) -> float:
    """The greatest head + tail + work between them, over sampled thresholds of heads and tails."""
    head = ends.head.min(axis=1)
    tail = ends.tail.min(axis=1)
    gap = relaxed.problem.cluster.device_gap
    inside = np.ones(len(head), dtype=bool)
    rows = _thresholds(head)
    columns = _thresholds(tail)
    best = 0.0
    for _ in range(_ROUNDS):
        # Weights that are best for the ops between the best thresholds so far hold for all others
        # too.
        weight = best_weights(relaxed.busy[inside])
        total = _sums(weighed(relaxed.busy, weight), head, tail, rows, columns)
        found = rows[:, None] + columns[None, :] + np.maximum(total - float(weight @ gap), 0.0)
        found[total <= 0] = 0.0  # nothing has to be run in there
        row, column = np.unravel_index(int(found.argmax()), found.shape)
        if found[row, column] <= best * (1 + 1e-9):
            break
        best = float(found[row, column])
        inside = (head >= rows[row]) & (tail >= columns[column])
    return best


def _thresholds(values: Array) -> Array:
    distinct = np.unique(values)
    if len(distinct) <= _THRESHOLDS:
        return distinct
    return np.asarray(distinct[np.linspace(0, len(distinct) - 1, _THRESHOLDS).astype(int)])


def _sums(value: Array, head: Array, tail: Array, rows: Array, columns: Array) -> Array:
    """[rows, columns] the sum over the ops with at least that head and at least that tail."""
    row = np.searchsorted(rows, head, side="right") - 1
    column = np.searchsorted(columns, tail, side="right") - 1
    cells = np.bincount(row * len(columns) + column, value, len(rows) * len(columns))
    table = cells.reshape(len(rows), len(columns))
    return np.asarray(table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1])
