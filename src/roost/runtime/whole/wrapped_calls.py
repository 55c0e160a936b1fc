"""Calls of modules whose weights or inputs are brought first; `apply.py` wraps the forwards."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.runtime.whole.cpu_beside_gpu import CallTime, CpuBesideGpu
from roost.runtime.whole.tensor_moves import given_back, lent, mapped, moved
from roost.runtime.whole.weight_window import ModuleWeights, WeightWindow, alike

NO_COPIES = (
    "a placed model cannot be copied or pickled; take its plan off first, plan.remove(model)"
)


@dataclass(slots=True)
class Call:
    """A call of a module: its own forward, and the arguments."""

    forward: Callable[..., Any]
    args: Any
    kwargs: Any

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    def first_tensor(self) -> Tensor | None:
        """Give the first tensor among the arguments."""
        return next(_tensors((self.args, self.kwargs)), None)


class Slots(NamedTuple):
    """A tensor at home, and the tables and names under which modules hold it."""

    tensor: Tensor
    places: list[tuple[dict[str, Any], str]]


class WrappedForward:
    """A forward inside another function. It belongs to its module, not to a copy of the module."""

    def __init__(
        self, forward: Callable[..., Any], around: Callable[[Call], Any], lock: Any
    ) -> None:
        # First: it takes over the attributes of a forward that is wrapped already.
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._around = around
        self._lock = lock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._around(Call(self._forward, args, kwargs))

    def __reduce__(self) -> Any:
        raise InputError(NO_COPIES)

    def __deepcopy__(self, memo: object) -> Any:
        raise InputError(NO_COPIES)


def refuse_to_move(*args: Any, **kwargs: Any) -> Any:
    """Raise; stands in for `_apply` of the modules of a placed model."""
    raise InputError(
        "the model is placed: it cannot be moved or converted; take its plan off first, "
        "plan.remove(model)"
    )


def streamed(window: WeightWindow, weights: ModuleWeights, slots: list[Slots], call: Call) -> Any:
    """Call a module with its weights in the window."""
    _check_slots(weights.name, slots)
    entry = window.enter(weights)
    try:
        return _outside(_run_with(weights.name, slots, entry.views, call), window)
    finally:
        window.leave(entry)


def copied_in_call(main: torch.device, name: str, slots: list[Slots], call: Call) -> Any:
    """Call a module with copies of its weights, made in the order of the computation.

    They need no window, and go when the call ends.
    """
    _check_slots(name, slots)
    copies = []
    with torch.inference_mode(False), torch.no_grad():
        for slot in slots:
            copy = slot.tensor.detach().to(main, non_blocking=True, copy=True)
            copies.append(alike(copy, slot.tensor))
    return _run_with(name, slots, copies, call)


def elsewhere(
    call_time: CallTime, device: torch.device, back: torch.device | None, call: Call
) -> Any:
    """Call a module on another device; its outputs go back unless they stay there."""
    (args, kwargs), copies = lent((call.args, call.kwargs), device)
    begun = time.perf_counter()
    returned = call.forward(*args, **kwargs)
    call_time.add(time.perf_counter() - begun)
    given_back(copies)
    return returned if back is None else moved(returned, back)


def beside_gpu(cpu: CpuBesideGpu, few_rows: int, call: Call) -> Any:
    """Call a module on the CPU beside a GPU; on the GPU if a tensor of it has many rows."""
    if few_rows:
        given = call.first_tensor()
        if given is not None and given.device == cpu.device and given.shape[:-1].numel() > few_rows:
            return call.run()
    return cpu(call.forward, *call.args, **call.kwargs)


def brought_for_gpu(main: torch.device, own: dict[str, Any], call: Call) -> Any:
    """Call a module of the CPU; bring its weights if it is given a tensor of the main device."""
    given = call.first_tensor()
    if given is None or given.device != main:
        return call.run()
    at_home = dict(own)
    for key, tensor in at_home.items():
        if tensor is not None:
            own[key] = nn.Parameter(tensor.data.to(main, non_blocking=True), requires_grad=False)
    try:
        return call.run()
    finally:
        own.update(at_home)


def _check_slots(name: str, slots: list[Slots]) -> None:
    for tensor, places in slots:
        if any(table[key] is not tensor for table, key in places):
            raise InputError(
                f"a weight of module {name!r} is another tensor than when the plan was applied; "
                f"take the plan off before, and apply it again, or write into the tensor that is "
                f"there"
            )


def _run_with(name: str, slots: list[Slots], tensors: Sequence[Tensor], call: Call) -> Any:
    """Call a module with other tensors in place of its weights."""
    versions = [tensor._version for tensor in tensors]
    for slot, tensor in zip(slots, tensors, strict=True):
        for table, key in slot.places:
            table[key] = tensor
    try:
        returned = call.run()
        if [tensor._version for tensor in tensors] != versions:
            raise InputError(
                f"module {name!r} writes into its own weights; it cannot be streamed, keep them"
            )
        return returned
    finally:
        for slot, tensor in zip(slots, tensors, strict=True):
            for table, key in slot.places:
                if table[key] is tensor:
                    table[key] = slot.tensor


def _outside(returned: Any, window: WeightWindow) -> Any:
    """Copy the parts of an output that lie in the window, which is about to be written over."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if window.holds(tensor) else tensor

    return mapped(returned, copied, objects=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)
