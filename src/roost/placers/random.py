"""Random placements, the best of so many: what any search must beat.

Half of them choose a device for each unit; half cut the chain of layers at random and choose a
device for each piece, since scattered units mostly measure the links. Each is tried in one order,
program and rank in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._shared.layers import Layers
from roost.placers._shared.units import Units

_BATCH = 16  # placements handed over at a time


@dataclass(frozen=True)
class Random:
    """The best of `num_samples` random placements; None goes on until the budget is spent."""

    num_samples: int | None = 64

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise InputError(f"num_samples is {self.num_samples}; it must be at least 1")

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Evaluate batches of random placements."""
        units = Units.of(problem)
        chain = Layers.of(problem.graph).chain(units)
        numbers = iter(count() if self.num_samples is None else range(self.num_samples))
        best: list[Trial] = []
        while batch := list(islice(numbers, _BATCH)):
            samples = [_sample(units, chain, evaluate.rng, number) for number in batch]
            best = [best_of([*best, *evaluate(samples)])]
        return best[0].placement


def _sample(units: Units, chain: Array, rng: np.random.Generator, number: int) -> Placement:
    """A random placement: even numbers are scattered, odd ones in pieces."""
    unit_device = _anywhere(units, rng)
    if number % 2:
        wish = np.empty(units.num_units, dtype=np.int64)
        wish[chain] = _pieces(units.num_units, units.problem.cluster.num_devices, rng)
        may = units.allowed[np.arange(units.num_units), wish]
        unit_device = np.where(may, wish, unit_device)
    order = ("program", "rank")[number // 2 % 2]
    return units.problem.placement(units.devices(unit_device), order)


def _anywhere(units: Units, rng: np.random.Generator) -> Array:  # [units]
    """A device for each unit, all that it allows as likely."""
    choices = units.allowed.sum(axis=1)
    pick = (rng.random(units.num_units) * choices).astype(np.int64)
    return np.asarray((np.cumsum(units.allowed, axis=1) > pick[:, None]).argmax(axis=1))


def _pieces(length: int, num_devices: int, rng: np.random.Generator) -> Array:  # [length]
    """The devices of a chain cut into one to twice as many pieces as there are devices."""
    cuts = np.sort(rng.integers(0, length + 1, rng.integers(0, 2 * num_devices)))
    piece = np.searchsorted(cuts, np.arange(length), side="right")
    return rng.integers(0, num_devices, len(cuts) + 1)[piece]
