"""Batches of a training step: which inputs carry the batch, and how they are cut into microbatches.

An input carries the batch if its first dimension has the size of the batch. Inputs without it, such
as masks and positions, are shared by all microbatches. `batch_dims` says it where that is unclear.
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from roost.errors import InputError, UnknownName
from roost.frontends.torch import split_inputs

BatchDims = Mapping[str | int, int | None]


def bound_call(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> BoundArguments:
    """The arguments of a call of a model, in the order of its forward."""
    try:
        return inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        raise InputError(
            f"the batch does not fit {type(model).__name__}.forward: {error}; give what the model "
            "takes, as in the example batch"
        ) from None


def check_values(example: BoundArguments, given: BoundArguments) -> None:
    """Raise if an input that is no tensor differs from the example's: the step holds its value."""
    before, now = _values(example), _values(given)
    for name in [*before, *(name for name in now if name not in before)]:
        one, other = before.get(name), now.get(name)
        if one is not other and (type(one) is not type(other) or one != other):
            raise InputError(
                f"{name!r} is {other!r}; the example batch had {one!r}, and the captured step "
                "holds that value: make a trainer for this one"
            )


def _values(bound: BoundArguments) -> dict[str, Any]:
    """The inputs of a call that are no tensors, defaults included."""
    whole = BoundArguments(bound.signature, OrderedDict(bound.arguments))
    whole.apply_defaults()
    return {
        name: each for name, each in named_inputs(whole).items() if not isinstance(each, Tensor)
    }


def named_inputs(bound: BoundArguments) -> dict[str, Any]:
    """All inputs of a call by name, as exporting names them: `labels`, or `batch_ids` in a dict."""
    return dict(leaf for name, value in bound.arguments.items() for leaf in _leaves(name, value))


