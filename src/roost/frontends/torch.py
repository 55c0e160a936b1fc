"""PyTorch: a module and example inputs, a `.pt2` file, or `package.module:callable`, to a Graph.

`trace` turns the model into a program; `captured_step` turns the program into a graph.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.core.graph import Graph
from roost.errors import InputError, UnknownName
from roost.frontends._trust import check_trust
from roost.frontends.tracing.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roost.frontends.tracing.captured_step import CapturedStep


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    train: bool = False,
    optimizer: str = "sgd",
    loss: Callable[..., Tensor] | None = None,
    name: str | None = None,
) -> Graph:
    """The graph of one inference step, or with `train` of one training step.

    A training step is forward, loss, backward and the optimizer's updates. The model returns its
    loss, or `loss` computes it from the model's output. `example_inputs` is a tensor, a tuple of
    arguments or a dict of keyword arguments. Only shapes and types matter; model and inputs may be
    on the meta device. Raises UnsupportedOp if the model decides by the values of tensors.
    """
    return step_of(
        model, example_inputs, train=train, optimizer=optimizer, loss=loss, name=name
    ).graph


def step_of(
    model: nn.Module,
    example_inputs: Any,
    *,
    train: bool = False,
    optimizer: str = "sgd",
    loss: Callable[..., Tensor] | None = None,
    name: str | None = None,
    keep_gradients: bool = False,
) -> CapturedStep:
    """Capture like `capture`; return graph and program, as the runtime and the profiler need.

    `keep_gradients`: add each gradient to a state and leave the parameters as they are.
    """
    from roost.frontends.tracing.captured_step import captured_step
    from roost.frontends.tracing.trace import trace

    if not isinstance(optimizer, str):
        known = ", ".join(OPTIMIZERS)
        raise InputError(f"optimizer is {type(optimizer).__name__}; give its name, one of {known}")
    if optimizer not in OPTIMIZERS:
        raise UnknownName("optimizer", optimizer, OPTIMIZERS)
    if name is not None and not isinstance(name, str):
        raise InputError(f"name is {name!r}; it must be a text")
    args, kwargs = split_inputs(example_inputs)
    try:
        program = trace(model, args, kwargs, train=train, loss=loss)
        return captured_step(
            program,
            name or type(model).__name__,
            optimizer if train else None,
            keep_gradients,
        )
    # PyTorch refuses sparse gradients and nested tensors.
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"the model cannot be captured: {str(error).strip().splitlines()[0]}"
        ) from error


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments of a model's call."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


@dataclass(frozen=True)
class Torch:
    """Reads models from files and by name."""

    suffixes = (".pt2",)

    def read(
        self,
        source: str | Path,
        *,
        train: bool = False,
        optimizer: str = "sgd",
        name: str | None = None,
        trust: bool = False,
    ) -> Graph:
        """The graph of a `.pt2` file, or of the module that `package.module:callable` returns.

        PyTorch runs code that it finds in a `.pt2` file: such a file needs `trust`.
        """
        if str(source).endswith(".pt2"):
            path = Path(source)
            if not path.is_file():
                raise InputError(f"{path}: {'is a directory' if path.is_dir() else 'no such file'}")
            check_trust(path, trust, "PyTorch unpickles objects and evaluates texts of a .pt2 file")
            return self._read_exported(path, train=train, optimizer=optimizer, name=name)
        model, inputs = load_model(str(source))
        return capture(model, inputs, train=train, optimizer=optimizer, name=name)

    def _read_exported(self, path: Path, *, train: bool, optimizer: str, name: str | None) -> Graph:
        import torch

        from roost.frontends.tracing.captured_step import captured_step
        from roost.frontends.tracing.trace import trace_exported

        try:
            exported = torch.export.load(str(path))
        except Exception as error:  # a damaged archive fails in many ways
            raise InputError(
                f"{path}: is not a program saved by torch.export.save: {error}"
            ) from error
        program = trace_exported(exported, train=train)
        return captured_step(program, name or path.stem, optimizer if train else None).graph


def load_model(source: str, settings: Mapping[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """The module and example inputs that `package.module:callable` returns.

    The callable takes the settings. It returns (module, inputs), or a module that has
    `example_inputs`.
    """
    from torch import nn

    module_name, _, attribute = source.partition(":")
    if not attribute:
        raise InputError(f"{source!r} is not package.module:callable")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules in the working folder
    try:
        model = getattr(importlib.import_module(module_name), attribute)
        if settings or (callable(model) and not isinstance(model, nn.Module)):
            model = model(**(settings or {}))
        if isinstance(model, nn.Module) and hasattr(model, "example_inputs"):
            inputs = model.example_inputs
            return model, inputs() if callable(inputs) else inputs
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        given = ", ".join(f"{key}={value!r}" for key, value in (settings or {}).items())
        what = f"{source!r} with {given}" if given else f"{source!r}"
        raise InputError(f"cannot load {what}: {type(error).__name__}: {error}") from error
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], nn.Module):
        return model
    raise InputError(
        f"{source!r} gave {type(model).__name__}; it must return (module, example_inputs), or a "
        "module that has example_inputs"
    )
