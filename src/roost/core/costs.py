"""Costs: how long each op takes on each device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roost.core.arrays import Array, exact, frozen
from roost.core.cluster import MOST_SECONDS
from roost.errors import InputError


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of each op on each device. What a transfer costs is in the cluster: latency + bytes /
    bandwidth."""

    op_time: Array  # [ops, devices] seconds
    source: str = "given"  # the cost model that made them

    def __post_init__(self) -> None:
        given = exact(self.op_time, np.float64, "op_time")
        if given.ndim != 2:
            raise InputError(f"op_time must be [ops, devices], not of shape {list(given.shape)}")
        array = frozen(given, np.float64, given.shape, "op_time")
        if not np.isfinite(array).all() or (array < 0).any():
            op, device = np.argwhere(~np.isfinite(array) | (array < 0))[0]
            raise InputError(
                f"op_time[{op}, {device}] is {array[op, device]}; it must be finite and not "
                f"negative"
            )
        if array.size and array.max() > MOST_SECONDS:
            op, device = np.argwhere(array > MOST_SECONDS)[0]
            raise InputError(
                f"op_time[{op}, {device}] is {array[op, device]}; at most {MOST_SECONDS:.0e} s "
                f"can be"
            )
        object.__setattr__(self, "op_time", array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and np.array_equal(self.op_time, other.op_time)

    def __hash__(self) -> int:
        return hash(self.op_time.tobytes())

    def save(self, path: str | Path) -> None:
        """Write `costs.npz`."""
        from roost.core import formats

        formats.save(self, path)
