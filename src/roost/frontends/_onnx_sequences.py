"""Sequences of an ONNX model as lists of tensor names, and new nodes that take their place.

`_onnx_unroll` calls it. An op on a sequence becomes `Split`, `Concat`, `Identity`, or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError, UnsupportedOp
from roost.frontends._onnx_known import Known

Nodes = Iterator[Any]
MOST_PARTS = 30_000  # nodes that the loops of one model may become


class SequenceNodes:
    """The sequences of one model, and plain nodes for the ops that take or make them."""

    def __init__(self, known: Known, taken: set[str], used: set[str]) -> None:
        self.known = known
        self.taken = taken  # names of tensors that no copy may have
        self.used = used  # tensors that some node reads; copies of them are added
        self.sequences: dict[str, list[str]] = {}
        self.copies = Counter[str]()  # of each name, as `@2` counts them

    def tensor_names(self, name: str) -> list[str]:
        """The tensors behind a name: those of a sequence, or the one tensor."""
        return self.sequences.get(name, [name])

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
            if whole > MOST_PARTS:
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
        return int(single(self._needed_value(node, index, "position")))

    def _check_position(self, node: Any, position: int, names: list[str]) -> None:
        if not -len(names) <= position < len(names):
            raise InputError(
                f"{self.known.where}: {self.known.label(node)} takes element {position} of a "
                f"sequence of {len(names)}; the file is damaged, save it again"
            )

    # Values, names and new nodes.

    def _joined(self, names: Sequence[str], output: str, axis: int) -> Nodes:
        parts = [self._fresh(f"{name}/row") for name in names]
        for name, part in zip(names, parts, strict=True):
            yield from self._with_axes("Unsqueeze", name, part, axis)
        yield self._node("Concat", parts, [output], axis=axis)

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


def single(value: Array) -> Any:
    """The number in an array of one element."""
    return value.reshape(-1)[0]
