"""Which ops write over an operand that nobody reads any more, as `runtime/ops/in_place.py` has them
do on one device.

In place there is no new memory to be had, which for large tensors takes longer than the sum itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.program import is_getitem

aten = torch.ops.aten
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)


def reused(step: CapturedStep) -> dict[fx.Node, tuple[Any, int]]:
    """Node -> the op in place, and which of its arguments it writes over."""
    last = _last_reads(step)
    kept = {
        step.op_of[node]
        for node in (*step.program.results, *(each.value for each in step.updates.values()))
    }
    found: dict[fx.Node, tuple[Any, int]] = {}
    for node in step.program.module.graph.nodes:
        written = _in_place(node.target)
        if written is None or node not in step.op_of or step.maker[step.op_of[node]] is not node:
            continue
        for place in range(2 if node.target in _COMMUTE and not node.kwargs else 1):
            operand = node.args[place] if place < len(node.args) else None
            if (
                not isinstance(operand, fx.Node)
                or not _makes_new(operand)
                or not _alike(operand, node)
            ):
                continue
            owner = step.op_of.get(operand)
            if (
                owner is not None
                and owner not in kept
                and step.maker[owner] is operand
                and last[owner] is node
            ):
                found[node] = (written, place)
                break
    return found


def _last_reads(step: CapturedStep) -> Mapping[str, fx.Node]:
    """Op -> the last node that reads its output, or a view of it; views are made when they are
    read."""
    last: dict[str, fx.Node] = {}
    for node in step.program.module.graph.nodes:
        owner = step.op_of.get(node)
        if node.op == "call_function" and (
            owner is None or step.maker[owner] is node or is_getitem(node)
        ):
            last |= {
                step.op_of[source]: node for source in node.all_input_nodes if source in step.op_of
            }
    return last


def _in_place(target: Any) -> Any:
    """The same op in place, for ops that go element by element."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _makes_new(node: fx.Node) -> bool:
    """Whether a node surely returns memory of its own."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if (
        target in (aten.reshape.default, aten.native_dropout.default)
        or target.is_view
        or target._schema.is_mutable
    ):
        return False
    name = target._schema.name + (
        f".{target._overloadname}" if target._overloadname != "default" else ""
    )
    return not torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    ) and not any(returned.alias_info is not None for returned in target._schema.returns)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    same = (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
    )
    return same and first.untyped_storage().nbytes() == second.untyped_storage().nbytes()
