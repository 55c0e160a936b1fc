"""What there is to time in a captured step: each op as a call, known by its signature.

The signature is the op with the shapes, strides and types of its tensors and all its other
arguments. Tensors are made anew from it: nothing of the model is needed, and ops that are alike are
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
from roost.cost_models.timing.overwrites import reused
from roost.cost_models.timing.updates import UPDATES
from roost.frontends.tracing.captured_step import CapturedStep, ResidentUpdate
from roost.frontends.tracing.flop import tensors_in
from roost.frontends.tracing.program import is_getitem

aten = torch.ops.aten
_INPUTS, _MOST_INPUTS = 128 * 2**20, 64  # bytes of inputs that are taken in turn, and how many
_BLOCK = 2**20  # numbers drawn at random; longer tensors repeat them


@dataclass(frozen=True)
class Like:
    """A tensor to be made: its layout, and for indices what they must stay below."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    below: int = 0

    @classmethod
    def of(cls, tensor: Tensor, below: int = 0) -> Like:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, below)

    def __repr__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        strides = "" if self.stride == _dense(self.shape) else f"|{','.join(map(str, self.stride))}"
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}{strides}]" + (
            f"<{self.below}" if self.below else ""
        )

    @property
    def extent(self) -> int:
        """How many elements of memory it looks into."""
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
class Work:
    """A call with arguments to be made."""

    signature: str
    call: Callable[..., Any] = field(repr=False)
    args: Any  # of (args, kwargs): Like for tensors
    num_bytes: int  # of its tensors
    made_bytes: int  # of what it returns
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
class Task:
    """What a device does for one op: the op itself, and the views that it is the first to look
    through."""

    op: int
    work: Work
    views: tuple[Work, ...]


def tasks(step: CapturedStep) -> Iterator[Task]:
    """Of each op that takes time. Inputs, parameters, and the outputs of ops with several of them
    take none."""
    seen: set[fx.Node] = set()
    known: dict[fx.Node, Work] = {}
    over = reused(step)
    for op, name in enumerate(step.graph.op_names):
        if name in step.updates:
            update = step.updates[name]
            values = [update.value]
            work = _update(step, update, step.graph.kinds[op])
        else:
            node = step.maker.get(name)
            if node is None or node.op != "call_function" or is_getitem(node):
                continue
            values = node.all_input_nodes
            work = _op(step, node, *over.get(node, ()))
        views = [view for value in values for view in _views(step, value, seen)]
        yield Task(op, work, tuple(known.setdefault(view, _op(step, view)) for view in views))


def inputs(step: CapturedStep) -> Iterator[Task]:
    """What the caller gives comes from memory of the host: to a GPU that takes time."""
    for op in np.flatnonzero(step.graph.phase == INPUT).tolist():
        like = Like.of(step.maker[step.graph.op_names[op]].meta["val"])
        args: Any = ((like,), {})
        yield Task(
            op, Work(f"input{_said(args)}", _given, args, like.num_bytes, like.num_bytes), ()
        )


def _given(there: Tensor) -> Tensor:
    """As the runtime has it, through locked memory, and out of no cache."""
    here = next(_on_host(tuple(there.shape), there.dtype))
    return torch.empty_like(here, pin_memory=True).copy_(here).to(there.device, non_blocking=True)


