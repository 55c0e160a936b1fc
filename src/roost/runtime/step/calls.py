"""Inputs and outputs of a call of a model, in the forms that users give and models return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from roost.errors import InputError


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn inputs (a tensor, a tuple or a dict) into the arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def input_tensors(inputs: Any, names: tuple[str, ...]) -> list[Tensor]:
    """Give the tensors among the inputs, in the order in which the program takes them."""
    if isinstance(inputs, Mapping):
        tensors = {name: value for name, value in _by_name(inputs) if isinstance(value, Tensor)}
        missing = [name for name in names if name not in tensors]
        if not missing:
            return [tensors[name] for name in names]
        if len(missing) < len(names):
            raise InputError(
                f"the step takes {', '.join(names)}; the inputs lack {', '.join(missing)}"
            )
    return [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]


def check_flags(inputs: Any, flags: Mapping[str, Any]) -> None:
    """Raise if a non-tensor input differs from the captured one.

    The captured program is valid for that value only.
    """
    given: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        given = {name: value for name, value in _by_name(inputs) if name in flags}
    else:
        values = [value for value in tree_leaves(inputs) if not isinstance(value, Tensor)]
        if len(values) == len(flags):
            given = dict(zip(flags, values, strict=True))
    for name, value in given.items():
        if value is not flags[name] and value != flags[name]:
            raise InputError(
                f"input {name!r} is {value!r}; it was captured with {flags[name]!r}: capture the "
                f"model again with this value"
            )


def loss_of(returned: Any) -> Tensor:
    """Find the loss among a model's outputs as capturing does: the only one, `loss`, or the first.

    Raises `InputError` if there is none.
    """
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
    else:
        loss = returned.loss if hasattr(returned, "loss") else returned[0]
    if not isinstance(loss, Tensor):
        raise InputError("the model returned no loss")
    return loss


def _by_name(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Walk through inputs; give each value under the name that exporting gives it."""
    if isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _by_name(each, f"{name}_{key}" if name else str(key))
    else:
        yield name, value
