"""`torch.export` of a module on fake tensors, with gradients kept or refused but never dropped."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from roost.errors import InputError, UnsupportedOp
from roost.frontends.tracing import own_functions
from roost.frontends.tracing.refusals import line_of_caller, line_of_error, refusal

# Where PyTorch makes the autograd function of a torch.library.custom_op.
_CUSTOM_OPS = "torch._library.autograd"


def export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
) -> ExportedProgram:
    """Export a module that holds fake tensors; raise InputError with the line that fails."""
    try:
        with _GradientGuard(train), _without_graphs():
            exported = torch.export.export(module, args, kwargs, strict=False)
        return decomposed(exported)
    except InputError:
        raise
    except Exception as error:
        line = line_of_error(error)
        if isinstance(error, TypeError) and line is None:
            raise InputError(
                f"the example inputs do not fit the model's forward: {error}"
            ) from error
        raise refusal(error, line) from error


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """The same program, with updates of buffers as outputs; names of tensors stay."""
    others = _other_names(exported)
    back = {other: name for name, other in others.items()}
    _rename(exported, others)
    try:
        result: ExportedProgram = exported.run_decompositions({})
    finally:
        _rename(exported, back)
    _rename(result, back)
    return result


def _other_names(exported: ExportedProgram) -> dict[str, str]:
    """Names of tensors that PyTorch would lose, each with another name.

    It restores the modules as parts of a GraphModule, which has attributes of its own: `graph`,
    `code`, `meta` and more. A module of the model by that name would be lost.
    """
    own = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    names = [*exported.state_dict, *exported.constants]
    return {name: f"roost_{name}" for name in names if hasattr(own, name.partition(".")[0])}


def _rename(exported: ExportedProgram, others: dict[str, str]) -> None:
    """Give tensors of an exported program other names, in place and in the same order."""
    for values in (exported.state_dict, exported.constants):
        renamed = {others.get(name, name): value for name, value in values.items()}
        values.clear()
        values.update(renamed)
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target is not None:
            spec.target = others.get(spec.target, spec.target)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence PyTorch's warnings and logs, and turn off oneDNN's LSTM, which is opaque."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    handlers = [h for each in loggers if each.name.startswith("torch") for h in each.handlers]
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Keep off standard error the graph that PyTorch prints there when an export fails.

    It is hundreds of lines long, and our error names the line. Other text goes through.
    """
    written = io.StringIO()
    graph = ""
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)


def _nothing(record: logging.LogRecord) -> bool:
    return False


class _GradientGuard(TorchFunctionMode):
    """Keeps what a model does to its gradients, which an export would drop without a word.

    It detaches values made under `torch.no_grad`, and turns `.data` into `.detach()`. While
    training it keeps a derivative of the user's own, and refuses a hook on a gradient.
    """

    def __init__(self, train: bool) -> None:
        super().__init__()
        self.train = train
        self.apply = vars(torch.autograd.Function)["apply"]

    def __enter__(self) -> Any:
        if self.train:
            guarded = classmethod(self._apply)
            torch.autograd.Function.apply = guarded  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        torch.autograd.Function.apply = self.apply  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep a function of the model whole, or refuse it; let that of a custom op pass."""
        apply = self.apply.__get__(None, function)
        if function.__module__ == _CUSTOM_OPS:
            return apply(*args, **kwargs)
        line = line_of_caller()
        place = f" at {line}" if line else ""
        if not kwargs and own_functions.is_traceable(function, args):
            return own_functions.call(apply, f"{function.__name__}{place}", args)
        raise UnsupportedOp(
            f"{function.__name__}{place} is a torch.autograd.Function with a derivative of its "
            "own that runs other functions or modules, which cannot be captured for training; "
            "write it with ordinary ops, or as a torch.library.custom_op with register_autograd"
        )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        hooks = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
        if function in hooks and self.train:
            raise UnsupportedOp("a hook on a gradient cannot be captured for training; remove it")
        value = function(*args, **(kwargs or {}))
        if not self.train or torch.is_grad_enabled():
            return value
        return tree_map_only(Tensor, _detached, value)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_floating_point() or tensor.is_complex() else tensor
