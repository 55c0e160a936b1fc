"""A model's own `torch.autograd.Function`, kept with its derivative while training is traced.

An export would drop the derivative. So the export sees one op, `roost::own_function`. The joint
trace then calls the function itself, and so traces the ops of its forward and of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from roost.errors import UnsupportedOp


@dataclass
class _Call:
    """One call of a function, with holes in its arguments where the tensors go."""

    apply: Callable[..., Any]  # PyTorch's, bound to the function
    name: str  # the function and the line that calls it
    leaves: list[Any]
    given: TreeSpec
    returned: TreeSpec | None = None

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call the function; return the leaves of its result."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _HOLE else leaf for leaf in self.leaves]
        args = tree_unflatten(leaves, self.given)
        results, self.returned = tree_flatten(self.apply(*args))
        if not all(isinstance(result, Tensor) for result in results):
            raise UnsupportedOp(f"{self.name} returns more than tensors, which is not supported")
        return results


_HOLE = object()
_CALLS: list[_Call] = []  # of the trace that runs now, in order


def is_traceable(function: type, args: tuple[Any, ...]) -> bool:
    """True where the function gets all its tensors as arguments.

    One that runs a module, as checkpoints do, gives gradients to weights that it is not given.
    """
    leaves, _ = tree_flatten(args)
    own = not function.__module__.startswith("torch.")
    return own and not any(isinstance(leaf, nn.Module) or callable(leaf) for leaf in leaves)


def call(apply: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """Call a function as one op, so that an export keeps it whole."""
    leaves, given = tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    held = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    entry = _Call(apply, name, held, given)
    _CALLS.append(entry)
    results = own_function(tensors, len(_CALLS) - 1)
    assert entry.returned is not None
    return tree_unflatten(list(results), entry.returned)


@torch.library.custom_op("roost::own_function", mutates_args=())
def own_function(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    """The results of a call that was noted; no captured program holds this op."""
    raise NotImplementedError


@own_function.register_fake
def _(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    versions = [tensor._version for tensor in tensors]
    results = _CALLS[call].run(tensors)
    if versions != [tensor._version for tensor in tensors]:
        raise UnsupportedOp(f"{_CALLS[call].name} changes its input, which is not supported")
    return [
        torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        for result in results
    ]


def run_noted(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    """Call the function behind an op, with its own derivative."""
    return _CALLS[call].run(tensors)


def check_given(module: fx.GraphModule) -> None:
    """Raise if a function read a tensor that is not among its arguments: its value is unknown."""
    for node in module.graph.nodes if _CALLS else ():
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target)), FakeTensor):
            names = ", ".join(dict.fromkeys(entry.name for entry in _CALLS))
            raise UnsupportedOp(
                f"{names} reads a tensor that it is not given; give it every tensor it reads"
            )


@contextmanager
def noting() -> Iterator[None]:
    """Forget the calls when a trace ends, and refuse gradients that a backward writes itself."""
    before = list(_CALLS)
    _CALLS.clear()
    try:
        with mock.patch.object(torch.autograd, "backward", _refuse_backward):
            yield
    finally:
        _CALLS[:] = before


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedOp("a model that calls backward itself cannot be captured")