@lru_cache(4)
def _on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    first = torch.zeros(shape, dtype=dtype)
    return cycle(
        [first, *(first.clone() for _ in range(min(_MOST_INPUTS, _INPUTS // max(first.nbytes, 1))))]
    )


def _views(step: CapturedStep, node: fx.Node, seen: set[fx.Node]) -> Iterator[fx.Node]:
    """Views on the way to a value, as the runtime has them: once, but those of parameters for every
    reader."""
    owner = step.op_of.get(node)
    if owner is None or step.maker[owner] is node or node in seen:
        return
    for source in node.all_input_nodes:
        yield from _views(step, source, seen)
    if not is_getitem(node):
        yield node
    if not step.graph.is_parameter[step.graph.index_of(owner)]:
        seen.add(node)


def _op(step: CapturedStep, node: fx.Node, in_place: Any = None, operand: int = 0) -> Work:
    """The call of a node; in place, the operand that is written over comes first."""
    target: Any = node.target
    if target in (aten.view.default, aten._unsafe_view.default):
        target = aten.reshape.default  # as the runtime calls it
    fakes = fx.map_arg((node.args, dict(node.kwargs)), lambda other: _value(step, other))
    below = _limits(target, fakes[0])
    args = _alike(fakes, below)
    if in_place is not None:
        given = list(args[0])
        given[0], given[operand] = given[operand], given[0]
        target, args = in_place, (tuple(given), args[1])
    weights = [
        _bytes(_value(step, source)) for source in node.all_input_nodes if _resident(step, source)
    ]
    if step.maker[step.op_of[node]] is not node:
        weights = []  # a view reads nothing
    return Work(
        f"{target}{_said(args)}",
        target,
        args,
        sum(like.num_bytes for like in _likes(args)),
        sum(map(_bytes, tensors_in(node.meta.get("val")))),
        max(weights, default=0),
    )


def _update(step: CapturedStep, update: ResidentUpdate, kind: str) -> Work:
    resident = Like.of(_value(step, step.maker[update.resident]))
    value = Like.of(_value(step, update.value))
    args: Any = ((resident, value, *[resident] * len(update.states)), {})
    size = sum(like.num_bytes for like in args[0])
    return Work(f"update.{kind}{_said(args)}", UPDATES[kind], args, size, 0, resident.num_bytes)


def _value(step: CapturedStep, node: fx.Node) -> Any:
    """The fake tensor of a node, or the real one where it is a constant."""
    if node.op == "get_attr":
        return getattr(step.program.module, str(node.target))
    return node.meta.get("val")


def _resident(step: CapturedStep, node: fx.Node) -> bool:
    owner = step.op_of.get(node)
    return owner is not None and bool(step.graph.is_parameter[step.graph.index_of(owner)])


def _bytes(value: Any) -> int:
    return Like.of(value).num_bytes if isinstance(value, Tensor) else 0


def _limits(target: Any, args: tuple[Any, ...]) -> dict[int, int]:
    """By the id of a tensor of indices: what they must stay below. Zeros do for those that are not
    here."""
    packet = getattr(target, "overloadpacket", target)
    try:
        if packet is aten.embedding:
            return {id(args[1]): args[0].shape[0]}
        if packet is aten.embedding_dense_backward:
            return {id(args[1]): args[2]}
        if packet in (
            aten.gather,
            aten.index_select,
            aten.scatter,
            aten.scatter_add,
            aten.index_add,
            aten.scatter_reduce,
        ):
            return {id(args[2]): args[0].shape[args[1]]}
        if packet in (aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put):
            return {
                id(each): args[0].shape[place]
                for place, each in enumerate(args[1])
                if each is not None
            }
        if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
            return {id(args[1]): args[0].shape[min(1, args[0].dim() - 1)]}
        if packet in (aten.nll_loss_backward, aten.nll_loss2d_backward):
            return {id(args[2]): args[1].shape[min(1, args[1].dim() - 1)]}
        if packet is aten.max_pool2d_with_indices_backward:
            return {id(args[-1]): math.prod(args[1].shape[-2:])}
    except (IndexError, AttributeError, TypeError):
        pass
    return {}


def index_limits(step: CapturedStep) -> dict[str, int]:
    """Inputs of a step that are indices: what they must stay below, by the op of the input."""
    found: dict[str, int] = {}
    for node in step.program.module.graph.nodes:
        if node.op != "call_function":
            continue
        below = _limits(node.target, fx.map_arg(node.args, lambda other: _value(step, other)))
        for source in node.all_input_nodes:
            limit, owner = below.get(id(_value(step, source))), step.op_of.get(source)
            if limit is not None and owner is not None:
                found[owner] = min(limit, found.get(owner, limit))
    return found


def _alike(value: Any, below: Mapping[int, int]) -> Any:
    if isinstance(value, Tensor):
        return Like.of(value, 0 if value.is_floating_point() else below.get(id(value), 0))
    if isinstance(value, tuple | list):
        return type(value)(_alike(each, below) for each in value)
    if isinstance(value, dict):
        return {key: _alike(each, below) for key, each in value.items()}
    return value


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, Like):
        return value.tensor(device)
    if isinstance(value, tuple | list):
        return type(value)(_made(each, device) for each in value)
    if isinstance(value, dict):
        return {key: _made(each, device) for key, each in value.items()}
    return device if isinstance(value, torch.device) else value


def _likes(value: Any) -> Iterator[Like]:
    if isinstance(value, Like):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _likes(each)


def _said(args: Any) -> str:
    """Arguments as text; the device is no part of it."""
    given, named = args
    parts = [*map(_text, given), *(f"{key}={_text(value)}" for key, value in sorted(named.items()))]
    return f"({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    return "device" if isinstance(value, torch.device) else repr(value)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def forget() -> None:
    """Give back what tensors are filled with."""
    _block.cache_clear()
    _on_host.cache_clear()


@lru_cache(maxsize=16)
def _block(dtype: torch.dtype, below: int, device: torch.device) -> Tensor:
    """To fill tensors with: numbers from 0 to 1, which are chances too, indices in their range,
    masks of ones."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.ones(_BLOCK, dtype=dtype, device=device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(max(1, below), (_BLOCK,), generator=generator, dtype=torch.int64).to(
            device, dtype
        )
    return torch.rand(_BLOCK, generator=generator).to(device, dtype)
