"""Control flow and sequences of an ONNX model, written out as plain nodes.

`_onnx_shapes` calls `Unroll.plain` with every node and reads the plain nodes one by one. So a
condition or a trip count may follow from the nodes before it.

- `If` becomes the nodes of one branch. An unknown condition takes the branch with more nodes.
- `Loop`, `Scan` and `SequenceMap` become as many copies of their body as there are steps.
- Sequences become lists of tensor names: see `_onnx_sequences`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from roost.errors import InputError, RoostError
from roost.frontends._onnx_known import STANDARD, Known
from roost.frontends._onnx_sequences import MOST_PARTS, Nodes, SequenceNodes, single

log = logging.getLogger(__name__)

_PASS_ON = frozenset(("Identity", "Optional", "OptionalGetElement"))  # their output is their input


class Unroll(SequenceNodes):
    """Writes control flow and sequences of one model out as plain nodes."""

    def __init__(self, known: Known, taken: set[str], used: set[str]) -> None:
        super().__init__(known, taken, used)
        self.declared: dict[str, Any] = {}  # types that bodies declare, by the name of the copy
        self.num_parts = 0
        self.by_type: dict[str, Callable[[Any], Nodes]] = {
            "If": self._if,
            "Loop": self._loop,
            "Scan": self._scan,
            "SequenceMap": self._sequence_map,
            "SequenceConstruct": self._sequence_construct,
            "SequenceEmpty": self._sequence_construct,
            "SequenceInsert": self._sequence_insert,
            "SequenceErase": self._sequence_erase,
            "SequenceAt": self._sequence_at,
            "SequenceLength": self._sequence_length,
            "SplitToSequence": self._split_to_sequence,
            "ConcatFromSequence": self._concat_from_sequence,
            "OptionalHasElement": self._has_element,
        }

    def plain(self, node: Any) -> Nodes:
        """The plain nodes that a node stands for: most stand for themselves."""
        standard = node.domain in STANDARD
        if standard and node.op_type in _PASS_ON and node.input[:1]:
            parts: Nodes = self._pass_on(node)
        elif standard and node.op_type in self.by_type:
            parts = self.by_type[node.op_type](node)
        else:
            yield node
            return
        try:
            for part in parts:
                self.num_parts += 1
                if self.num_parts > MOST_PARTS:
                    raise self._refused(
                        node,
                        f"makes more than {MOST_PARTS} nodes when it is written out; export the "
                        "model with shorter loops",
                    )
                if part.op_type == "Identity" and part.input[0] not in self.sequences:
                    yield part
                else:
                    yield from self.plain(part)
        except RoostError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.known.where}: {self.known.label(node)} does not fit its inputs: {error!r}"
            ) from error

    def _if(self, node: Any) -> Nodes:
        branches = {each.name: each.g for each in node.attribute}
        condition = self._value(node.input[0])
        if condition is None:
            sizes = {name: _num_nodes(graph) for name, graph in branches.items()}
            chosen = max(("then_branch", "else_branch"), key=lambda name: sizes[name])
            log.warning(
                "%s: %s depends on data; Roost takes its %s, because no other branch has more "
                "nodes; to choose yourself, give the condition: --input %s==true, or ==false",
                self.known.where,
                self.known.label(node),
                chosen,
                node.input[0],
            )
        else:
            chosen = "then_branch" if single(condition) else "else_branch"
        names: dict[str, str] = {}
        yield from self._copy(branches[chosen], names)
        yield from self._bound(branches[chosen].output, node.output, names)

    def _loop(self, node: Any) -> Nodes:
        body = _body(node)
        limit = self._needed_value(node, 0, "trip count") if node.input[0] else None
        most = None if limit is None else int(single(limit))
        condition = node.input[1] if len(node.input) > 1 else ""
        going = self._value(condition) if condition else np.array(True)
        state = list(node.input[2:])
        num_scanned = len(body.output) - 1 - len(state)
        scanned: list[list[str]] = [[] for _ in range(num_scanned)]
        for step in itertools.count() if most is None else range(most):
            if going is None and (most is None or most > MOST_PARTS):
                raise self._unknown(node, condition, "condition")
            if going is not None and not single(going):
                break
            step_name = self._fresh(f"{node.output[0]}/step")
            yield self._constant(step_name, np.array(step, dtype=np.int64))
            taken = [step_name, condition or self._fresh(f"{node.output[0]}/going"), *state]
            if not condition:
                yield self._constant(taken[1], np.array(True))
            made = yield from self._called(body, taken)
            condition, state = made[0], made[1 : 1 + len(state)]
            for names, name in zip(scanned, made[1 + len(state) :], strict=True):
                names.append(name)
            going = self._value(condition)
        yield from self._aliases(state, node.output)
        for number, names in enumerate(scanned):
            declared = body.output[1 + len(state) + number].type
            yield from self._stacked(names, node.output[len(state) + number], 0, declared)

    def _scan(self, node: Any) -> Nodes:
        if self.known.versions.get("", 1) < 9:
            raise self._refused(
                node, "is a Scan of opset 8; export the model with opset 9 or above"
            )
        body, settings = _body(node), self.known.attributes(node)
        num_scans = int(settings["num_scan_inputs"])
        state, scans = list(node.input[:-num_scans]), list(node.input[-num_scans:])
        axes = list(settings.get("scan_input_axes", [0] * num_scans))
        backwards = list(settings.get("scan_input_directions", [0] * num_scans))
        num_steps = self.known.tensors[scans[0]].shape[axes[0]]
        num_scanned = len(body.output) - len(state)
        scanned: list[list[str]] = [[] for _ in range(num_scanned)]
        for step in range(num_steps):
            slices = []
            for name, axis, backward in zip(scans, axes, backwards, strict=True):
                index = self._fresh(f"{name}/index")
                at = num_steps - 1 - step if backward else step
                yield self._constant(index, np.array(at, dtype=np.int64))
                slices.append(self._fresh(f"{name}/{step}"))
                yield self._node("Gather", [name, index], [slices[-1]], axis=axis)
            made = yield from self._called(body, [*state, *slices])
            state = made[: len(state)]
            for names, name in zip(scanned, made[len(state) :], strict=True):
                names.append(name)
        yield from self._aliases(state, node.output)
        made_axes = settings.get("scan_output_axes", [0] * num_scanned)
        made_backwards = settings.get("scan_output_directions", [0] * num_scanned)
        for number, names in enumerate(scanned):
            ordered = names[::-1] if made_backwards[number] else names
            output = node.output[len(state) + number]
            declared = body.output[len(state) + number].type
            yield from self._stacked(ordered, output, made_axes[number], declared)

    def _sequence_map(self, node: Any) -> Nodes:
        made: list[list[str]] = [[] for _ in node.output]
        for step in range(len(self._sequence(node, 0))):
            taken = [self.sequences[n][step] if n in self.sequences else n for n in node.input]
            outputs = yield from self._called(_body(node), taken)
            for names, name in zip(made, outputs, strict=True):
                names.append(name)
        self.sequences.update(zip(node.output, made, strict=True))

    def _called(self, body: Any, taken: Sequence[str]) -> Generator[Any, None, list[str]]:
        """One copy of a body with these inputs; returns the names of its outputs."""
        names = {entry.name: name for entry, name in zip(body.input, taken, strict=True)}
        yield from self._copy(body, names)
        return [names.get(output.name, output.name) for output in body.output]

    def _copy(self, body: Any, names: dict[str, str]) -> Nodes:
        """The nodes of a body under names of their own, which are added to `names`."""
        for tensor in body.initializer:
            names[tensor.name] = self._fresh(tensor.name)
            yield self._node("Constant", [], [names[tensor.name]], value=tensor)
        for sparse in body.sparse_initializer:
            names[sparse.values.name] = self._fresh(sparse.values.name)
            yield self._node("Constant", [], [names[sparse.values.name]], sparse_value=sparse)
        types = {entry.name: entry.type for entry in (*body.value_info, *body.output)}
        for node in body.node:
            for name in filter(None, node.output):
                names[name] = self._fresh(name)
                if name in types:
                    self.declared[names[name]] = types[name]
            yield _renamed(node, names)

    def _bound(self, inner: Any, outer: Sequence[str], names: Mapping[str, str]) -> Nodes:
        yield from self._aliases([names.get(each.name, each.name) for each in inner], outer)

    def _aliases(self, names: Sequence[str], outputs: Sequence[str]) -> Nodes:
        for name, output in zip(names, outputs, strict=False):
            if output:
                yield self._node("Identity", [name], [output])

    def _stacked(self, names: list[str], output: str, axis: int, declared: Any) -> Nodes:
        """One tensor of those that the steps of a loop made, along a new axis."""
        if not output:
            return
        if not names:
            tensor = declared.tensor_type
            shape = [0, *(dimension.dim_value for dimension in tensor.shape.dim)]
            dtype = self.known.onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            yield self._constant(output, np.zeros(shape, dtype))
            return
        yield from self._joined(names, output, axis)


def bodies(node: Any) -> list[Any]:
    """The graphs inside a node."""
    return [
        graph
        for attribute in node.attribute
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ()))
    ]


def names_in(graph: Any) -> tuple[set[str], set[str]]:
    """The tensors that nodes of a graph make, and those that are read, bodies included."""
    made: set[str] = set()
    used = {output.name for output in graph.output}
    for node in graph.node:
        made.update(node.output)
        used.update(node.input)
        for body in bodies(node):
            made_inside, used_inside = names_in(body)
            made |= made_inside
            used |= used_inside
    return made - {""}, used - {""}


def _body(node: Any) -> Any:
    return {attribute.name: attribute.g for attribute in node.attribute}["body"]


def _num_nodes(graph: Any) -> int:
    return sum(1 + sum(map(_num_nodes, bodies(node))) for node in graph.node)


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    """A copy of a node whose tensors have other names, also where its bodies read them."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for body in bodies(copy):
        _rename_inside(body, names)
    return copy


def _rename_inside(body: Any, names: Mapping[str, str]) -> None:
    own = {entry.name for entry in (*body.input, *body.initializer)}
    own.update(name for node in body.node for name in node.output)
    outside = {name: new for name, new in names.items() if name not in own}
    for node in body.node:
        node.input[:] = [outside.get(name, name) for name in node.input]
        for inner in bodies(node):
            _rename_inside(inner, outside)
    for output in body.output:
        output.name = outside.get(output.name, output.name)
