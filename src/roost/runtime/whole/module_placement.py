"""The placement of a model's modules: where weights live and modules run, and its checks.

A plan holds one; `apply.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from roost.core.arrays import digest
from roost.errors import InputError, UnknownName
from roost.frontends.tracing.dispatched import refuse_dispatched
from roost.runtime.whole.tensor_moves import torch_device
from roost.runtime.whole.wrapped_calls import WrappedForward

PLACED = "_roost_placed"  # attribute of a placed model


@dataclass(frozen=True)
class ModulePlacement:
    """The homes of a model's weights, and the devices of its modules."""

    main: str  # the device of all that is not mentioned
    # Parameter or buffer -> device; tied ones under one of their names, or all.
    home: Mapping[str, str]
    # Modules that run on another device than the main one.
    runs_on: Mapping[str, str] = field(default_factory=dict)
    # Module -> weights that are brought for each call.
    streamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    window: int = 0  # bytes on the main device for weights on their way
    model: str = ""  # signature of the model that it is for; "": any
    # A call with more rows in a tensor runs on the main device, not elsewhere. 0: never.
    few_rows: int = 0
    # Modules that run elsewhere and whose outputs stay there, where they are read.
    stays: tuple[str, ...] = ()
    # Streamed modules whose weights are copied in the call itself, without the window.
    on_the_spot: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for module in self.stays:
            if module not in self.runs_on:
                raise InputError(
                    f"the outputs of module {module!r} are to stay elsewhere, but it runs on "
                    f"{self.main}"
                )
        if len(set(self.on_the_spot)) < len(self.on_the_spot):
            raise InputError("on_the_spot names a module twice")
        for module in self.on_the_spot:
            if module not in self.streamed:
                raise InputError(
                    f"the weights of module {module!r} are to be copied in its call, but it has "
                    f"no streamed weights"
                )
        for module, names in self.streamed.items():
            if module in self.runs_on:
                raise InputError(
                    f"module {module!r} runs on {self.runs_on[module]}; its weights cannot be "
                    f"streamed too"
                )
            for name in names:
                if self.home.get(name) in (None, self.main):
                    raise InputError(
                        f"{name!r} is streamed to {module!r}, but lives on {self.main} already"
                    )


def signature(model: nn.Module) -> str:
    """Give a digest of the names, shapes and types of parameters and buffers."""
    tensors = sorted(named_tensors(model).items())
    return digest([f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors])


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Give parameters and buffers under all their names."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def is_placed(model: nn.Module) -> bool:
    return PLACED in model.__dict__


def check_signature(model: nn.Module, placement: ModulePlacement) -> None:
    """Raise if the placement is for another model."""
    if placement.model and placement.model != signature(model):
        unknown = sorted(set(placement.home) - set(named_tensors(model)))
        lacks = f", which has no {unknown[0]!r}" if unknown else ""
        raise InputError(
            f"the plan is for model {placement.model}, this model is {signature(model)}{lacks}"
        )


def check(model: nn.Module, placement: ModulePlacement) -> None:
    """Raise if the model cannot be placed so; nothing has been moved yet."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(model).__name__}")
    for module in model.modules():
        if is_placed(module) or isinstance(module.__dict__.get("forward"), WrappedForward):
            raise InputError(
                "the model is placed already; roost's plan.remove(model) takes that off first"
            )
    refuse_dispatched(model)
    tensors = named_tensors(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise InputError(
                f"{name!r} is on the meta device and has no value; build the model with its weights"
            )
        if tensor.layout != torch.strided:
            raise InputError(f"{name!r} is sparse; only dense weights can be placed")
    _check_streamed(model, placement)
    check_signature(model, placement)
    for name in placement.home:
        if name not in tensors:
            raise UnknownName("parameter or buffer of the model", name, tensors)
    for name in (*placement.runs_on, *placement.streamed):
        if name not in modules:
            raise UnknownName("module of the model", name, modules)
    for device in {placement.main, *placement.home.values(), *placement.runs_on.values()}:
        torch_device(device)


def _check_streamed(model: nn.Module, placement: ModulePlacement) -> None:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for module, names in placement.streamed.items():
        for name in names:
            if name in buffers:
                raise InputError(
                    f"{name!r} of module {module!r} is a buffer; only parameters can be streamed"
                )
            if not name.startswith(f"{module}."):
                raise InputError(
                    f"{name!r} is not inside module {module!r}, so it cannot be streamed to it"
                )
    for module in placement.streamed:
        for top in placement.runs_on:
            if module == top or module.startswith(f"{top}."):
                raise InputError(
                    f"module {module!r} is inside {top!r}, which runs elsewhere; nothing can be "
                    f"streamed to it"
                )
