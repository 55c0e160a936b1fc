"""Layouts: which device computes which elements of which copies.

A layout has replicas. Each replica computes some of the copies, and cuts the chain of elements into
chunks, each on one device. One replica with many chunks is a pipeline, many replicas of one chunk
are data parallelism, and several replicas of several chunks are both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.placers._microbatches.copied_step import CopiedStep

_MOST_CUTS = 120  # places where the chain may be cut
_WITH_GRADIENTS = 1.25  # times weights and two optimizer states
_TOO_LARGE = 100.0  # times the seconds of a chunk that does not fit


@dataclass(frozen=True)
class Replica:
    """A chain cut into chunks."""

    devices: tuple[int, ...]  # [chunks]
    ends: tuple[int, ...]  # [chunks] the first element after each chunk


@dataclass(frozen=True)
class CopyLayout:
    """The replicas of a step, and the replica of each copy."""

    replicas: tuple[Replica, ...]
    replica_of_copy: tuple[int, ...]  # [copies]
    # Parameters live with the replica that has most copies; else they are spread over all.
    gathered: bool = False
    host: int | None = None  # a device that holds all parameters and runs all updates
    sums_at_host: bool = False  # every gradient is sent there; else each device adds up its own
    # Layers that read a tied weight run where the one with most work does; else in their chunks.
    readers_together: bool = False

    @property
    def num_chunks(self) -> int:
        return max(len(replica.devices) for replica in self.replicas)

    def home_rows(self, rows: Array) -> Array:  # [homes, ...]
        """The devices where parameters may live, from those that compute: [replicas, ...]."""
        if self.host is not None:
            return np.full_like(rows[:1], self.host)
        if self.gathered:
            most = int(np.argmax([len(copies) for copies in self.copies]))
            return rows[[most]]
        return rows

    @cached_property
    def copies(self) -> list[list[int]]:
        """The copies of each replica."""
        rows: list[list[int]] = [[] for _ in self.replicas]
        for copy, replica in enumerate(self.replica_of_copy):
            rows[replica].append(copy)
        return rows

    def chunk_of_element(self, replica: int, num_elements: int) -> Array:  # [elements]
        """The chunk of each element in a replica."""
        ends = np.array(self.replicas[replica].ends[:-1], dtype=np.int64)
        return np.searchsorted(ends, np.arange(num_elements), side="right")

    def device_rows(self, step: CopiedStep) -> Array:  # [replicas, elements]
        """The device that computes each element, in each replica."""
        rows = np.stack(
            [
                np.array(replica.devices)[self.chunk_of_element(number, step.num_elements)]
                for number, replica in enumerate(self.replicas)
            ]
        )
        if self.readers_together:
            for tied in step.tied_weights:
                rows[:, tied.light] = rows[:, tied.heavy]
        return rows


def replicated(step: CopiedStep, chains: Sequence[Replica], count: int) -> CopyLayout:
    """Give so many copies to replicas, neighbours together, so that the slowest ends early."""
    seconds = [slowest_chunk(step, chain) for chain in chains]
    given = [0] * len(chains)
    for _ in range(count):
        ends = [(number + 1) * each for number, each in zip(given, seconds, strict=True)]
        given[int(np.argmin(ends))] += 1
    used = [number for number, copies in enumerate(given) if copies]
    replica_of_copy = [place for place, number in enumerate(used) for _ in range(given[number])]
    return CopyLayout(tuple(chains[number] for number in used), tuple(replica_of_copy))


def slowest_chunk(step: CopiedStep, replica: Replica) -> float:
    """Seconds of one microbatch on the busiest device of a replica."""
    busy = np.zeros(step.problem.cluster.num_devices)
    begin = 0
    for device, end in zip(replica.devices, replica.ends, strict=True):
        busy[device] += step.work[:, begin:end, device].sum()
        begin = end
    return float(busy.max())


def balanced(
    step: CopiedStep,
    devices: Sequence[int],
    under_way: Sequence[int] | None = None,
    copies: float = 1.0,
) -> Replica:
    """Cut the chain so that the slowest chunk is as fast as it can be.

    The dynamic programme of PipeDream (Narayanan et al., SOSP 2019) over places to cut. A device
    without work drops out. `under_way` [chunks] are the microbatches whose activations each chunk
    holds; chunks beyond the memory are avoided. Weights and gradients cross a cut once for all
    `copies` that a replica computes.
    """
    cuts = _cuts(step)  # [places] an end of a chunk; the first is 0
    places = len(cuts)
    forward, backward = step.crossing_bytes
    cluster = step.problem.cluster
    total = np.concatenate(
        [np.zeros((1, cluster.num_devices)), np.cumsum(step.work.sum(axis=0), axis=0)]
    )[cuts]
    resident = np.concatenate([[0.0], np.cumsum(step.resident_bytes)])[cuts]
    saved = np.concatenate([[0.0], np.cumsum(step.saved_bytes)])[cuts]
    crossing = forward + backward + step.straddling_bytes / copies
    cut_bytes = np.concatenate([[0.0], crossing])[cuts]
    cut_bytes[0] = cut_bytes[-1] = 0.0
    best = np.full(places, np.inf)
    best[0] = 0.0
    came: list[Array] = []
    for number, device in enumerate(devices):
        seconds = total[None, :, device] - total[:, None, device]  # [begin, end]
        if number:
            rate = cluster.sent_seconds_per_byte[devices[number - 1], device]
            seconds = np.maximum(seconds, cut_bytes[:, None] * rate)
        if under_way is not None:
            held = _WITH_GRADIENTS * (resident[None, :] - resident[:, None])
            held += under_way[number] * (saved[None, :] - saved[:, None])
            room = cluster.memory[device] / devices.count(device)  # it has other chunks too
            seconds = seconds * np.where(held > room, _TOO_LARGE, 1.0)
        later = np.arange(places)[None, :] >= np.arange(places)[:, None]
        cost = np.where(later, np.maximum(best[:, None], seconds), np.inf)
        np.fill_diagonal(cost, best)  # a device that takes nothing
        # Of equals the shorter chunks: the sum decides.
        cost = cost + 1e-6 * np.where(later, seconds, 0.0)
        before = cost.argmin(axis=0)
        best = cost[before, np.arange(places)]
        came.append(before)
    ends = [places - 1]
    for before in reversed(came):
        ends.append(int(before[ends[-1]]))
    ends = ends[::-1]  # [chunks + 1]
    rows = [
        (device, int(cuts[end]))
        for device, begin, end in zip(devices, ends[:-1], ends[1:], strict=True)
        if end > begin
    ]
    return Replica(tuple(device for device, _ in rows), tuple(end for _, end in rows))


def whole(step: CopiedStep, device: int) -> Replica:
    """The whole chain on one device."""
    return Replica((device,), (step.num_elements,))


def _cuts(step: CopiedStep) -> Array:
    """Ends of chunks: in each stretch of equal work the place where fewest bytes cross."""
    kept: Array | None = vars(step).get("_places_to_cut")
    if kept is not None:
        return kept
    forward, backward = step.crossing_bytes
    seconds = step.work.sum(axis=0).min(axis=1)
    upto = np.cumsum(seconds)
    stretch = np.minimum((upto / max(upto[-1], 1e-30) * _MOST_CUTS).astype(int), _MOST_CUTS - 1)
    crossing = forward + backward + step.straddling_bytes
    order = np.lexsort((np.arange(len(upto)), crossing, stretch))
    _, begins = np.unique(stretch[order], return_index=True)
    ends = order[begins] + 1
    found = np.unique(np.concatenate([[0], ends, [step.num_elements]]))
    vars(step)["_places_to_cut"] = found
    return found
