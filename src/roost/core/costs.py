"""Costs: how long each op takes on each device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array, exact, frozen
from roost.core.cluster import MOST_SECONDS
from roost.core.saved import Saved
from roost.errors import InputError


@dataclass(frozen=True, eq=False)
class Costs(Saved):
    """Seconds of each op on each device. The cluster has the costs of transfers."""

    op_time: Array  # [ops, devices] seconds
    source: str = "given"  # the cost model that made them

    def __post_init__(self) -> None:
        given = exact(self.op_time, np.float64, "op_time")
        if given.ndim != 2:
            raise InputError(f"op_time must be [ops, devices], not of shape {list(given.shape)}")
        array = frozen(given, np.float64, given.shape, "op_time")
        for wrong, rule in (
            (~np.isfinite(array) | (array < 0), "it must be finite and not negative"),
            (array > MOST_SECONDS, f"the limit is {MOST_SECONDS:.0e} s"),
        ):
            if wrong.any():
                op, device = np.argwhere(wrong)[0]
                raise InputError(f"op_time[{op}, {device}] is {array[op, device]}; {rule}")
        object.__setattr__(self, "op_time", array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and np.array_equal(self.op_time, other.op_time)

    def __hash__(self) -> int:
        return hash(self.op_time.tobytes())
