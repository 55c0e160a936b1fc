"""The ops of a captured step as calls to time, each known by its signature.

The signature is the op with the shapes, strides and types of its tensors and all its other
arguments. New tensors are made from it, so timing needs nothing of the model, and equal ops are
timed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from roost.core.graph import INPUT
from roost.cost_models.timing.overwrites import overwrites
from roost.cost_models.timing.updates import UPDATES
from roost.frontends.tracing.captured_step import CapturedStep, ResidentUpdate
from roost.frontends.tracing.flop import tensors_in
from roost.frontends.tracing.program import is_getitem
from roost.frontends.tracing.runnable import runnable

aten = torch.ops.aten
_INPUTS, _MOST_INPUTS = 128 * 2**20, 64  # bytes and number of inputs taken in turn
_BLOCK = 2**20  # numbers drawn at random; longer tensors repeat them


@dataclass(frozen=True)
class TensorSpec:
    """The layout of a tensor to make; `below` limits the values of indices."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    below: int = 0

    @classmethod
    def of(cls, tensor: Tensor, below: int = 0) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, below)

    def __repr__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        strides = "" if self.stride == _dense(self.shape) else f"|{','.join(map(str, self.stride))}"
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}{strides}]" + (
            f"<{self.below}" if self.below else ""
        )

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        return self.extent * self.dtype.itemsize

    def tensor(self, device: torch.device) -> Tensor:
        block = _block(self.dtype, self.below, device)
        if self.extent <= len(block):
            memory = block[: self.extent].clone()
        else:
            memory = block.repeat(-(-self.extent // len(block)))
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class TimedCall:
    """A call with arguments to be made."""

    signature: str
    call: Callable[..., Any] = field(repr=False)
    args: Any  # of (args, kwargs): TensorSpec for tensors
    num_bytes: int  # of its input tensors
    made_bytes: int  # of its output
    weight_bytes: int = 0  # of the largest parameter that it reads

    def calls(self, device: torch.device, copies: int) -> list[Callable[[], Any]]:
        """The call with tensors on a device, several times, each with tensors of its own."""
        return [self._call(device) for _ in range(copies)]

    def _call(self, device: torch.device) -> Callable[[], Any]:
        args, kwargs = _made(self.args, device)
        call = self.call
        if kwargs:
            return lambda: call(*args, **kwargs)
        return lambda: call(*args)


@dataclass(frozen=True)
class TimedOp:
    """The calls of a device for one op: the op itself, and the views that it needs first."""

    op: int
    call: TimedCall
    views: tuple[TimedCall, ...]


def timed_ops(step: CapturedStep) -> Iterator[TimedOp]:
    """The ops that take time: all but inputs, parameters, and ops for one of several outputs."""
    seen: set[fx.Node] = set()
    known: dict[fx.Node, TimedCall] = {}
    over = overwrites(step)
    for op, name in enumerate(step.graph.op_names):
        if name in step.updates:
            update = step.updates[name]
            values = [update.value]
            call = _update_call(step, update, step.graph.kinds[op])
        else:
            node = step.maker.get(name)
            if node is None or node.op != "call_function" or is_getitem(node):
                continue
            values = node.all_input_nodes
            call = _op_call(step, node, *over.get(node, ()))
        views = [view for value in values for view in _views(step, value, seen)]
        calls = (known.setdefault(view, _op_call(step, view)) for view in views)
        yield TimedOp(op, call, tuple(calls))


def timed_inputs(step: CapturedStep) -> Iterator[TimedOp]:
    """The inputs of a step: they come from memory of the host, which takes time to a GPU."""
    for op in np.flatnonzero(step.graph.phase == INPUT).tolist():
        spec = TensorSpec.of(step.maker[step.graph.op_names[op]].meta["val"])
        args: Any = ((spec,), {})
        signature = f"input{_arguments_text(args)}"
        call = TimedCall(signature, _send_input, args, spec.num_bytes, spec.num_bytes)
        yield TimedOp(op, call, ())


def _send_input(on_device: Tensor) -> Tensor:
    """Send a tensor through locked memory, like the runtime; it comes from no cache."""
    on_host = next(_on_host(tuple(on_device.shape), on_device.dtype))
    pinned = torch.empty_like(on_host, pin_memory=True).copy_(on_host)
    return pinned.to(on_device.device, non_blocking=True)


@lru_cache(4)
def _on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    first = torch.zeros(shape, dtype=dtype)
    copies = min(_MOST_INPUTS, _INPUTS // max(first.nbytes, 1))
    return cycle([first, *(first.clone() for _ in range(copies))])


def _views(step: CapturedStep, node: fx.Node, seen: set[fx.Node]) -> Iterator[fx.Node]:
    """Views before a value: the runtime makes one once, but that of a parameter for each reader."""
    owner = step.op_of.get(node)
    if owner is None or step.maker[owner] is node or node in seen:
        return
    for source in node.all_input_nodes:
        yield from _views(step, source, seen)
    if not is_getitem(node):
        yield node
    if not step.graph.is_parameter[step.graph.index_of(owner)]:
        seen.add(node)


def _op_call(
    step: CapturedStep, node: fx.Node, in_place: Any = None, operand: int = 0
) -> TimedCall:
    """The call of a node; in place, the operand that it overwrites comes first."""
    target = runnable(node.target)
    fakes = fx.map_arg((node.args, dict(node.kwargs)), lambda other: _value(step, other))
    below = _limits(target, fakes[0])
    args = _specified(fakes, below)
    if in_place is not None:
        given = list(args[0])
        given[0], given[operand] = given[operand], given[0]
        target = in_place
        args = (tuple(given), args[1])
    weights = [source for source in node.all_input_nodes if _is_parameter(step, source)]
    if step.maker[step.op_of[node]] is not node:
        weights = []  # a view reads nothing
    return TimedCall(
        f"{target}{_arguments_text(args)}",
        target,
        args,
        num_bytes=sum(spec.num_bytes for spec in _specs(args)),
        made_bytes=sum(map(_bytes, tensors_in(node.meta.get("val")))),
        weight_bytes=max((_bytes(_value(step, weight)) for weight in weights), default=0),
    )


def _update_call(step: CapturedStep, update: ResidentUpdate, kind: str) -> TimedCall:
    resident = TensorSpec.of(_value(step, step.maker[update.resident]))
    value = TensorSpec.of(_value(step, update.value))
    args: Any = ((resident, value, *[resident] * len(update.states)), {})
    size = sum(spec.num_bytes for spec in args[0])
    signature = f"update.{kind}{_arguments_text(args)}"
    return TimedCall(signature, UPDATES[kind], args, size, 0, resident.num_bytes)


def _value(step: CapturedStep, node: fx.Node) -> Any:
    """The fake tensor of a node; the real one of a constant."""
    if node.op == "get_attr":
        return getattr(step.program.module, str(node.target))
    return node.meta.get("val")


def _is_parameter(step: CapturedStep, node: fx.Node) -> bool:
    owner = step.op_of.get(node)
    return owner is not None and bool(step.graph.is_parameter[step.graph.index_of(owner)])


def _bytes(value: Any) -> int:
    return TensorSpec.of(value).num_bytes if isinstance(value, Tensor) else 0


# Ops with their indices as third argument, or as a list for the first dimensions.
_INDEXED_BY_ARGUMENT = (
    aten.gather,
    aten.index_select,
    aten.scatter,
    aten.scatter_add,
    aten.index_add,
    aten.scatter_reduce,
)
_INDEXED_BY_LIST = (aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put)


def _limits(target: Any, args: tuple[Any, ...]) -> dict[int, int]:
    """The limit of each tensor of indices, by its id. An op that is not here gets zeros."""
    packet = getattr(target, "overloadpacket", target)
    try:
        if packet is aten.embedding:
            return {id(args[1]): args[0].shape[0]}
        if packet is aten.embedding_dense_backward:
            return {id(args[1]): args[2]}
        if packet in _INDEXED_BY_ARGUMENT:
            return {id(args[2]): args[0].shape[args[1]]}
        if packet in _INDEXED_BY_LIST:
            pairs = zip(args[1], args[0].shape, strict=False)
            return {id(indices): size for indices, size in pairs if indices is not None}
        if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
            return {id(args[1]): _num_classes(args[0])}
        if packet in (aten.nll_loss_backward, aten.nll_loss2d_backward):
            return {id(args[2]): _num_classes(args[1])}
        if packet is aten.max_pool2d_with_indices_backward:
            return {id(args[-1]): math.prod(args[1].shape[-2:])}
    except (IndexError, AttributeError, TypeError):
        pass
    return {}


def _num_classes(logits: Tensor) -> int:
    return logits.shape[min(1, logits.dim() - 1)]


def index_limits(step: CapturedStep) -> dict[str, int]:
    """The limits of the inputs of a step that are indices, by the op of the input."""
    limits: dict[str, int] = {}
    for node in step.program.module.graph.nodes:
        if node.op != "call_function":
            continue
        below = _limits(node.target, fx.map_arg(node.args, lambda other: _value(step, other)))
        for source in node.all_input_nodes:
            limit = below.get(id(_value(step, source)))
            owner = step.op_of.get(source)
            if limit is not None and owner is not None:
                limits[owner] = min(limit, limits.get(owner, limit))
    return limits


def _specified(value: Any, below: Mapping[int, int]) -> Any:
    """Arguments with specs for tensors."""

    def spec(tensor: Tensor) -> TensorSpec:
        limit = 0 if tensor.is_floating_point() else below.get(id(tensor), 0)
        return TensorSpec.of(tensor, limit)

    return _replaced(value, Tensor, spec)


def _made(value: Any, device: torch.device) -> Any:
    """Arguments with new tensors on a device for specs, and the device for any other."""
    made = _replaced(value, TensorSpec, lambda spec: spec.tensor(device))
    return _replaced(made, torch.device, lambda _: device)


def _replaced(value: Any, kind: type[Any], replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(each, kind, replace) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, replace) for key, each in value.items()}
    return value


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _specs(each)


def _arguments_text(args: Any) -> str:
    """Arguments as text, without the device."""
    positional, named = args
    named_parts = (f"{key}={_text(value)}" for key, value in sorted(named.items()))
    parts = [*map(_text, positional), *named_parts]
    return f"({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    return "device" if isinstance(value, torch.device) else repr(value)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def forget() -> None:
    """Free the memory that tensors are filled from."""
    _block.cache_clear()
    _on_host.cache_clear()


@lru_cache(maxsize=16)
def _block(dtype: torch.dtype, below: int, device: torch.device) -> Tensor:
    """Values to fill tensors with: numbers from 0 to 1, indices in their range, masks of ones."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.ones(_BLOCK, dtype=dtype, device=device)
    if not (dtype.is_floating_point or dtype.is_complex):
        indices = torch.randint(max(1, below), (_BLOCK,), generator=generator, dtype=torch.int64)
        return indices.to(device, dtype)
    return torch.rand(_BLOCK, generator=generator).to(device, dtype)
