"""Control flow and sequences of an ONNX model, written out as plain nodes.

`_onnx_shapes` calls `Unroll.plain` with every node and reads the plain nodes one by one. So a
condition or a trip count may follow from the nodes before it.

- `If` becomes the nodes of one branch. An unknown condition takes the branch with more nodes.
- `Loop`, `Scan` and `SequenceMap` become as many copies of their body as there are steps.
- A sequence becomes a list of tensor names, so its ops become `Split`, `Concat` and `Identity`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError, RoostError, UnsupportedOp
from roost.frontends._onnx_known import STANDARD, Known

log = logging.getLogger(__name__)

Nodes = Iterator[Any]
_MOST_PARTS = 30_000  # nodes that the loops of one model may become
_PASS_ON = frozenset(("Identity", "Optional", "OptionalGetElement"))  # their output is their input


class Unroll:
    """Writes control flow and sequences of one model out as plain nodes."""

    def __init__(self, known: Known, taken: set[str], used: set[str]) -> None:
        self.known = known
        self.taken = taken  # names of tensors that no copy may have
        self.used = used  # tensors that some node reads; copies of them are added
        self.sequences: dict[str, list[str]] = {}
        self.declared: dict[str, Any] = {}  # types that bodies declare, by the name of the copy
        self.copies = Counter[str]()  # of each name, as `@2` counts them
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
                if self.num_parts > _MOST_PARTS:
                    raise self._refused(
                        node,
                        f"makes more than {_MOST_PARTS} nodes when it is written out; export the "
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

    def tensor_names(self, name: str) -> list[str]:
        """The tensors behind a name: those of a sequence, or the one tensor."""
        return self.sequences.get(name, [name])

    # Control flow.

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
            chosen = "then_branch" if _single(condition) else "else_branch"
        names: dict[str, str] = {}
        yield from self._copy(branches[chosen], names)
        yield from self._bound(branches[chosen].output, node.output, names)

    def _loop(self, node: Any) -> Nodes:
        body = _body(node)
        limit = self._needed_value(node, 0, "trip count") if node.input[0] else None
        most = None if limit is None else int(_single(limit))
        condition = node.input[1] if len(node.input) > 1 else ""
        going = self._value(condition) if condition else np.array(True)
        state = list(node.input[2:])
        num_scanned = len(body.output) - 1 - len(state)
        scanned: list[list[str]] = [[] for _ in range(num_scanned)]
        for step in itertools.count() if most is None else range(most):
            if going is None and (most is None or most > _MOST_PARTS):
                raise self._unknown(node, condition, "condition")
            if going is not None and not _single(going):
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

    def _joined(self, names: Sequence[str], output: str, axis: int) -> Nodes:
        parts = [self._fresh(f"{name}/row") for name in names]
        for name, part in zip(names, parts, strict=True):
            yield from self._with_axes("Unsqueeze", name, part, axis)
        yield self._node("Concat", parts, [output], axis=axis)

    # Sequences.

    def _pass_on(self, node: Any) -> Nodes:
        if node.input[0] in self.sequences:
            self.sequences[node.output[0]] = self.sequences[node.input[0]]
        else:
            yield self._node("Identity", node.input[:1], node.output[:1], name=node.name)

    def _has_element(self, node: Any) -> Nodes:
        yield self._constant(node.output[0], np.array(any(node.input)))

    def _sequence_construct(self, node: Any) -> Nodes:
        self.sequences[node.output[0]] = list(node.input)
        yield from ()

    def _sequence_insert(self, node: Any) -> Nodes:
        names = list(self._sequence(node, 0))
        names.insert(self._position(node, 2, len(names)), node.input[1])
        self.sequences[node.output[0]] = names
        yield from ()

    def _sequence_erase(self, node: Any) -> Nodes:
        names = list(self._sequence(node, 0))
        position = self._position(node, 1, -1)
        self._check_position(node, position, names)
        del names[position]
        self.sequences[node.output[0]] = names
        yield from ()

    def _sequence_at(self, node: Any) -> Nodes:
        names = self._sequence(node, 0)
        position = self._position(node, 1, 0)
        self._check_position(node, position, names)
        yield self._node("Identity", [names[position]], node.output)

    def _sequence_length(self, node: Any) -> Nodes:
        length = len(self._sequence(node, 0))
        yield self._constant(node.output[0], np.array(length, dtype=np.int64))

    def _split_to_sequence(self, node: Any) -> Nodes:
        settings, taken, output = self.known.attributes(node), node.input[0], node.output[0]
        axis = int(settings.get("axis", 0))
        length = self.known.tensors[taken].shape[axis]
        given = len(node.input) > 1 and node.input[1] != ""
        split = self._needed_value(node, 1, "split") if given else np.array(1)
        if split.shape == ():
            whole, rest = divmod(length, int(split))
            if whole > _MOST_PARTS:
                raise self._refused(node, f"makes a sequence of {whole} tensors, which is too long")
            sizes = [int(split)] * whole + [rest] * (rest > 0)
        else:
            sizes = [int(size) for size in split]
        parts = [self._fresh(f"{output}/{number}") for number in range(len(sizes))]
        self.sequences[output] = parts
        if given or settings.get("keepdims", 1):
            yield from self._split(taken, sizes, parts, axis)
            return
        pieces = [self._fresh(f"{part}/kept") for part in parts]
        yield from self._split(taken, sizes, pieces, axis)
        for piece, part in zip(pieces, parts, strict=True):
            yield from self._with_axes("Squeeze", piece, part, axis)

    def _split(self, taken: str, sizes: list[int], parts: list[str], axis: int) -> Nodes:
        if self.known.versions.get("", 1) < 13:
            yield self._node("Split", [taken], parts, axis=axis, split=sizes)
            return
        sizes_name = self._fresh(f"{parts[0]}/sizes")
        yield self._constant(sizes_name, np.array(sizes, dtype=np.int64))
        yield self._node("Split", [taken, sizes_name], parts, axis=axis)

    def _concat_from_sequence(self, node: Any) -> Nodes:
        settings, names = self.known.attributes(node), self._sequence(node, 0)
        if not names:
            raise self._refused(node, "joins an empty sequence; export the model without it")
        if settings.get("new_axis", 0):
            yield from self._joined(names, node.output[0], int(settings["axis"]))
        else:
            yield self._node("Concat", names, node.output, axis=int(settings["axis"]))

    def _sequence(self, node: Any, index: int) -> list[str]:
        name = node.input[index]
        if name not in self.sequences:
            raise self._refused(node, f"takes {name!r}, which is no sequence; save the model again")
        return self.sequences[name]

    def _position(self, node: Any, index: int, default: int) -> int:
        if len(node.input) <= index or not node.input[index]:
            return default
        return int(_single(self._needed_value(node, index, "position")))

    def _check_position(self, node: Any, position: int, names: list[str]) -> None:
        if not -len(names) <= position < len(names):
            raise InputError(
                f"{self.known.where}: {self.known.label(node)} takes element {position} of a "
                f"sequence of {len(names)}; the file is damaged, save it again"
            )

    # Values, names and new nodes.

    def _value(self, name: str) -> Array | None:
        return self.known.values.get(name)

    def _needed_value(self, node: Any, index: int, noun: str) -> Array:
        value = self._value(node.input[index])
        if value is None:
            raise self._unknown(node, node.input[index], noun)
        return value

    def _unknown(self, node: Any, name: str, noun: str) -> UnsupportedOp:
        return self._refused(
            node,
            f"depends on data: its {noun} {name!r} does not follow from shapes and constants; "
            f"give its value: --input {name}==VALUE (in Python, inputs={{{name!r}: "
            "np.array(VALUE)}), or export the model without it",
        )

    def _refused(self, node: Any, reason: str) -> UnsupportedOp:
        return UnsupportedOp(f"{self.known.where}: {self.known.label(node)} {reason}")

    def _fresh(self, name: str) -> str:
        """The name itself, or with a number if another tensor has it."""
        fresh = name
        while fresh in self.taken:
            self.copies[name] += 1
            fresh = f"{name}@{self.copies[name]}"
        self.taken.add(fresh)
        if name in self.used:
            self.used.add(fresh)
        return fresh

    def _node(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **rest: Any
    ) -> Any:
        return self.known.onnx.helper.make_node(op_type, list(inputs), list(outputs), **rest)

    def _constant(self, name: str, value: Array) -> Any:
        tensor = self.known.onnx.numpy_helper.from_array(value, name)
        return self._node("Constant", [], [name], value=tensor)

    def _with_axes(self, op_type: str, taken: str, output: str, axis: int) -> Nodes:
        """A `Squeeze` or `Unsqueeze` of one axis."""
        if self.known.versions.get("", 1) < 13:
            yield self._node(op_type, [taken], [output], axes=[axis])
            return
        axes = self._fresh(f"{output}/axes")
        yield self._constant(axes, np.array([axis], dtype=np.int64))
        yield self._node(op_type, [taken, axes], [output])


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


def _single(value: Array) -> Any:
    """The number in an array of one element."""
    return value.reshape(-1)[0]


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
