"""Inlining of TensorFlow functions in a GraphDef; nothing is run, pruned or folded.

Nodes come out in the order in which they would run, so their control inputs are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from typing import Any

from roost.errors import GraphError, UnsupportedOp
from roost.frontends.tracing.tensors import words

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_LOOPS = words("While StatelessWhile For Enter RefEnter NextIteration Exit LoopCond")
_BRANCHES = words("If StatelessIf Case StatelessCase Switch RefSwitch Merge")
_OTHER_CONTROL_FLOW = words("SymbolicGradient RemoteCall")


@dataclass
class Inlined:
    """Nodes without calls, in running order, and the nodes that each must share a device with."""

    nodes: list[Any] = field(default_factory=list)
    colocated: dict[str, list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # taken, or kept for a node to come


@dataclass(frozen=True)
class _FunctionBody:
    """A function as a graph: its nodes, the placeholders of its arguments, and its results."""

    nodes: list[Any]
    arguments: list[str]
    results: list[str]


def inline(graph_def: Any, where: str) -> tuple[Inlined, Callable[[str], str]]:
    """A graph with its calls inlined, and a map from old tensors, "op:index", to new ones."""
    out = Inlined()
    placed = _expand(list(graph_def.node), "", {}, _FunctionBodies(graph_def.library), out, where)
    return out, placed


class _FunctionBodies:
    """The functions of a graph as graphs, each made once."""

    def __init__(self, library: Any) -> None:
        self._definitions = {function.signature.name: function for function in library.function}
        self._made: dict[str, _FunctionBody] = {}

    def called(self, node: Any) -> _FunctionBody | None:
        """The body that a node calls; None for an op."""
        name = node.attr["f"].func.name if node.op in _CALLS else node.op
        if name not in self._definitions:
            return None
        if name not in self._made:
            self._made[name] = self._body(self._definitions[name])
        return self._made[name]

    def _body(self, definition: Any) -> _FunctionBody:
        # Not public, but saved_model.load itself reads functions with it.
        module = import_module("tensorflow.python.framework.function_def_to_graph")
        graph_def, flat = module.function_def_to_graph_def(definition)
        arguments = [argument.name for argument in definition.signature.input_arg]
        results = [flat[definition.ret[result.name]] for result in definition.signature.output_arg]
        return _FunctionBody(list(graph_def.node), arguments, results)


def _expand(
    nodes: list[Any],
    path: str,
    arguments: Mapping[str, str],
    bodies: _FunctionBodies,
    out: Inlined,
    where: str,
) -> Callable[[str], str]:
    """Add the nodes of a body to `out`; return a map from its tensors to those in `out`."""
    for node in nodes:  # before they are sorted: loops of TensorFlow 1 are cycles
        if bodies.called(node) is None:
            _refuse_control_flow(node, where)
    names = {
        node.name: _unused(node.name, path, out)
        for node in nodes
        if f"{node.name}:0" not in arguments
    }
    moved = dict(arguments)

    def placed(reference: str) -> str:
        name, _, index = reference.partition(":")
        if name not in names and f"{name}:{index or 0}" not in moved:
            raise GraphError(
                f"{where}: an op takes {reference!r}, which no op makes; the graph is damaged, "
                "save it again"
            )
        return moved.get(f"{name}:{index or 0}") or f"{names[name]}:{index or 0}"

    for node in in_order(nodes):
        if f"{node.name}:0" in arguments:
            continue
        inputs = [placed(reference) for reference in node.input if not reference.startswith("^")]
        body = bodies.called(node)
        if body is None:
            _emit(node, names, inputs, out)
            continue
        given = {f"{name}:0": source for name, source in zip(body.arguments, inputs, strict=True)}
        inside = _expand(body.nodes, f"{path}{node.name}/", given, bodies, out, where)
        moved.update(
            {f"{node.name}:{index}": inside(result) for index, result in enumerate(body.results)}
        )
    return placed


def _unused(name: str, path: str, out: Inlined) -> str:
    """The name itself if it is free, so that people find their layers; else with its call."""
    unused = name
    number = 0
    while unused in out.names:
        unused = f"{path}{name}" + (f"_{number}" if number else "")
        number += 1
    out.names.add(unused)
    return unused


def _emit(node: Any, names: Mapping[str, str], inputs: list[str], out: Inlined) -> None:
    """Add a copy of a node under its new name, without hints to the runtime."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.name = names[node.name]
    copy.device = ""
    del copy.input[:]
    copy.input.extend(inputs)
    for mark in node.attr["_class"].list.s if "_class" in node.attr else []:
        if mark.startswith(b"loc:@"):
            target = mark.decode().removeprefix("loc:@")
            out.colocated.setdefault(copy.name, []).append(names.get(target, target))
    for attribute in [name for name in copy.attr if name.startswith("_")]:
        del copy.attr[attribute]
    out.nodes.append(copy)


def _refuse_control_flow(node: Any, where: str) -> None:
    if node.op in _LOOPS:
        raise UnsupportedOp(
            f"{where}: op {node.name!r} ({node.op}) is a loop, which a placement cannot follow; "
            "unroll it: build recurrent layers with unroll=True, and write other loops over a "
            "Python range"
        )
    if node.op in _BRANCHES | _OTHER_CONTROL_FLOW | _CALLS:
        raise UnsupportedOp(
            f"{where}: op {node.name!r} ({node.op}) is control flow, which a placement cannot "
            "follow; decide in Python, while the model is traced"
        )


def in_order(nodes: list[Any]) -> list[Any]:
    """Sort nodes so that each follows its inputs, and otherwise keep their order."""
    index = {node.name: i for i, node in enumerate(nodes)}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for i, node in enumerate(nodes):
        names = (reference.removeprefix("^").partition(":")[0] for reference in node.input)
        sorter.add(i, *(index[name] for name in names if name in index))
    try:
        sorter.prepare()
    except CycleError as error:
        raise GraphError(
            f"the ops around {nodes[error.args[1][0]].name!r} wait for each other; a placement "
            "needs a graph without cycles"
        ) from None
    ready: list[int] = []
    ordered = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        i = heapq.heappop(ready)
        ordered.append(nodes[i])
        sorter.done(i)
    return ordered