def call_of(batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Arguments of a call of the model; one tuple, list or dict alone is a whole batch."""
    whole = len(batch) == 1 and not named and isinstance(batch[0], tuple | list | Mapping)
    return split_inputs(batch[0]) if whole else (batch, named)


@dataclass(frozen=True)
class BatchSplit:
    """The batch dimension of each input tensor, and the size of the batch."""

    size: int
    example: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor
    dims: Mapping[str, int | None]  # tensor -> its batch dimension; None: shared by microbatches

    @property
    def shared(self) -> tuple[str, ...]:
        """The inputs that all microbatches share."""
        return tuple(name for name, dim in self.dims.items() if dim is None)

    def check_count(self, count: int) -> None:
        """Raise if the batch cannot be cut into so many microbatches of one size."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"microbatches is {count!r}; it must be a whole number, 1 or more")
        if count > self.size:
            raise InputError(
                f"microbatches is {count}, but the batch has {self.size} samples; give at most "
                f"{self.size}, or a larger batch"
            )
        if self.size % count:
            whole = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise InputError(
                f"microbatches is {count}, which does not divide the batch of {self.size}: the "
                f"last microbatch would be smaller. Give one of {whole}"
            )

    def microbatch(self, bound: BoundArguments, count: int) -> tuple[Any, Any]:
        """Positional and named arguments of a call for the first microbatch."""
        self.check_count(count)
        leaves, tree = tree_flatten((bound.args, bound.kwargs))
        cut = [
            value if self.dims.get(name) is None else self._cut(name, value, count)[0]
            for name, value in zip(named_inputs(bound), leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(cut, tree)
        return args, kwargs

    def parts(self, tensors: Mapping[str, Tensor], count: int) -> dict[str, list[Tensor]]:
        """Each tensor of a batch in microbatches; one that is shared is a list of one."""
        self._check(tensors)
        return {
            name: [value] if self.dims[name] is None else self._cut(name, value, count)
            for name, value in tensors.items()
        }

    def _cut(self, name: str, value: Tensor, count: int) -> list[Tensor]:
        dim = self.dims[name]
        assert dim is not None
        return list(torch.split(value, self.size // count, dim))

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if a batch is not of the shapes of the example."""
        if odd := sorted(set(tensors) ^ set(self.dims)):
            raise InputError(
                f"the batch must have the tensors {', '.join(self.dims)}; missing or unknown: "
                f"{', '.join(odd)}"
            )
        for name, value in tensors.items():
            if value.is_meta or value.layout != torch.strided:
                raise InputError(f"{name!r} must be a dense tensor with values")
            shape = tuple(value.shape)
            wanted, dtype = self.example[name]
            if value.dtype != dtype:
                raise InputError(f"{name!r} is of {value.dtype}; the example batch had {dtype}")
            if shape == wanted:
                continue
            dim = self.dims[name]
            if dim is not None and len(shape) > dim and shape[dim] != self.size:
                raise InputError(
                    f"{name!r} has {shape[dim]} samples; the trainer was made for batches of "
                    f"{self.size}. Leave out a smaller last batch (drop_last=True in a "
                    "DataLoader), or make a trainer for this size"
                )
            raise InputError(
                f"{name!r} is {list(shape)}; the example batch had {list(wanted)}. "
                "Pad it to that size, or make a trainer for this size"
            )


def batch_split(inputs: Mapping[str, Any], batch_dims: BatchDims | None = None) -> BatchSplit:
    """Find the batch in the inputs of a call, by name as `named_inputs` gives them.

    `batch_dims` overrides it for some inputs, by name or by number among the tensors: a dimension,
    or None for an input without the batch.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    given = _given(tensors, batch_dims or {})
    sizes = {tensors[name].shape[dim] for name, dim in given.items() if dim is not None}
    if len(sizes) > 1:
        raise InputError(
            f"batch_dims gives batches of {' and '.join(map(str, sorted(sizes)))}; all inputs "
            "must have the same number of samples"
        )
    left = {name: value for name, value in tensors.items() if name not in given}
    size = sizes.pop() if sizes else _common_size(left)
    if size < 1:
        raise InputError("the batch has no samples; give an example batch with some")
    dims = {
        name: given[name] if name in given else 0 if value.dim() and len(value) == size else None
        for name, value in tensors.items()
    }
    example = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    return BatchSplit(size, example, dims)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}_{key}", each)
    else:
        yield name, value


def _given(tensors: Mapping[str, Tensor], batch_dims: BatchDims) -> dict[str, int | None]:
    """The overrides by name, checked."""
    names = list(tensors)
    if not isinstance(batch_dims, Mapping):
        raise InputError(
            f'batch_dims is {batch_dims!r}; give dimensions by input, as in {{"mask": None}}'
        )
    given: dict[str, int | None] = {}
    for key, dim in batch_dims.items():
        if isinstance(key, int) and 0 <= key < len(names):
            name = names[key]
        elif isinstance(key, str) and key in tensors:
            name = key
        else:
            raise UnknownName("input of the model", str(key), names)
        if dim is None:
            given[name] = None
            continue
        most = tensors[name].dim()
        if isinstance(dim, bool) or not isinstance(dim, int) or not -most <= dim < most:
            raise InputError(
                f"batch_dims of {name!r} is {dim!r}; the tensor is {list(tensors[name].shape)}: "
                "give the number of one of its dimensions, or None"
            )
        given[name] = dim % most
    return given


def _common_size(tensors: Mapping[str, Tensor]) -> int:
    """The size of the batch by first dimensions; those of size 1 are for broadcasting."""
    first = {name: len(value) for name, value in tensors.items() if value.dim()}
    if not first:
        raise InputError(
            "no input has a batch dimension: the model takes no tensor with dimensions, so the "
            "batch cannot be split into microbatches; pass the samples as a tensor"
        )
    wide = [size for size in first.values() if size != 1] or [1]
    counts = Counter(wide).most_common(2)
    size, times = counts[0]
    if len(counts) > 1 and (counts[1][1] == times or wide[0] != size):
        shown = ", ".join(f"{name!r} {list(tensors[name].shape)}" for name in first)
        one = next(name for name, length in first.items() if length not in (wide[0], 1))
        raise InputError(
            f"the first dimensions of the inputs differ, and which one is the batch is unclear: "
            f'{shown}. Say it, as in batch_dims={{"{one}": None}} for an input that all samples '
            "share"
        )
    return size
