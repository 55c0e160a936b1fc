"""Ops that write over an operand which nobody reads any more, as eager PyTorch does when it adds up
gradients.

A traced step makes a new tensor for everything, and that costs memory and time. An elementwise op
may take over the memory of an operand of the same shape, layout and type, if this device made it
for itself, no view of it is read later, and no one else may be reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from roost.runtime.ops.lines import Line, Ref

aten = torch.ops.aten
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)


def reused(lines: Sequence[Line], kept: set[str]) -> list[Line]:
    """The lines, where it is safe in place; tensors of the names in `kept` are not to be written
    into."""
    root: dict[str, str] = {}  # name -> the name whose memory it looks into
    last: dict[str, int] = {}  # of a root: the last line that reads it, or a view of it
    # Roots that were made here, by an op that surely made new memory.
    fresh: dict[str, fx.Node] = {}
    for number, line in enumerate(lines):
        for name in line.read:
            last[root[name]] = number
        if line.name:
            looks_into = _base(line)
            root[line.name] = root[looks_into] if looks_into else line.name
            last[root[line.name]] = number
            if not looks_into and line.node is not None and _makes_new(line):
                fresh[line.name] = line.node
    kept = {root[name] for name in kept}
    found: list[Line] = []
    for number, line in enumerate(lines):
        operand = None
        if (written := _in_place(line.call)) is not None and line.node is not None:
            for place in range(2 if line.call in _COMMUTE and not line.kwargs else 1):
                given = line.args[place] if place < len(line.args) else None
                if (
                    not isinstance(given, Ref)
                    or root[given.name] != given.name
                    or given.name in kept
                ):
                    continue
                if (
                    last[given.name] == number
                    and given.name in fresh
                    and _alike(fresh[given.name], line.node)
                ):
                    operand = place
                    break
        if operand is None:
            found.append(line)
            continue
        args = line.args if operand == 0 else (line.args[1], line.args[0], *line.args[2:])
        found.append(replace(line, call=written, args=args))
    return found


def _base(line: Line) -> str:
    """The name that the output of a line looks into, if it does; a tuple looks into nothing of
    before."""
    read = [ref for ref in line.args if isinstance(ref, Ref)]
    if line.node is None or not read or line.node.op != "call_function":
        return ""
    if not isinstance(line.call, torch._ops.OpOverload):  # getitem takes what its producer made
        return str(read[0].name) if str(line.node.target).find("getitem") >= 0 else ""
    return str(read[0].name) if not _makes_new(line) else ""


def _makes_new(line: Line) -> bool:
    """Whether a line surely returns memory of its own: not so where the schema says otherwise, or
    says nothing."""
    call = line.call
    if not isinstance(call, torch._ops.OpOverload) or call.namespace != "aten":
        return (
            line.node is not None and not isinstance(call, torch._ops.OpOverload) and not line.args
        )
    if (
        call in (aten.reshape.default, aten.native_dropout.default)
        or call.is_view
        or call._schema.is_mutable
    ):
        return False
    name = call._schema.name + (f".{call._overloadname}" if call._overloadname != "default" else "")
    return not torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    ) and not any(returned.alias_info is not None for returned in call._schema.returns)


def _in_place(call: Any) -> Any:
    """The same op in place, for ops that go element by element."""
    if (
        not isinstance(call, torch._ops.OpOverload)
        or torch.Tag.pointwise not in call.tags
        or call.namespace != "aten"
    ):
        return None
    packet = getattr(aten, f"{call._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, call._overloadname, None) if packet is not None else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    same = (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
    )
    return same and first.untyped_storage().nbytes() == second.untyped_storage().nbytes()
