"""Residents of a step on the devices where they live, and the windows into which other devices
fetch them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import CudaDevice, PinnedMemory
from roost.runtime.ops.fetch_window import lifetimes, packed
from roost.runtime.step.devices import RuntimeDevice
from roost.simulator.reference import Copy


class HomeResidents:
    """Every parameter of a graph at home; pinned, where a CUDA device fetches it."""

    def __init__(
        self,
        step: CapturedStep,
        placement: Placement,
        places: Sequence[RuntimeDevice],
        copies: Sequence[Sequence[Copy]],  # [devices] what each fetches
        residents: Mapping[str, Tensor],
        # What the optimizer keeps, where it does not begin with zeros.
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.device: list[int] = placement.device.tolist()  # [ops]
        self.tensor: dict[int, Tensor] = {}  # parameter -> its value
        self._places, self._copies = places, copies
        self._pins = PinnedMemory()
        self._fetcher = {
            copy.parameter: place
            for place, row in zip(places, copies, strict=True)
            for copy in row
            if isinstance(place, CudaDevice)
        }
        number = {name: place for place, name in enumerate(step.graph.op_names)}
        for name, value in _values(step, residents):
            self._settle(number[name], value)
        if states is not None and not isinstance(states, Mapping):
            raise InputError(
                f"states is {type(states).__name__}; give what run.states() had, tensors by name"
            )
        begun = None if states is None else dict(states)
        for update in step.updates.values():
            zeros = torch.zeros_like(self.tensor[number[update.resident]], device="cpu")
            for state in update.states:
                self._settle(number[state], zeros if begun is None else _begun(begun, state, zeros))
        if begun:
            raise InputError(
                f"states has {next(iter(begun))!r}, which the optimizer of this step does not keep"
            )
        touched = [
            name for update in step.updates.values() for name in (update.resident, *update.states)
        ]
        self.written = {number[name] for name in touched}  # parameters that get a new value
        self.window = [self._window(device) for device in range(len(places))]

    def _settle(self, op: int, value: Tensor) -> None:
        place, fetcher = self._places[self.device[op]], self._fetcher.get(op)
        if fetcher is not None and not isinstance(place, CudaDevice):
            self.tensor[op] = self._pins.home(value, fetcher.engine.pinned)
        else:
            self.tensor[op] = place.home(value)

    def _window(self, device: int) -> list[Tensor]:
        """On a CUDA device, where each copy that it fetches will lie."""
        place, copies = self._places[device], self._copies[device]
        if not isinstance(place, CudaDevice) or not copies:
            return []
        likes = [self.tensor[copy.parameter] for copy in copies]
        return place.window(likes, *packed([like.nbytes for like in likes], lifetimes(copies)))


def _begun(states: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A state to begin with, taken out of those that are given."""
    if name not in states:
        raise InputError(f"states lacks {name!r}; give all that run.states() had")
    return _like(f"state {name!r}", states.pop(name), like)


def _like(what: str, value: object, like: Tensor) -> Tensor:
    """A value that can stand for this tensor: of another shape many an op would take it, and give
    other numbers."""
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
    """The ops that are parameters, buffers and constants, with their values; what an optimizer
    keeps is not there."""
    program = step.program
    names = dict(zip(program.placeholders, program.residents, strict=False))
    for op in (
        name for name, yes in zip(step.graph.op_names, step.graph.is_parameter, strict=True) if yes
    ):
        node = step.maker.get(op)
        if node is None:
            continue
        given = getattr(program.module, str(node.target), None)
        if node in names:
            given = residents.get(names[node], program.constants.get(names[node]))
        if given is None:
            raise InputError(f"residents lacks {names[node]!r}")
        yield (
            op,
            _like(f"resident {names[node]!r}", given, node.meta["val"]) if node in names else given,
        )
