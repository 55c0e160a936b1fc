"""Ops that write over an operand nobody reads any more, as eager PyTorch does to add up gradients.

A captured step makes a new tensor for everything, which costs memory and time. `device_code.py`
calls `in_place`: an elementwise op may take over the memory of an operand of the same shape, layout
and type, if this device made it for itself, no view of it is read later, and no other device may be
reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from roost.cost_models.timing.overwrites import in_place_op, makes_new, operand_places, same_layout
from roost.runtime.ops.lines import Line, Ref


def in_place(lines: Sequence[Line], kept: set[str]) -> list[Line]:
    """Give the lines with safe ops in place; nothing may write into the names in `kept`."""
    root: dict[str, str] = {}  # name -> the name whose memory it looks into
    last: dict[str, int] = {}  # root -> the last line that reads it, or a view of it
    fresh: dict[str, fx.Node] = {}  # roots made here, by an op that surely made new memory
    for number, line in enumerate(lines):
        for name in line.read:
            last[root[name]] = number
        if line.name:
            base = _base(line)
            root[line.name] = root[base] if base else line.name
            last[root[line.name]] = number
            if not base and line.node is not None and _makes_new(line):
                fresh[line.name] = line.node
    kept = {root[name] for name in kept}

    def may_go(argument: object, number: int, node: fx.Node) -> bool:
        if not isinstance(argument, Ref) or argument.name not in fresh or argument.name in kept:
            return False
        return last[argument.name] == number and same_layout(fresh[argument.name], node)

    changed: list[Line] = []
    for number, line in enumerate(lines):
        written = in_place_op(line.call)
        if written is not None and line.node is not None:
            for place in operand_places(line.call, line.args, line.kwargs):
                if may_go(line.args[place], number, line.node):
                    args = list(line.args)
                    args[0], args[place] = args[place], args[0]
                    line = replace(line, call=written, args=tuple(args))
                    break
        changed.append(line)
    return changed


def _base(line: Line) -> str:
    """Give the name that the output of a line looks into, or "" if it is new memory."""
    read = [ref for ref in line.args if isinstance(ref, Ref)]
    if line.node is None or not read or line.node.op != "call_function":
        return ""
    if isinstance(line.call, torch._ops.OpOverload):
        views = not makes_new(line.call)
    else:  # getitem takes an output of the op before
        views = "getitem" in str(line.node.target)
    return read[0].name if views else ""


def _makes_new(line: Line) -> bool:
    if isinstance(line.call, torch._ops.OpOverload):
        return makes_new(line.call)
    return not line.args  # a tensor that was received: this device has it for itself
