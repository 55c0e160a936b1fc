"""FLOP and bytes of the ops of a file format, from the shapes of their tensors.

A multiplication and an addition are two FLOP. An op that only moves data has none. An op that works
on each element has one for each that it makes; reductions and normalisations have a few for each
that they take. Memory limits those ops anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.frontends.tracing.tensors import Tensor


@dataclass(frozen=True)
class OpCall:
    """An op with the tensors it takes and makes; None for one that is left out or never read."""

    op: str  # lower-case, without its domain
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]

    def taken(self, index: int) -> Tensor:
        """An input that must be there."""
        tensor = self.inputs[index]
        assert tensor is not None
        return tensor

    def has(self, index: int) -> bool:
        """Tell whether an input is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    @property
    def made(self) -> Tensor:
        """The first output that is read."""
        return next(tensor for tensor in self.outputs if tensor is not None)


Formula = Callable[[OpCall], float]


@dataclass(frozen=True)
class OpCosts:
    """The costs of the ops of one format, by lower-case kind. To add an op, enter it here."""

    formulas: Mapping[str, Formula]
    moves: frozenset[str]  # move or make data without computing
    gathers: frozenset[str]  # read as much of their first input as they make
    shape_only: frozenset[str]  # read the shape of their inputs, not the values
    elementwise: frozenset[str]
    per_input: Mapping[str, int]  # FLOP for each element of the first input

    def flop(self, call: OpCall) -> tuple[float, str]:
        """FLOP of an op, and their source: formula, elements (counted) or unknown (guessed)."""
        if call.op in self.formulas:
            return float(self.formulas[call.op](call)), "formula"
        if call.op in self.moves:
            return 0.0, "formula"
        if call.op in self.per_input and call.has(0):
            return float(self.per_input[call.op] * call.taken(0).elements), "elements"
        made = [tensor.elements for tensor in call.outputs if tensor is not None]
        taken = [tensor.elements for tensor in call.inputs if tensor is not None]
        count = sum(made) if made else max(taken, default=0)
        return float(count), "elements" if call.op in self.elementwise else "unknown"

    def bytes(self, call: OpCall) -> tuple[int, int]:
        """Bytes an op reads and writes, without variables that it changes."""
        written = sum(tensor.bytes for tensor in call.outputs if tensor is not None)
        if call.op in self.shape_only:
            return 0, written
        read = [tensor.bytes for tensor in call.inputs if tensor is not None]
        if call.op in self.gathers and read:
            read[0] = min(read[0], written)
        return sum(read), written
