"""Ops that may write over an operand which is not read any more.

In place an op needs no new memory, which for large tensors takes longer than a sum. `overwrites`
finds such ops in a step on one device, for timing it; `runtime/ops/in_place.py` finds them in the
lines of each device, with the rules for single ops from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.program import is_getitem

aten = torch.ops.aten


def overwrites(step: CapturedStep) -> dict[fx.Node, tuple[Any, int]]:
    """Give each node that may write in place: its op in place, and the argument it overwrites."""
    last = _last_reads(step)
    kept = {
        step.op_of[node]
        for node in (*step.program.results, *(each.value for each in step.updates.values()))
    }
    in_place: dict[fx.Node, tuple[Any, int]] = {}
    for node in step.program.module.graph.nodes:
        written = in_place_op(node.target)
        if written is None or node not in step.op_of or step.maker[step.op_of[node]] is not node:
            continue
        for place in operand_places(node.target, node.args, node.kwargs):
            operand = node.args[place]
            if not isinstance(operand, fx.Node) or not makes_new(operand.target):
                continue
            owner = step.op_of.get(operand)
            if owner is None or owner in kept or step.maker[owner] is not operand:
                continue
            if last[owner] is node and same_layout(operand, node):
                in_place[node] = (written, place)
                break
    return in_place


def _last_reads(step: CapturedStep) -> Mapping[str, fx.Node]:
    """Give the last node that reads each op's output or a view of it; views are made when read."""
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


def in_place_op(target: Any) -> Any:
    """Give the in-place variant of an elementwise op, or None."""
    if not _is_aten(target) or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, target._overloadname, None)


def operand_places(target: Any, args: Any, kwargs: Any) -> range:
    """Give the arguments that an elementwise op may overwrite: of a sum or product either one."""
    either = target in (aten.add.Tensor, aten.mul.Tensor) and not kwargs
    return range(min(2 if either else 1, len(args)))


def makes_new(target: Any) -> bool:
    """Tell if an op surely returns new memory: its schema says so, and it runs no other op."""
    if not _is_aten(target) or target in (aten.reshape.default, aten.native_dropout.default):
        return False
    schema = target._schema
    overload = target._overloadname
    if target.is_view or schema.is_mutable:
        return False
    name = schema.name if overload == "default" else f"{schema.name}.{overload}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    return all(returned.alias_info is None for returned in schema.returns)


def same_layout(one: fx.Node, other: fx.Node) -> bool:
    """Tell if the outputs of two nodes have the same shape, type, strides and bytes."""
    first = one.meta.get("val")
    second = other.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
        and first.untyped_storage().nbytes() == second.untyped_storage().nbytes()
    )


def _is_aten(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
