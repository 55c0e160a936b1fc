"""Differences between the tensors of two runs of a step, and the largest ones allowed.

`ops/verify.py` and `whole/verify.py` collect them; users get a `Verification`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from roost.errors import VerificationFailed

# Largest difference allowed, relative to the largest magnitude in the tensor; anything else must be
# equal.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
# Some gradients are nothing but rounding (of a bias before a BatchNorm): every gradient is also
# compared with this share of the largest among all gradients.
_FLOOR = 1e-3
_KINDS = ("output", "gradient", "parameter", "optimizer state", "buffer", "tied weight")
EAGER = "PyTorch"
CAPTURED = "captured, one device"


@dataclass(frozen=True)
class Difference:
    """The distance of a tensor of the placed step from the same tensor of the unplaced step."""

    what: str  # one of _KINDS
    against: str  # EAGER or CAPTURED
    absolute: float  # largest between two elements; 0: equal to the last bit
    relative: float  # absolute, over the largest magnitude in the tensor
    tolerance: float  # largest relative difference allowed
    step: int  # where it was largest, counted from 1

    @property
    def same(self) -> bool:
        return self.relative <= self.tolerance


class DifferenceRow(NamedTuple):
    """All tensors of one kind, and the worst difference among them."""

    what: str
    against: str
    num_tensors: int
    name: str  # of the tensor with the worst difference
    worst: Difference


@dataclass(frozen=True)
class Verification:
    """The result of comparing a placed with an unplaced run: every difference, and a verdict."""

    # By name: loss, gradient of NAME, NAME; with (captured) if compared with the captured program.
    differences: Mapping[str, Difference]
    steps: int
    devices: tuple[str, ...]  # in use
    first_op: str = ""  # the first, in program order, whose output differs too much
    device: str = ""  # that ran this op
    note: str = ""  # a comparison that was not possible

    @property
    def same(self) -> bool:
        return all(difference.same for difference in self.differences.values())

    @property
    def bitwise(self) -> bool:
        return all(difference.absolute == 0.0 for difference in self.differences.values())

    def check(self) -> Verification:
        """Return itself; raise `VerificationFailed` if anything differs too much."""
        if not self.same:
            raise VerificationFailed(self.verdict, self.first_op, self.device)
        return self

    @property
    def verdict(self) -> str:
        """Tell the result in one line."""
        count = f"{self.steps} step{'s' * (self.steps > 1)} on {', '.join(self.devices)}"
        if self.same:
            return f"the same numbers{', to the last bit' if self.bitwise else ''}: {count}"
        wrong = [name for name, difference in self.differences.items() if not difference.same]
        share = f"{len(wrong)} of {len(self.differences)} differ"
        verdict = f"not the same numbers: {count}; {share}, such as {wrong[0]}"
        if self.first_op:
            verdict += f"; the first op that differs is {self.first_op!r} on {self.device}"
        return verdict

    def rows(self) -> list[DifferenceRow]:
        """Give one row for each kind of tensor and what it was compared with."""
        kinds: dict[tuple[str, str], list[tuple[str, Difference]]] = {}
        for name, difference in self.differences.items():
            kinds.setdefault((difference.what, difference.against), []).append((name, difference))
        rows = []
        for what, against in sorted(kinds, key=lambda kind: (_KINDS.index(kind[0]), kind)):
            members = kinds[what, against]
            name, worst = max(members, key=lambda each: (not each[1].same, each[1].relative))
            name = name.removesuffix(" (captured)")
            rows.append(DifferenceRow(what, against, len(members), name, worst))
        return rows

    def __str__(self) -> str:
        head = ("what", "against", "count", "largest", "relative", "allowed", "of")
        lines = [head]
        for what, against, count, name, worst in self.rows():
            figures = (worst.absolute, worst.relative, worst.tolerance)
            absolute, relative, tolerance = (f"{figure:.2g}" for figure in figures)
            lines.append((what, against, str(count), absolute, relative, tolerance, name))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.verdict, *table, *([self.note] if self.note else [])])


class Differences:
    """Collects differences while steps are compared; of each name the largest over all steps."""

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.step = 0
        self.largest: dict[str, Difference] = {}

    def one(
        self,
        what: str,
        against: str,
        name: str,
        ours: Tensor | None,
        theirs: Tensor | None,
        floor: float = 0.0,
    ) -> None:
        """Compare two tensors; a missing one differs by infinity."""
        absolute = relative = float("inf")
        allowed = 0.0
        if ours is not None and theirs is not None:
            absolute, relative = apart(ours, theirs, floor)
            allowed = self._allowed(theirs)
        before = self.largest.get(name)
        if before is None or relative > before.relative:
            self.largest[name] = Difference(what, against, absolute, relative, allowed, self.step)

    def outputs(
        self,
        against: str,
        names: Sequence[str],
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        suffix: str = "",
    ) -> None:
        """Compare the tensors that a model returns, in their order."""
        for number, (mine, other) in enumerate(zip_longest(ours, theirs)):
            name = names[number] if number < len(names) else f"output {number}"
            self.one("output", against, name + suffix, mine, other)

    def gradients(
        self,
        against: str,
        ours: Mapping[str, Tensor],
        theirs: Mapping[str, Tensor],
        suffix: str = "",
    ) -> None:
        """Compare gradients by the names of their parameters."""
        largest = max((_largest(value) for value in theirs.values()), default=0.0)
        for name in dict.fromkeys([*ours, *theirs]):
            named = f"gradient of {name}{suffix}"
            self.one("gradient", against, named, ours.get(name), theirs.get(name), _FLOOR * largest)

    def all_close(self, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
        """Tell if no pair of tensors differs by more than the tolerance."""
        pairs = zip(ours, theirs, strict=True)
        return all(
            apart(one, other.detach().cpu())[1] <= self._allowed(other) for one, other in pairs
        )

    def _allowed(self, tensor: Tensor) -> float:
        usual = TOLERANCES.get(tensor.dtype, 0.0)
        return usual if self.tolerance is None or usual == 0.0 else self.tolerance


def apart(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> tuple[float, float]:
    """Give the largest difference, and its share of the largest magnitude.

    Both are infinite if shapes or types differ, or if only one tensor has a NaN or an infinity.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf"), float("inf")
    if torch.equal(ours, theirs):
        return 0.0, 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    one = ours.to(wide)
    other = theirs.to(wide)
    alike = (ours == theirs) | (one.isnan() & other.isnan())
    difference = (one - other).abs().masked_fill(alike, 0.0)
    if not bool(difference.isfinite().all()):
        return float("inf"), float("inf")
    absolute = float(difference.max())
    if not (ours.is_floating_point() or ours.is_complex()):
        # Two large whole numbers may round to the same float64.
        absolute = max(absolute, 1.0)
    scale = max(_largest(theirs), floor)
    if scale > 0.0:
        return absolute, absolute / scale
    return absolute, float("inf") if absolute > 0.0 else 0.0


def _largest(tensor: Tensor) -> float:
    """Give the largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    wide = (tensor.abs() if tensor.is_complex() else tensor.to(torch.float64).abs()).to(
        torch.float64
    )
    return float(wide.masked_fill(~wide.isfinite(), 0.0).max())
