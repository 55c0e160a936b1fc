"""Devices of the graph runtime: the CPU, events, and tensors on their way to another device.

`GraphRuntime` makes the devices; each device has a thread that calls it (`device_threads.py`).
A CPU has done its work when a call returns. A CUDA device works later than it is called: an event
marks a point in its work, and other devices wait for that event.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a device, such as `torch.cuda.Event`; None is a point in the past."""

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """Tell if the device has passed this point."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor for another device, which may still be on its way."""

    tensor: Tensor
    arrival: Event | None
    on_host: bool = False  # still in pinned memory: the CUDA device that receives it copies it


class CpuDevice:
    """A device of the kind `cpu`: the thread that calls it does the work.

    Its own launcher calls a device. `begin` and `set_clock` are called by the thread that asks for
    a step, `settle` and `close` by any thread.
    """

    device = torch.device("cpu")

    def enter(self) -> None:
        """Prepare the launcher; called once."""

    def begin(self) -> None:
        """Prepare a step."""

    def finish(self) -> None:
        """Return when all work given so far is done."""

    def record_event(self) -> Event | None:
        """Mark the point where all work given so far is done."""
        return None

    def wait(self, event: Event | None) -> None:
        """Make all work given from now on wait for this point."""
        if event is not None:
            event.synchronize()

    def bring_input(self, value: Tensor) -> Tensor:
        """Copy an input of the step to this device, from any device."""
        return value.to("cpu")

    def receive(self, sent: SentTensor) -> Tensor:
        """Take a tensor that was sent here."""
        self.wait(sent.arrival)
        return sent.tensor

    def settle(self, value: Tensor) -> Tensor:
        """Copy a resident that lives here."""
        return value.detach().to("cpu", copy=True)

    def close(self) -> None:
        """Wait until no copy uses memory of this device."""

    def set_clock(self) -> None:
        """Prepare a step whose ops are timed."""

    def stamp(self) -> Any:
        """Take the time at this point of the device's work."""
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        """Give a stamp in seconds of `time.perf_counter`, once the step is done."""
        return float(stamp)


def copied_on_cpu(
    tensor: Tensor, after: Iterable[Event | None] = (), into: Tensor | None = None
) -> SentTensor:
    """Copy a tensor to another device of the kind `cpu`, into new memory or a given tensor."""
    for event in after:
        if event is not None:
            event.synchronize()
    return SentTensor(tensor.clone() if into is None else into.copy_(tensor), None)


class CopyFunction(Protocol):
    """Copies a tensor to another device after some events, into new memory or a given tensor."""

    def __call__(
        self, tensor: Tensor, after: Sequence[Event | None] = (), into: Tensor | None = None
    ) -> SentTensor: ...
