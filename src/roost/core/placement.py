"""The placement: the device of each op, and the order of the ops on each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from roost.core.arrays import Array, digest, exact, frozen
from roost.core.saved import Saved
from roost.errors import InputError

# program: the graph's own order, as one process dispatches it. rank: longest remaining path first.
# priority: as given in the placement, highest first. fifo: whichever op became ready first.
ORDERS = ("program", "rank", "priority", "fifo")

MOST_BYTES = 2**59  # sizes are added up in int64


@dataclass(frozen=True, eq=False)
class Placement(Saved):
    """The device of each op, their order, and the memory for parameters that are fetched ahead."""

    device: Array  # [ops] index in `devices`, or in the cluster's devices where that is empty
    order: str = "program"
    # [ops] highest first, inputs before their consumers; for order "priority".
    priority: Array | None = None
    # [devices] bytes kept for fetched parameters; one number means each device.
    prefetch_bytes: Array | int = 0
    devices: tuple[str, ...] = ()  # device names that `device` counts in
    graph: str = ""  # digest of the graph it was made for; "" fits any graph of the right length

    def __post_init__(self) -> None:
        given = exact(self.device, np.int32, "device")
        if given.ndim != 1:
            raise InputError(
                f"device must be a list of whole numbers, not of shape {list(given.shape)}"
            )
        count = len(given)
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "device", frozen(self.device, np.int32, (count,), "device"))
        if self.order not in ORDERS:
            raise InputError(f"order {self.order!r} must be one of {', '.join(ORDERS)}")
        if (self.priority is not None) != (self.order == "priority"):
            raise InputError("a placement has priorities exactly when its order is 'priority'")
        if self.priority is not None:
            priority = frozen(self.priority, np.float64, (count,), "priority")
            if not np.isfinite(priority).all():
                raise InputError(
                    f"priority of op {int(np.argmin(np.isfinite(priority)))} is not finite"
                )
            object.__setattr__(self, "priority", priority)
        window = exact(self.prefetch_bytes, np.int64, "prefetch_bytes")
        if window.ndim > 1 or (window < 0).any():
            raise InputError(
                "prefetch_bytes must be bytes, one number or one for each device, not negative"
            )
        if (window > MOST_BYTES).any():
            most = window.max()
            raise InputError(f"prefetch_bytes of {most} are more than 2**59; no machine has that")
        if window.ndim == 0:
            object.__setattr__(self, "prefetch_bytes", int(window))
        else:
            fixed = frozen(self.prefetch_bytes, np.int64, window.shape, "prefetch_bytes")
            object.__setattr__(self, "prefetch_bytes", fixed)
        if self.devices and len(set(self.devices)) != len(self.devices):
            raise InputError(f"devices of the placement repeat a name: {', '.join(self.devices)}")

    @property
    def num_ops(self) -> int:
        return len(self.device)

    def moved(self, ops: int | Sequence[int], device: int) -> Placement:
        """The placement with these ops on that device."""
        changed = self.device.copy()
        try:
            changed[ops] = device
        except (IndexError, OverflowError) as error:
            raise InputError(
                f"cannot move {ops} of {self.num_ops} ops to device {device}: {error}"
            ) from None
        return replace(self, device=changed)

    @cached_property
    def digest(self) -> str:
        """A short name that differs if any device, the order or a window differs."""
        return digest(
            [self.device, self.order, self.priority, np.asarray(self.prefetch_bytes), self.devices]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Placement({self.num_ops} ops, {self.order}, {self.digest})"
