"""Whether a model with its modules placed gives what it gives unplaced; and where not, which module
is the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from roost.errors import InputError
from roost.runtime.step.differences import EAGER, TOLERANCES, Differences, Verification
from roost.runtime.whole.apply import (
    ModulePlacement,
    apply,
    check,
    is_placed,
    named_tensors,
    remove,
)

# Rounding in 16 bits grows with depth where devices sum in different orders: 0.035 was seen after
# 32 layers.
_DEEP = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_CPU = torch.device("cpu")


def verify_modules(
    model: nn.Module,
    placement: ModulePlacement,
    inputs: Any,
    *,
    steps: int = 2,
    tolerance: float | None = None,
) -> Verification:
    """Call the model unplaced, on the CPU or where it is, then placed, some times; it is left as it
    was.

    `inputs` are a tensor, a tuple or a dict. What it returns, its weights and buffers and their
    names are compared.
    """
    if is_placed(model):
        raise InputError(
            "the model is placed already; verify it before, or take the plan off with "
            "plan.remove(model)"
        )
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance is {tolerance!r}; it must be a number, not negative")
    args, kwargs = call_of(inputs)
    if any(leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
        raise InputError(
            "the example inputs are on the meta device and have no values; give verify real inputs"
        )
    # Before it is called: another model would fail with an error of its own.
    check(model, placement)
    with buffers_kept(model) as before:
        return _verified(model, placement, args, kwargs, before, steps, tolerance)


def _verified(
    model: nn.Module,
    placement: ModulePlacement,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: dict[str, Tensor],
    steps: int,
    tolerance: float | None,
) -> Verification:
    where = next((tensor.device for tensor in named_tensors(model).values()), _CPU)
    names, tied = list(model.state_dict()), _tied(model)
    expected = _results(model, args, kwargs, where)
    if not expected:
        raise InputError(
            "the model returned no tensor that could be compared; let it return tensors, a tuple "
            "or a dict"
        )
    after = buffers_of(model)
    differences = Differences(tolerance if tolerance is not None else _DEEP.get(_dtype(expected)))
    apply(model, placement)
    try:
        for step in range(1, steps + 1):
            differences.step = step
            restore(model, before)
            found = _results(model, args, kwargs, _CPU)
            differences.several(
                "output", EAGER, [f"output {n}" for n in range(len(expected))], found, expected
            )
            for name, value in buffers_of(model).items():
                differences.one("buffer", EAGER, name, value, after[name])
        for one, other in tied:
            same = named_tensors(model)[one] is named_tensors(model)[other]
            differences.one("tied weight", EAGER, one, torch.tensor(same), torch.tensor(True))
        if list(model.state_dict()) != names:
            raise InputError("names in state_dict have changed")
    finally:
        remove(model)
        restore(model, before)
    devices = tuple(
        dict.fromkeys([placement.main, *placement.home.values(), *placement.runs_on.values()])
    )
    verification = Verification(differences.largest, steps, devices)
    if verification.same:
        return verification
    module = _first(model, placement, (args, kwargs), where, differences, steps)
    device = placement.runs_on.get(module, placement.main)
    return Verification(differences.largest, steps, devices, module, device)


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as a tensor, a tuple or a dict, as arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _results(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> list[Tensor]:
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: tensor.to(device, copy=True), (args, kwargs)
    )
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # dropout, where it is on, draws the same on devices of one kind
        returned = model(*args, **kwargs)
    return [leaf.to(_CPU) for leaf in tree_leaves(_plain(returned)) if isinstance(leaf, Tensor)]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of them, which `restore` writes back."""
    return {name: tensor.detach().to(_CPU, copy=True) for name, tensor in model.named_buffers()}


def restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            tensor.copy_(buffers[name])


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copies of the buffers; in the end they are the tensors that they were, also where a call put
    others there."""
    held, before = (
        [(module, dict(module._buffers)) for module in model.modules()],
        buffers_of(model),
    )
    try:
        yield before
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        restore(model, before)


def _plain(value: Any) -> Any:
    """Mappings and dataclasses of any kind as plain mappings, so that their tensors are found."""
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    return next((tensor.dtype for tensor in tensors if tensor.dtype in TOLERANCES), torch.float32)


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    found = []
    for name, tensor in named_tensors(model).items():
        if first.setdefault(id(tensor), name) != name:
            found.append((name, first[id(tensor)]))
    return found


def _first(
    model: nn.Module,
    placement: ModulePlacement,
    given: tuple[Any, Any],
    where: torch.device,
    differences: Differences,
    steps: int,
) -> str:
    """The first call of a module, in the order they end, whose output differs by more than is
    allowed."""
    buffers = buffers_of(model)
    expected = _watched(model, lambda: _results(model, *given, where))
    apply(model, placement)
    try:
        for _ in range(steps):
            restore(model, buffers)
            found = _watched(model, lambda: _results(model, *given, _CPU))
            for (name, theirs), (_, ours) in zip(expected, found, strict=False):
                if len(ours) != len(theirs) or not differences.all_close(ours, theirs):
                    return name
    finally:
        remove(model)
    return ""


def _watched(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, list[Tensor]]]:
    seen: list[tuple[str, list[Tensor]]] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if next(module.children(), None) is None:

                def keep(module: nn.Module, given: Any, returned: Any, name: str = name) -> None:
                    seen.append(
                        (
                            name,
                            [
                                t.to(_CPU, copy=True)
                                for t in tree_leaves(returned)
                                if isinstance(t, Tensor)
                            ],
                        )
                    )

                stack.callback(module.register_forward_hook(keep).remove)
        run()
    return seen
