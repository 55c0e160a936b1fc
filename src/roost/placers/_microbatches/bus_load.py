"""The load of buses in a layout, and the seconds that the busiest adds to the step.

Replicas on two hosts share one network port, so many short transfers add up to a long one. A
schedule of tasks does not see that. Weights are fetched while the first microbatch goes forward,
gradients are sent while the last one goes backward; what takes longer than these makes the step
longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roost.core.arrays import Array
from roost.placers._microbatches.copied_step import (
    BACKWARD_WORK,
    FORWARD_WORK,
    WEIGHT_WORK,
    CopiedStep,
    Moved,
)
from roost.placers._microbatches.layouts import CopyLayout


def with_buses(step: CopiedStep, layout: CopyLayout, seconds: float) -> float:
    """The seconds of a schedule, and those that its devices wait for buses."""
    if len(layout.replicas) == 1 and layout.num_chunks == 1 and layout.host is None:
        return seconds
    rows = layout.device_rows(step)  # [replicas, elements]
    activations, weights, gradients = _Load(step), _Load(step), _Load(step)
    _add_activations(activations, step, layout, rows)
    homes = layout.home_rows(rows)
    for weight in step.weight_reads:
        for one, other, nbytes in _journeys(weight, homes, rows):
            weights.add(one, other, nbytes)
    times = len(layout.replica_of_copy) / len(layout.replicas) if layout.sums_at_host else 1.0
    for gradient in step.gradient_sends:
        for one, other, nbytes in _journeys(gradient, homes, rows):
            gradients.add(other, one, times * nbytes)
    work = step.work[:, np.arange(rows.shape[1]), rows].sum(axis=2).min(axis=1)  # [kinds]
    forward = float(work[FORWARD_WORK])
    backward = float(work[BACKWARD_WORK] + work[WEIGHT_WORK])
    waits = max(0.0, weights.busiest - forward) + max(0.0, gradients.busiest - backward)
    return max(seconds + waits, activations.busiest)


def _journeys(moved: Moved, homes: Array, rows: Array) -> Iterator[tuple[int, int, float]]:
    """Device of the home, another device, and bytes between them; homes are spread by bytes."""
    for one in homes[:, moved.home].tolist():
        for row in rows:
            for other in {int(row[element]) for element in moved.others}:
                yield one, other, moved.nbytes / len(homes)


class _Load:
    """Seconds of each bus."""

    def __init__(self, step: CopiedStep) -> None:
        self.cluster = step.problem.cluster
        self.seconds = np.zeros(len(self.cluster.bus_gap))

    def add(self, source: int, target: int, nbytes: float) -> None:
        if source != target:
            rate = self.cluster.seconds_per_byte[source, target]
            self.seconds[self.cluster.bus[source, target]] += nbytes * rate

    @property
    def busiest(self) -> float:
        return float(self.seconds.max())


def _add_activations(load: _Load, step: CopiedStep, layout: CopyLayout, rows: Array) -> None:
    """Add what neighbouring elements on different devices send each other."""
    forward, backward = step.crossing_bytes
    for row, copies in zip(rows, layout.copies, strict=True):
        for element in np.flatnonzero(row[1:] != row[:-1]).tolist():
            here, there = int(row[element]), int(row[element + 1])
            load.add(here, there, len(copies) * float(forward[element]))
            load.add(there, here, len(copies) * float(backward[element]))
