"""Tensors of model files: their sizes, the shapes given for inputs, and the coverage of FLOP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from roost.errors import InputError, UnknownName

V = TypeVar("V")

# A dimension in a file: its size, the name of its size, or None.
Dimension = int | str | None
Declared = tuple[Dimension, ...] | None  # None: not even the rank is declared
Shape = tuple[int, ...]


def by_name(names_of: Mapping[V, str]) -> dict[str, V]:
    """Each name, in lower case, with the value it is listed under."""
    return {name.lower(): value for value, names in names_of.items() for name in names.split()}


BITS = by_name(
    {
        2: "uint2 int2",
        4: "uint4 int4 float4_e2m1",
        6: "float6_e2m3 float6_e3m2",
        8: """
            bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2
            float8_e5m2fnuz float8_e8m0
        """,
        16: "uint16 int16 float16 bfloat16",
        32: "uint32 int32 float32",
        64: "uint64 int64 float64 complex64 string",
        128: "complex128",
    }
)


@dataclass(frozen=True)
class Tensor:
    """The type and shape of a tensor."""

    dtype: str
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return (self.elements * BITS[self.dtype] + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Coverage:
    """The sources of a graph's FLOP and bytes."""

    flop_by_formula: float  # share of the FLOP from formulas; the rest counts elements
    ops_by_formula: float  # share of ops
    bytes_by_formula: float  # share of the bytes moved that belong to those ops
    # Kinds of ops without a rule, sorted; the FLOP count their elements.
    unknown_kinds: tuple[str, ...]


@dataclass
class Count:
    """Adds up the coverage of a graph op by op."""

    by_formula: tuple[float, int, int] = (0.0, 0, 0)  # FLOP, ops, bytes
    in_all: tuple[float, int, int] = (0.0, 0, 0)
    unknown: set[str] = field(default_factory=set)

    def add(self, kind: str, flop: float, moved_bytes: int, source: str) -> None:
        """Add an op; `source` is "formula", "elements" (counted) or "unknown" (guessed)."""
        self.in_all = _sum(self.in_all, flop, moved_bytes)
        if source == "formula":
            self.by_formula = _sum(self.by_formula, flop, moved_bytes)
        elif source == "unknown":
            self.unknown.add(kind)

    def coverage(self) -> Coverage:
        pairs = zip(self.by_formula, self.in_all, strict=True)
        flop, ops, moved = (part / whole if whole else 1.0 for part, whole in pairs)
        return Coverage(flop, ops, moved, tuple(sorted(self.unknown)))


def _sum(so_far: tuple[float, int, int], flop: float, moved_bytes: int) -> tuple[float, int, int]:
    return so_far[0] + flop, so_far[1] + 1, so_far[2] + moved_bytes


class Names:
    """Gives out op names, each once."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def unused(self, name: str) -> str:
        """The name, with a number if it is taken."""
        unused = name
        while unused in self._times:
            self._times[name] += 1
            unused = f"{name}#{self._times[name]}"
        self._times[unused] = 1
        return unused


def einsum_flop(equation: str, shapes: Sequence[Shape]) -> float:
    """FLOP of an einsum: one for each combination of indices and operand.

    It is one operand less if no index is summed.
    """
    taken, arrow, made = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    spread: Shape = ()  # the dimensions of the ellipsis
    for term, shape in zip(taken.split(","), shapes, strict=True):
        before, dots, after = term.partition("...")
        end = len(shape) - len(after)
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(after, shape[end:], strict=True))
        if dots and end - len(before) >= len(spread):
            spread = shape[len(before) : end]
    summed = not arrow or set(sizes) - set(made)
    return float(
        math.prod(sizes.values()) * math.prod(spread) * (len(shapes) - (0 if summed else 1))
    )


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def fixed_shapes(
    declared: Mapping[str, Declared], given: Mapping[str, Sequence[int]], where: str
) -> tuple[dict[str, Shape], dict[str, int]]:
    """The shape of every input, and the size of every named dimension.

    Shapes are declared or given. A size given once holds for every input with that dimension.
    """
    sizes: dict[str, int] = {}
    given_shapes: dict[str, Shape] = {}
    for name, sequence in given.items():
        if name not in declared:
            raise UnknownName(f"input of {where}", name, declared)
        given_shapes[name] = _checked(name, declared[name], sequence, sizes, where)
    shapes: dict[str, Shape] = {}
    open_inputs: dict[str, Declared] = {}
    for name, dimensions in declared.items():
        if name in given_shapes:
            shapes[name] = given_shapes[name]
        elif dimensions is not None and all(isinstance(d, int) or d in sizes for d in dimensions):
            shapes[name] = tuple(d if isinstance(d, int) else sizes[str(d)] for d in dimensions)
        else:
            open_inputs[name] = dimensions
    if open_inputs:
        raise InputError(_ask(open_inputs, where))
    return shapes, sizes


def _checked(
    name: str, declared: Declared, given: Sequence[int], sizes: dict[str, int], where: str
) -> Shape:
    """The given shape, if it fits the declared one; named dimensions go to `sizes`."""
    if isinstance(given, np.ndarray):
        raise InputError(f"{where}: {name!r} is given a value, an array, where a shape is needed")
    try:
        shape = tuple(int(size) for size in given)
    except (TypeError, ValueError):
        raise InputError(
            f"shape {given!r} of input {name!r} must be a list of whole numbers"
        ) from None
    if isinstance(given, str) or any(
        size < 0 or size != number for size, number in zip(shape, given, strict=True)
    ):
        raise InputError(
            f"shape {given!r} of input {name!r} must be a list of whole numbers, none below 0"
        )
    if declared is None:
        return shape
    pairs = zip(shape, declared, strict=False)
    fits = all(size == d for size, d in pairs if isinstance(d, int))
    if not fits or len(shape) != len(declared):
        raise InputError(
            f"{where}: input {name!r} is declared {written(declared)}; {written(shape)} does not "
            "fit that"
        )
    for size, dimension in zip(shape, declared, strict=True):
        if isinstance(dimension, str) and sizes.setdefault(dimension, size) != size:
            raise InputError(
                f"{where}: dimension {dimension!r} is {sizes[dimension]} in one input and {size} "
                f"in {name!r}; give it the same size in all"
            )
    return shape


def _ask(open_inputs: Mapping[str, Declared], where: str) -> str:
    listed = ", ".join(f"{name} {written(declared)}" for name, declared in open_inputs.items())
    name, declared = next(iter(open_inputs.items()))
    example: Shape = (1, 3, 224, 224)
    if declared is not None:
        example = tuple(d if isinstance(d, int) else 1 for d in declared)
    option = f"--input {name}={','.join(map(str, example))}"
    return (
        f"{where}: the shapes of these inputs are not fixed: {listed}; "
        f"give each of them, such as {option} (in Python, inputs={{{name!r}: {example}}})"
    )


def written(shape: Declared) -> str:
    """The text of a shape, such as [batch, 3, ?]."""
    if shape is None:
        return "of unknown rank"
    sizes = ("?" if dimension is None else str(dimension) for dimension in shape)
    return f"[{', '.join(sizes)}]"
