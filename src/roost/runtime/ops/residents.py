"""Residents of a step on their home devices, and the windows where others fetch them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import CudaDevice, PinnedMemory, RuntimeDevice
from roost.runtime.ops.fetch_window import lifetimes, packed
from roost.simulator.reference import Copy


class HomeResidents:
    """Every resident of a graph at home; in pinned memory if a CUDA device fetches it."""

    def __init__(
        self,
        step: CapturedStep,
        placement: Placement,
        devices: Sequence[RuntimeDevice],
        copies: Sequence[Sequence[Copy]],  # [devices] that each fetches
        residents: Mapping[str, Tensor],
        states: Mapping[str, Tensor] | None = None,  # of the optimizer; None: zeros
    ) -> None:
        self.device: list[int] = placement.device.tolist()  # [ops]
        self.tensor: dict[int, Tensor] = {}  # resident -> its value
        self._devices = devices
        self._copies = copies
        self._pins = PinnedMemory()
        self._fetcher = {
            copy.parameter: device
            for device, row in zip(devices, copies, strict=True)
            for copy in row
            if isinstance(device, CudaDevice)
        }
        number = step.graph.index_of
        for name, value in _values(step, residents):
            self._settle(number(name), value)
        updates = step.updates.values()
        likes = {
            state: self.tensor[number(update.resident)]
            for update in updates
            for state in update.states
        }
        for state, value in _initial_states(states, likes):
            self._settle(number(state), value)
        touched = [name for update in updates for name in (update.resident, *update.states)]
        self.written = {number(name) for name in touched}  # residents that get a new value
        # [devices] memory for each copy, on the CUDA devices.
        self.window = [self._window(device) for device in range(len(devices))]

    def _settle(self, op: int, value: Tensor) -> None:
        device = self._devices[self.device[op]]
        fetcher = self._fetcher.get(op)
        if fetcher is not None and not isinstance(device, CudaDevice):
            self.tensor[op] = self._pins.pinned_copy(value, fetcher.engine.pinned)
        else:
            self.tensor[op] = device.settle(value)

    def _window(self, device: int) -> list[Tensor]:
        owner = self._devices[device]
        copies = self._copies[device]
        if not isinstance(owner, CudaDevice) or not copies:
            return []
        likes = [self.tensor[copy.parameter] for copy in copies]
        return owner.window(likes, *packed([like.nbytes for like in likes], lifetimes(copies)))


def _initial_states(states: object, likes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Give the optimizer's states to begin with; each has the shape and type of its parameter."""
    if states is None:
        for name, like in likes.items():
            yield name, torch.zeros_like(like, device="cpu")
        return
    if not isinstance(states, Mapping):
        raise InputError(
            f"states is {type(states).__name__}; give the result of run.states(), tensors by name"
        )
    for name, like in likes.items():
        if name not in states:
            raise InputError(f"states lacks {name!r}; give all of run.states()")
        yield name, _checked(f"state {name!r}", states[name], like)
    for name in states:
        if name not in likes:
            raise InputError(f"states has {name!r}, which the optimizer of this step does not keep")


def _checked(what: str, value: object, like: Tensor) -> Tensor:
    """Refuse a tensor of another shape or type: many ops would take it, and give wrong numbers."""
    if not isinstance(value, Tensor):
        raise InputError(f"{what} is {type(value).__name__}; it must be a tensor")
    if value.shape != like.shape or value.dtype != like.dtype:
        raise InputError(
            f"{what} is {list(value.shape)} of {value.dtype}; the step has {list(like.shape)} of "
            f"{like.dtype}"
        )
    if value.is_meta or value.layout != torch.strided:
        raise InputError(
            f"{what} is {'on the meta device' if value.is_meta else 'sparse'}; it must be dense, "
            f"with values"
        )
    return value


def _values(step: CapturedStep, residents: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Give the ops that are parameters, buffers and constants, with their values.

    The optimizer's states are not among them.
    """
    program = step.program
    names = {node: name for name, node in program.resident_nodes.items()}
    for op, is_parameter in zip(step.graph.op_names, step.graph.is_parameter, strict=True):
        node = step.maker.get(op)
        if node is None or not is_parameter:
            continue
        if node not in names:
            yield op, getattr(program.module, str(node.target))
            continue
        name = names[node]
        value = residents.get(name, program.constants.get(name))
        if value is None:
            raise InputError(f"residents lacks {name!r}")
        yield op, _checked(f"resident {name!r}", value, node.meta["val"])
