"""The captured step of an unrolled graph: M microbatches in one program, ready to be placed.

`unrolled_step` copies the nodes of the program that a microbatch was captured as. Residents and
views of them exist once; inputs, forward and backward nodes exist once for each copy. Gradients are
added up by the sums of the unrolled graph, in their order. Each sum adds the outputs of ops: views
of a gradient, such as a transpose, are made once, of the final sum. The ops that add up the
gradients of a tied weight may exist once too: they read final sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from roost.core import graph as ops
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep, ResidentUpdate
from roost.frontends.tracing.program import BACKWARD, Program
from roost.transforms.microbatch import SHARED, Microbatched

aten = torch.ops.aten


def unrolled_step(step: CapturedStep, made: Microbatched) -> CapturedStep:
    """The step of all microbatches; its graph is `made.graph`.

    `step` is the captured step of one microbatch, `made` its unrolled graph. Inputs are first those
    that all copies share, then those of copy 0, such as `words#0`, those of copy 1 and so on. The
    results are all copies of the first result, then all copies of the second.
    """
    if made.original.digest != step.graph.digest:
        raise InputError(
            f"the unrolled graph is of graph {made.original.digest}, the captured step is "
            f"{step.graph.digest}; unroll the graph of this step"
        )
    return step if made.count == 1 else _Unroller(step, made).unrolled()


class _Unroller:
    """Writes the program of an unrolled step, node by node."""

    def __init__(self, step: CapturedStep, made: Microbatched) -> None:
        self.step = step
        self.made = made
        self.source = step.program
        self.graph = fx.Graph()
        self.op_of: dict[fx.Node, str] = {}  # new node -> op
        self.maker: dict[str, fx.Node] = {}  # op -> new node
        # [copies] node of the source -> its node in that copy; SHARED: the nodes that exist once.
        self.nodes: dict[int, dict[fx.Node, fx.Node]] = {
            copy: {} for copy in (SHARED, *range(made.count))
        }
        self.name_of: dict[tuple[int, int], str] = {}  # op of the original, copy -> op
        rows = zip(made.graph.op_names, made.origin.tolist(), made.copy.tolist(), strict=True)
        for number, (name, origin, copy) in enumerate(rows):
            if not made.is_sum[number]:
                self.name_of[origin, copy] = name

    def unrolled(self) -> CapturedStep:
        """The step of all copies."""
        inputs = self._placeholders()
        calls = [n for n in self.source.module.graph.nodes if n.op not in ("placeholder", "output")]
        self._copy(calls, SHARED)
        for copy in range(self.made.count):
            self._copy(calls, copy)
        self._sums()
        for node in calls:
            if self._is_late(node):
                self._add(node, SHARED, self._sum_of)
        program = self._program(inputs)
        owner = {op: name for name, op in self.step.resident_ops.items()}
        updates: dict[str, ResidentUpdate] = {}
        for name, update in self.step.updates.items():
            is_copy = self.step.graph.kinds[self.step.graph.index_of(name)] == "copy"
            values = program.new_values if is_copy else program.gradients
            updates[name] = replace(update, value=values[owner[update.resident]])
        return replace(
            self.step,
            program=program,
            graph=self.made.graph,
            op_of=self.op_of,
            maker=self.maker,
            updates=updates,
        )

    def _placeholders(self) -> tuple[str, ...]:
        """Add residents, then inputs; give the names of the inputs."""
        names: list[str] = []
        for node in self.source.resident_nodes.values():
            self._add(node, SHARED)
        for copy in self.nodes:
            for name, node in self.source.input_nodes.items():
                if self._is_copied(node) == (copy != SHARED):
                    self._add(node, copy)
                    names.append(name if copy == SHARED else f"{name}#{copy}")
        return tuple(names)

    def _copy(self, calls: list[fx.Node], copy: int) -> None:
        for node in calls:
            if self._is_copied(node) == (copy != SHARED) and not self._is_late(node):
                self._add(node, copy)

    def _is_copied(self, node: fx.Node) -> bool:
        """Tell if a node exists once for each copy: all but residents, and views of them."""
        op = self.step.op_of.get(node)
        if op is None:  # of an assertion
            return True
        return (self.step.graph.index_of(op), SHARED) not in self.name_of

    def _is_late(self, node: fx.Node) -> bool:
        """Tell if a node is of an op that adds up final sums, once for all copies."""
        if self._is_copied(node):
            return False
        graph = self.step.graph
        return bool(graph.phase[graph.index_of(self.step.op_of[node])] == ops.BACKWARD)

    def _sum_of(self, node: fx.Node) -> fx.Node:
        """The node that a late node reads: a sum over all copies, or one that exists once."""
        once = self.nodes[SHARED].get(node)
        return self._total(node, node.name) if once is None else once

    def _add(
        self, node: fx.Node, copy: int, read: Callable[[fx.Node], fx.Node] | None = None
    ) -> None:
        read = read or (lambda other: self._at(other, copy))
        new = self.nodes[copy][node] = self.graph.node_copy(node, read)
        if node.op == "placeholder":
            new.target = new.name  # an argument of the program, so it must be unique
        op = self.step.op_of.get(node)
        if op is None:
            return
        self.op_of[new] = self.name_of[self.step.graph.index_of(op), copy]
        if self.step.maker.get(op) is node:
            self.maker[self.op_of[new]] = new

    def _at(self, node: fx.Node, copy: int) -> fx.Node:
        """The node of a copy, or the one that exists once."""
        shared = self.nodes[SHARED].get(node)
        return self.nodes[copy][node] if shared is None else shared

    def _sums(self) -> None:
        """Add the ops that add up gradients, and those that average buffers."""
        graph = self.made.graph
        like: dict[tuple[int, str], Any] = {}  # value, kind -> meta, which its sums share
        for number in self.made.is_sum.nonzero()[0].tolist():
            inputs = [self.maker[graph.op_names[op]] for op in graph.inputs_of(number).tolist()]
            kind = graph.kinds[number]
            args: tuple[Any, ...] = (*inputs, self.made.count) if kind == "div" else tuple(inputs)
            target = {"add": aten.add.Tensor, "div": aten.div.Tensor}[kind]
            node = self.graph.call_function(target, args)
            key = int(self.made.origin[number]), kind
            if key not in like:
                like[key] = _meta(target, args)
            node.meta = dict(like[key])
            self.op_of[node] = graph.op_names[number]
            self.maker[graph.op_names[number]] = node

    def _program(self, inputs: tuple[str, ...]) -> Program:
        """The program of the nodes added; views of sums are added here."""
        source = self.source
        copies = range(self.made.count)
        results = tuple(self._at(node, copy) for node in source.results for copy in copies)
        gradients = {name: self._total(node, name) for name, node in source.gradients.items()}
        new_values = {name: self._total(node, name) for name, node in source.new_values.items()}
        self.graph.output([*results, *gradients.values(), *new_values.values()])
        return replace(
            source,
            module=fx.GraphModule(source.module, self.graph),
            inputs=inputs,
            results=results,
            gradients=gradients,
            new_values=new_values,
        )

    def _total(self, node: fx.Node, name: str) -> fx.Node:
        """The value that the update of a resident reads, over all copies."""
        op = self.step.graph.index_of(self.step.op_of[node])
        total = self.made.total.get(op)
        if total is not None:
            return self._view(node, self.maker[self.made.graph.op_names[total]])
        if self._is_late(node):
            return self.nodes[SHARED][node]
        if name in self.source.gradients:
            raise InputError(
                f"the gradient of {name!r} is a value that exists once for all microbatches, so it "
                "cannot be added up; train with one microbatch"
            )
        return self._at(node, self.made.count - 1)  # a buffer that takes an input or a parameter

    def _view(self, node: fx.Node, total: fx.Node) -> fx.Node:
        """The same view of a sum as a node is of its op."""
        op = self.step.op_of[node]
        if self.step.maker[op] is node:
            return total

        def seen(other: fx.Node) -> fx.Node:
            if self.step.op_of.get(other) == op:
                return self._view(other, total)
            return self._at(other, 0)

        new = self.graph.node_copy(node, seen)
        self.op_of[new] = self.op_of[total]
        return new


def _meta(target: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The fake output of a sum, and the mark of a backward op."""
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    with torch.no_grad(), values[0].fake_mode:
        value = target(*values)
    return {"val": value, "nn_module_stack": {BACKWARD: (BACKWARD, "")}}
