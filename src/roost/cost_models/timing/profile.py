"""The result of timing a step op by op: its costs, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.arrays import Array
from roost.core.costs import Costs


@dataclass(frozen=True)
class FallBack:
    """Ops that could not be timed on a device, and got the time of a roofline."""

    kind: str
    device: str
    num_ops: int
    why: str


@dataclass(frozen=True, eq=False)
class Profile:
    """The times of a step, op by op."""

    costs: Costs
    alone: Array  # [ops, devices] seconds with no copy beside
    # [ops, devices] seconds; for CPU ops that read big weights, beside a copy to a GPU.
    beside: Array
    num_signatures: int  # unique ops on unique devices
    num_timed: int  # of these timed now; the others were kept
    fallen_back: tuple[FallBack, ...]
