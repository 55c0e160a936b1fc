"""A copy of a module with fake tensors, which have shapes and types but no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from roost.errors import InputError


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A deep copy of the module whose tensors are fake and on the CPU; tied weights stay one."""
    memo: dict[int, Any] = {}  # deepcopy takes the tensors in here for already copied
    for tensor in (*model.parameters(), *model.buffers(), *loose_tensors(model).values()):
        fake = fake_tensors(tensor, mode)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(f"the model cannot be copied for capture: {error}") from error
    for name in loose_tensors(copied):
        # The export traces a buffer; of a plain attribute it would ask the value, which is fake.
        path, _, attribute = name.rpartition(".")
        module = copied.get_submodule(path)
        value = vars(module).pop(attribute)
        module.register_buffer(attribute, value, persistent=False)
    return copied


def loose_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of a module, by name."""
    return {
        f"{path}.{attribute}".removeprefix("."): value
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def fake_tensors(values: Any, mode: FakeTensorMode) -> Any:
    """The same structure with every tensor replaced by a fake one on the CPU."""

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )

    return tree_map_only(Tensor, fake, values)
