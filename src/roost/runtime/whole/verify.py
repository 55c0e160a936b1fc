"""Verification of a placed model: compares it with itself unplaced, module by module if needed.

`Plan.verify` and `roost verify` call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from roost.errors import InputError
from roost.runtime.step.calls import call_arguments
from roost.runtime.step.differences import EAGER, TOLERANCES, Differences, Verification
from roost.runtime.whole.apply import apply, remove
from roost.runtime.whole.module_placement import (
    ModulePlacement,
    check,
    is_placed,
    named_tensors,
)

# Devices sum in different orders. In 16 bits such rounding grows with depth: to 0.035 after 32
# layers.
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
    """Call the model unplaced, where it is, then placed for some steps. The model stays as it is.

    `inputs` are a tensor, a tuple or a dict. Outputs, buffers, tied weights and the names in
    `state_dict` are compared.
    """
    if is_placed(model):
        raise InputError(
            "the model is placed already; verify it before, or take the plan off with "
            "plan.remove(model)"
        )
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance is {tolerance!r}; it must be a number, not negative")
    args, kwargs = call_arguments(inputs)
    if any(leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
        raise InputError(
            "the example inputs are on the meta device and have no values; give verify real inputs"
        )
    # Before it is called: another model would fail with an error of its own.
    check(model, placement)
    with buffers_kept(model) as before:
        return _verified(
            model, placement, partial(_results, model, args, kwargs), before, steps, tolerance
        )


def _verified(
    model: nn.Module,
    placement: ModulePlacement,
    run: Callable[[torch.device], list[Tensor]],  # with its inputs on this device
    before: dict[str, Tensor],
    steps: int,
    tolerance: float | None,
) -> Verification:
    where = next((tensor.device for tensor in named_tensors(model).values()), _CPU)
    names = list(model.state_dict())
    tied = _tied(model)
    expected = run(where)
    if not expected:
        raise InputError(
            "the model returned no tensor that could be compared; let it return tensors, a tuple "
            "or a dict"
        )
    after = buffers_of(model)
    differences = Differences(tolerance if tolerance is not None else _DEEP.get(_dtype(expected)))
    apply(model, placement)
    try:
        for differences.step in range(1, steps + 1):
            restore(model, before)
            differences.outputs(EAGER, [], run(_CPU), expected)
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
    used = [placement.main, *placement.home.values(), *placement.runs_on.values()]
    verification = Verification(differences.largest, steps, tuple(dict.fromkeys(used)))
    if verification.same:
        return verification
    module = _first(model, placement, run, where, differences, steps)
    return replace(
        verification, first_op=module, device=placement.runs_on.get(module, placement.main)
    )


def _results(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> list[Tensor]:
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: tensor.to(device, copy=True), (args, kwargs)
    )
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # dropout, where it is on, draws the same on devices of one kind
        returned = model(*args, **kwargs)
    return [leaf.to(_CPU) for leaf in tree_leaves(_plain(returned)) if isinstance(leaf, Tensor)]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers to the CPU; `restore` writes the copies back."""
    return {name: tensor.detach().to(_CPU, copy=True) for name, tensor in model.named_buffers()}


def restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            tensor.copy_(buffers[name])


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give copies of the buffers, and set them back in the end.

    A call may put other tensors there: in the end the buffers are the same tensors as before.
    """
    held = [(module, dict(module._buffers)) for module in model.modules()]
    before = buffers_of(model)
    try:
        yield before
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        restore(model, before)


def _plain(value: Any) -> Any:
    """Turn mappings and dataclasses of any kind into plain dicts, whose tensors are found."""
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    return next((tensor.dtype for tensor in tensors if tensor.dtype in TOLERANCES), torch.float32)


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    """Give each further name of a tied tensor with its first name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model).items()
    }
    return [(name, original) for name, original in names.items() if name != original]


def _first(
    model: nn.Module,
    placement: ModulePlacement,
    run: Callable[[torch.device], list[Tensor]],
    where: torch.device,
    differences: Differences,
    steps: int,
) -> str:
    """Give the first module, in the order in which calls end, whose output differs too much."""
    buffers = buffers_of(model)
    expected = _watched(model, partial(run, where))
    apply(model, placement)
    try:
        for _ in range(steps):
            restore(model, buffers)
            placed = _watched(model, partial(run, _CPU))
            for (name, theirs), (_, ours) in zip(expected, placed, strict=False):
                if len(ours) != len(theirs) or not differences.all_close(ours, theirs):
                    return name
    finally:
        remove(model)
    return ""


def _watched(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, list[Tensor]]]:
    """Run the model; give the outputs of all calls of its innermost modules."""
    seen: list[tuple[str, list[Tensor]]] = []

    def keep(name: str, module: nn.Module, given: Any, returned: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        seen.append((name, [leaf.to(_CPU, copy=True) for leaf in leaves]))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                hook = module.register_forward_hook(partial(keep, name))
                stack.callback(hook.remove)
        run()
    return seen
