"""What a device is to the runtime, and how a tensor gets from one to another.

A device of the kind `cpu` has done what it was told when the call returns. A CUDA device is told
ahead of time: what it will have done by some point is a mark, which others wait for, on the device
itself where they can.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a device, such as `torch.cuda.Event`; None stands for a point that is
    past."""

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """Whether it is past."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that may still be on its way."""

    tensor: Tensor
    arrival: Event | None
    on_host: bool = False  # in locked memory still: the CUDA device that receives it brings it


class RuntimeDevice(Protocol):
    """A device; its own thread calls what is not said to be called by others, and neither `home`
    nor `close`."""

    device: torch.device

    def enter(self) -> None:
        """Called once, by its thread."""

    def begin(self) -> None:
        """Called before a step, by whoever asks for it."""

    def finish(self) -> None:
        """Return when all is done that the device was told."""

    def mark(self) -> Event | None:
        """The point when all is done that the device was told so far."""

    def wait(self, mark: Event | None) -> None:
        """What the device is told from now on comes after this point."""

    def given(self, value: Tensor) -> Tensor:
        """An input of the step, wherever it lies."""

    def received(self, parcel: SentTensor) -> Tensor:
        """A tensor that was sent here."""

    def home(self, value: Tensor) -> Tensor:
        """A copy of a resident that stays here."""

    def close(self) -> None: ...
    def set_clock(self) -> None:
        """Called before a step whose ops are timed, by whoever asks for it."""

    def stamp(self) -> Any:
        """The time at this point of its work."""

    def seconds(self, stamp: Any) -> float:
        """A stamp by the host's clock, once the step is done."""


class CpuDevice:
    """A device of the kind `cpu`: its thread does everything itself."""

    device = torch.device("cpu")

    def enter(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def mark(self) -> Event | None:
        return None

    def wait(self, mark: Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def given(self, value: Tensor) -> Tensor:
        return value.to("cpu")

    def received(self, parcel: SentTensor) -> Tensor:
        self.wait(parcel.arrival)
        return parcel.tensor

    def home(self, value: Tensor) -> Tensor:
        return value.detach().to("cpu", copy=True)

    def close(self) -> None:
        pass

    def set_clock(self) -> None:
        pass

    def stamp(self) -> Any:
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        return float(stamp)


def copied(
    tensor: Tensor, after: Iterable[Event | None] = (), into: Tensor | None = None
) -> SentTensor:
    """The same tensor in memory of another device of the kind `cpu`, or in a tensor that is
    there."""
    for mark in after:
        if mark is not None:
            mark.synchronize()
    return SentTensor(tensor.clone() if into is None else into.copy_(tensor), None)


class CopyFunction(Protocol):
    """Copies a tensor to another device, after some points; into a tensor that is there, or a new
    one."""

    def __call__(
        self, tensor: Tensor, after: Sequence[Event | None] = (), into: Tensor | None = None
    ) -> SentTensor: ...
