"""The units as an undirected graph with whole weights, and the speeds of devices.

For the partition placers `scotch`, `mincut` and `metis`, and for splits of layers.
"""

from __future__ import annotations

from math import isinf
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.problem import Problem
from roost.placers._shared.units import Units

# Of all vertices or all edges together: the libraries may add them up in 32 bits.
MOST_WEIGHT = 2**30


class UnitGraph(NamedTuple):
    """Units and the tensors between them: each pair of units in both directions, no loops."""

    start: Array  # [units + 1] i8 neighbours of unit i are neighbour[start[i]:start[i + 1]]
    neighbour: Array  # [pairs] i8
    tensors: Array  # [pairs] edges of the unit graph between the two, one or two
    size: Array  # [pairs] f8 bytes between the two, both ways


def unit_graph(units: Units) -> UnitGraph:
    """The undirected graph of the units."""
    source, target, size = units.edges
    one = np.concatenate([source, target])
    other = np.concatenate([target, source])
    pairs, inverse, counts = np.unique(
        one * units.num_units + other, return_inverse=True, return_counts=True
    )
    total = np.bincount(inverse, np.concatenate([size, size]), minlength=len(pairs)).astype(float)
    degree = np.bincount(pairs // units.num_units, minlength=units.num_units)
    start = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
    return UnitGraph(start, pairs % units.num_units, counts, total)


def whole(weights: Array, most: int = MOST_WEIGHT) -> Array:  # i8
    """Weights as whole numbers of at least 1 that keep their proportions.

    They add up to about `most` or less.
    """
    total = float(weights.sum())
    scale = most / total if total > 0 else 0.0
    if isinf(scale):  # the weights are so small that a float does not hold their factor
        weights = weights / total
        scale = float(most)
    return np.maximum(np.rint(weights * scale), 1).astype(np.int64)


def accelerators(problem: Problem) -> list[int]:
    """The devices that are no CPU, or all of them where there is nothing else."""
    kinds = [device.kind for device in problem.cluster.devices]
    chosen = [d for d, kind in enumerate(kinds) if kind not in ("cpu", MEMORY)]
    return chosen or list(range(len(kinds)))


def speeds(units: Units, devices: list[int]) -> Array:  # [devices] adds up to 1
    """The relative speeds of devices, by the seconds of all units that may run on each of them."""
    everywhere = units.allowed[:, devices].all(axis=1)
    seconds = units.time[everywhere][:, devices].sum(axis=0)
    if not (seconds > 0).all():  # nothing to compare, or a device that takes no time at all
        return np.full(len(devices), 1.0 / len(devices))
    rates = seconds.min() / seconds  # not 1 / seconds, which may be more than a float holds
    return np.asarray(rates / rates.sum())


def mean_seconds(units: Units, devices: list[int]) -> Array:  # [units]
    """Seconds of each unit, averaged over those of the devices on which it may run."""
    may = units.allowed[:, devices]
    total = np.where(may, units.time[:, devices], 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(may.sum(axis=1), 1))
