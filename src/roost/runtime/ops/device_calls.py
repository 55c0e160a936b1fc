"""The functions that the code of a device calls, apart from ops of PyTorch.

`device_code.py` asks for them as it writes the code; `GraphRuntime` inherits from `DeviceCalls`.
Ops and devices are given by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import CudaDevice, RuntimeDevice
from roost.runtime.ops.op_clock import OpClock
from roost.runtime.ops.segments import Capture
from roost.runtime.ops.transfers import TransferCalls
from roost.runtime.step.optimizers import Updates
from roost.runtime.step.random_ops import RandomOps


class DeviceCalls(TransferCalls):
    """The calls of a step, with the inputs and results of the step that is running."""

    def __init__(
        self,
        step: CapturedStep,
        placement: Placement,
        device_names: Sequence[str],
        devices: Sequence[RuntimeDevice],
        optimizer: Updates,
        random_ops: RandomOps,
        graphs: bool,
        record: bool,
    ) -> None:
        super().__init__(device_names, devices)
        self.program = step.program
        self.graph = step.graph
        self.placement = placement
        self.optimizer = optimizer
        self.random_ops = random_ops
        self._graphs = graphs
        self._clock = OpClock(devices) if record else None
        self._input_number = {
            step.op_of[node]: number
            for number, node in enumerate(self.program.input_nodes.values())
        }
        self._inputs: list[Any] = []
        self._results: list[Any] = [None] * len(self.program.results)

    def torch_device(self, device: int) -> torch.device:
        return self.devices[device].device

    def resident(self, op: int) -> Tensor:
        """Give a resident at home."""
        return self.home_residents.tensor[op]

    def input_of(self, op: int, device: int) -> Callable[[], Any]:
        """Bring an input of the step to a device."""
        number = self._input_number[self.graph.op_names[op]]
        target = self.devices[device]
        return lambda: target.bring_input(self._inputs[number])

    def updating(self, op: int, touched: list[int], reads: list[int]) -> Callable[..., None]:
        """Write new values of a resident and its states in place.

        Each is written after so many copies of its old value were taken.
        """
        waits = [
            (self._reads_of(resident), count)
            for resident, count in zip(touched, reads, strict=True)
            if count
        ]
        kind = self.graph.kinds[op]
        write = _copy if kind == "copy" else self.optimizer.update(kind)
        device = self.devices[int(self.placement.device[op])]

        def update(*tensors: Tensor) -> None:
            for read, count in waits:
                for event in read.take_all(count):
                    device.wait(event)
            write(self.random_ops.step, *tensors)

        return update

    def drawing(self, target: Any, number: int, device: int) -> Callable[..., Any]:
        """Give the function to call instead of a random op."""
        return self.random_ops.seeded(target, number, self.torch_device(device))

    def capturing(self, device: int) -> Capture | None:
        """Give the function that records segments, or None if they are not recorded."""
        owner = self.devices[device]
        if self._graphs and isinstance(owner, CudaDevice):
            return owner.engine.capturing(owner.device)
        return None

    def timing(self, op: int, device: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Give the functions to call before and after an op, or None if ops are not timed."""
        return None if self._clock is None else self._clock.around(op, device)

    def keeping_result(self, number: int) -> Callable[[Any], None]:
        """Keep a result of the step for the caller."""

        def keep(value: Any) -> None:
            # A CUDA graph writes it to the same memory in the next step.
            self._results[number] = value.clone() if self._graphs else value

        return keep


def _copy(step: int, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
