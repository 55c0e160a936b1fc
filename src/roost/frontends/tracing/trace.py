"""A PyTorch module as one functional program: forward, and for training loss and gradients.

Nothing is computed and no weight is copied: everything is traced on fake tensors. In the program
every value is made once and never changed, so any op may run on any device. The route:

1. `fake_copy` copies the module with fake tensors in place of its own; tied weights stay one.
2. `torch.export`, not strict, runs the model's Python once. A model that depends on data fails
   here, with its line.
3. `decomposed` turns updates of buffers, as in BatchNorm, into outputs. Otherwise they
   would change behind the graph's back.
4. `make_fx` traces that graph and `torch.autograd.grad` of its loss. Hooks on the autograd nodes
   give each backward op its module.
5. If an op still writes in place (LSTM gates, dropout masks), a second trace functionalises it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from roost.errors import InputError, UnsupportedOp
from roost.frontends.tracing.dispatched import refuse_dispatched
from roost.frontends.tracing.export import decomposed, export, quiet
from roost.frontends.tracing.exported_inputs import check_fixed_shapes
from roost.frontends.tracing.fake_model import fake_copy, fake_tensors, loose_tensors
from roost.frontends.tracing.joint_trace import joint_program
from roost.frontends.tracing.own_functions import noting
from roost.frontends.tracing.program import Program


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    loss: Callable[..., Tensor] | None = None,
) -> Program:
    """Trace a module on example inputs; only shapes and types of tensors matter.

    A model of transformers is traced without its cache of keys and values, which is not a tensor.
    """
    _check_model(model, train)
    with without_cache(model), quiet(), noting():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        module = fake_copy(model, mode).train(train)
        if loss is not None:
            module.forward = _with_loss(module.forward, loss)
        fake_args, fake_kwargs = fake_tensors((args, dict(kwargs or {})), mode)
        with mode:
            exported = export(module, fake_args, fake_kwargs, train)
        program = joint_program(exported, mode, train)
    values = loose_tensors(model).items()
    loose = {name: value for name, value in values if name in program.residents}
    return replace(program, constants={**program.constants, **loose})


def trace_exported(exported: torch.export.ExportedProgram, *, train: bool = False) -> Program:
    """Trace a program that was exported before, and perhaps saved."""
    check_fixed_shapes(exported)
    with quiet():
        return joint_program(
            decomposed(exported), FakeTensorMode(allow_non_fake_inputs=True), train
        )


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Stop a model of transformers from returning its cache; other models stay as they are."""
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in every if getattr(config, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _with_loss(forward: Callable[..., Any], loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward that returns the loss, under the names of the model itself."""

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        try:
            return loss(output)
        except TypeError as error:
            raise InputError(
                f"loss cannot be called with the model's output alone: {error}. Where it needs "
                "labels, let the model take them as inputs and return its loss"
            ) from error

    return with_loss


def _check_model(model: Any, train: bool) -> None:
    """Raise if the model would be traced wrong, or not at all."""
    if not isinstance(model, nn.Module):
        given = model.__name__ if isinstance(model, type) else type(model).__name__
        raise InputError(
            f"a torch.nn.Module is needed, not {given}; wrap a function in a module, call a class "
            "to make one"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "a scripted module cannot be captured; give the module it was scripted from"
        )
    refuse_dispatched(model)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} has no shape yet; run the model once on real inputs first"
            )
    for name, module in model.named_modules():
        if train and (module._backward_hooks or module._backward_pre_hooks):
            raise UnsupportedOp(
                f"module {name or type(model).__name__!r} has a backward hook, which a graph "
                "cannot hold; remove it"
            )
