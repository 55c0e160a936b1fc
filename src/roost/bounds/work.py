"""Work over speed: all the ops must be run, and the devices run only so fast together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.core.arrays import Array

_ROUNDS = 30  # cutting planes; a handful suffices for a handful of device types
_CLOSE = 1e-5  # of the value, where more rounds are not worth their time


def work(relaxed: Relaxed) -> float:
    """The work of all units, shared out as evenly as fractions allow; or the longest unit, which
    runs on one device."""
    gap = relaxed.problem.cluster.device_gap
    alone = (relaxed.unit_busy - gap).min(axis=1).max()  # the rest after the last op does not count
    weight = best_weights(relaxed.unit_busy)
    return max(float(alone), 0.0, shared(relaxed.unit_busy, weight) - float(weight @ gap))


def shared(busy: Array, weight: Array) -> float:
    """The greatest weighted sum of busy times over all weights of devices that add up to 1: a
    bound.

    And that is no less than each unit [units, devices] on the device where it weighs least.
    """
    return float(weighed(busy, weight).sum())


def weighed(busy: Array, weight: Array) -> Array:  # [units] seconds
    """The least that each unit weighs."""
    # 0 * infinite: a device that weighs nothing, closed to the unit.
    with np.errstate(invalid="ignore"):
        products = busy * weight
    return np.asarray(np.where(np.isfinite(busy), products, np.inf).min(axis=1))


def best_weights(busy: Array) -> Array:  # [devices] adding up to 1
    """The weights under which the work weighs most: the dual of sharing it out in fractions."""
    _, first, kind = np.unique(busy, axis=1, return_index=True, return_inverse=True)
    kind = kind.ravel()
    columns = busy[:, first]
    count = np.bincount(kind)
    if len(count) == 2:
        return np.asarray((_of_two(columns / count) / count)[kind])

    def lightest(weight: Array) -> tuple[float, Array]:
        """The sum for such weights of whole types of devices, and its slope."""
        with np.errstate(invalid="ignore"):
            products = np.where(np.isfinite(columns), columns * (weight / count), np.inf)
        where = products.argmin(axis=1)
        slope = np.bincount(where, columns[np.arange(len(columns)), where], len(count)) / count
        return float(slope @ weight), slope

    return np.asarray((cutting_planes(lightest, count / count.sum()) / count)[kind])


def _of_two(busy: Array) -> Array:  # [2] adding up to 1
    """The same for two types, exactly: as the first weighs more, unit after unit moves to the
    second."""
    only_first, only_second = (
        busy[np.isinf(busy[:, other]), one].sum() for one, other in ((0, 1), (1, 0))
    )
    first, second = busy[np.isfinite(busy).all(axis=1)].T
    both = first + second
    turns = np.divide(second, both, out=np.zeros_like(both), where=both > 0)
    ranked = np.argsort(turns, kind="stable")
    weight = np.concatenate([[0.0], turns[ranked], [1.0]])
    moved = np.concatenate([[0.0], np.cumsum(second[ranked])])
    moved = np.append(moved, moved[-1]) + only_second
    stay = np.concatenate([[0.0], np.cumsum(first[ranked])])
    stay = np.append(stay[-1] - stay, 0.0) + only_first
    best = int((weight * stay + (1 - weight) * moved).argmax())
    return np.array([weight[best], 1 - weight[best]])


def cutting_planes(
    value: Callable[[Array], tuple[float, Array]], start: Array, free: Array | None = None
) -> Array:
    """The argument in which a concave function is greatest, nearly: Kelley 1960.

    Arguments are not negative. Those that are not `free` add up to 1; free ones are at most as
    large as given there.
    """
    from scipy.optimize import linprog

    size = len(start)
    limit = np.full(size, np.nan) if free is None else free
    if size == 1:
        return start
    tied = np.isnan(limit).astype(float)
    best = start
    best_value = -np.inf
    point = start
    planes = []
    heights = []
    for _ in range(_ROUNDS):
        height, slope = value(point)
        if height > best_value:
            best = point
            best_value = height
        planes.append([*-slope, 1.0])
        heights.append(height - float(slope @ point))
        ranges = [(0.0, 1.0 if np.isnan(top) else float(top)) for top in limit]
        found = linprog(
            [0.0] * size + [-1.0],
            planes,
            heights,
            [[*tied, 0.0]],
            [1.0],
            [*ranges, (None, None)],
            method="highs",
        )
        if found.x is None or found.x[-1] - best_value <= _CLOSE * abs(best_value):
            break
        point = np.maximum(found.x[:-1], 0.0)
        point = np.where(tied > 0, point / point[tied > 0].sum(), point)
    return best
