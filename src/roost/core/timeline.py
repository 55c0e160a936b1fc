"""The timeline of one step: start and finish of ops and transfers, and the memory held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.saved import Saved

# send: an op's output, to a device where a consumer runs. fetch: a parameter, to a device that uses
# it. home: a parameter's new value, from the update that made it to where it lives.
TRANSFER_KINDS = ("send", "fetch", "home")
SEND, FETCH, HOME = range(3)


def missing_memory(peak_memory: Array, capacity: Array) -> Array:  # [..., devices]
    """Bytes by which the peak memory of each device is beyond its capacity; 0 where it fits."""
    return np.asarray(np.maximum(peak_memory - capacity, 0))


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every transfer of a step, in the order of issue. A broadcast has a row for each target."""

    tensor: Array  # [transfers] the op whose output travels
    source: Array  # [transfers] device
    target: Array  # [transfers] device
    kind: Array  # [transfers] index in TRANSFER_KINDS
    start: Array  # [transfers] seconds
    finish: Array  # [transfers] seconds

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class MemoryTrack:
    """Bytes held on a device after each change, in order, each device's times ascending."""

    device: Array  # [changes]
    time: Array  # [changes] seconds
    held: Array  # [changes] bytes


@dataclass(frozen=True, eq=False)
class Timeline(Saved):
    """One step: its time and peak memory. A full timeline has the other fields too."""

    step_time: float  # seconds
    peak_memory: Array  # [devices] bytes
    capacity: Array  # [devices] bytes
    num_transfers: int
    device_names: tuple[str, ...]  # [devices]
    op_names: tuple[str, ...]  # [ops]
    source: str = "simulated"  # or "measured"
    device: Array | None = None  # [ops]
    start: Array | None = None  # [ops] seconds; parameters start and finish at 0
    finish: Array | None = None  # [ops] seconds
    transfers: Transfers | None = None
    memory: MemoryTrack | None = None

    @property
    def feasible(self) -> bool:
        """True if every device has enough memory."""
        return bool((self.peak_memory <= self.capacity).all())

    @property
    def missing(self) -> Array:  # [devices] bytes over the capacity
        return missing_memory(self.peak_memory, self.capacity)

    @property
    def missing_bytes(self) -> int:
        """The most bytes that any device lacks; 0 if all fits."""
        return int(self.missing.max())

    @property
    def busy(self) -> Array:  # [devices] seconds spent computing
        """Raises ValueError unless the timeline is full."""
        if self.device is None or self.start is None or self.finish is None:
            raise ValueError("ask for the full timeline: simulate(problem, placement, full=True)")
        return np.bincount(self.device, self.finish - self.start, minlength=len(self.device_names))

    def __repr__(self) -> str:
        return (
            f"Timeline({self.step_time:.6g} s, feasible={self.feasible}, "
            f"{self.num_transfers} transfers)"
        )
