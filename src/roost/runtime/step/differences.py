"""How far two runs of a step are apart, and how far they may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
# A gradient that is zero but for rounding (of a bias before a BatchNorm) is nothing but rounding: a
# gradient is also measured against this share of the largest among all gradients.
_FLOOR = 1e-3
_WHATS = ("output", "gradient", "parameter", "optimizer state", "buffer", "tied weight")
EAGER, CAPTURED = "PyTorch", "captured, one device"


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the placed step is from the same one of the unplaced step."""

    what: str  # one of _WHATS
    against: str
    absolute: float  # the largest between two elements; 0 is the same to the last bit
    relative: float  # that over the largest magnitude in the tensor
    tolerance: float  # of the relative one
    step: int  # counted from 1, where it was largest

    @property
    def same(self) -> bool:
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart it was."""

    # By name: loss, gradient of NAME, NAME; (captured) is added where it is that.
    differences: Mapping[str, Difference]
    steps: int
    devices: tuple[str, ...]  # in use
    first_op: str = ""  # the first in program order whose output differs by more than is allowed
    device: str = ""  # where that op ran
    note: str = ""  # what could not be compared

    @property
    def same(self) -> bool:
        return all(difference.same for difference in self.differences.values())

    @property
    def bitwise(self) -> bool:
        return all(difference.absolute == 0.0 for difference in self.differences.values())

    def check(self) -> Verification:
        """Itself; raises VerificationFailed where something differs."""
        if not self.same:
            raise VerificationFailed(self.verdict, self.first_op, self.device)
        return self

    @property
    def verdict(self) -> str:
        """One line."""
        count = f"{self.steps} step{'s' * (self.steps > 1)} on {', '.join(self.devices)}"
        if self.same:
            return f"the same numbers{', to the last bit' if self.bitwise else ''}: {count}"
        wrong = [name for name, difference in self.differences.items() if not difference.same]
        share = f"{len(wrong)} of {len(self.differences)} differ"
        found = f"not the same numbers: {count}; {share}, such as {wrong[0]}"
        return (
            f"{found}; the first op that differs is {self.first_op!r} on {self.device}"
            if self.first_op
            else found
        )

    def rows(self) -> list[tuple[str, str, int, str, Difference]]:
        """For each kind of thing: what, against what, how many, the name and the difference of the
        worst."""
        groups: dict[tuple[str, str], list[tuple[str, Difference]]] = {}
        for name, difference in self.differences.items():
            groups.setdefault((difference.what, difference.against), []).append((name, difference))
        found = []
        for (what, against), members in sorted(
            groups.items(), key=lambda group: (_WHATS.index(group[0][0]), group[0])
        ):
            name, worst = max(members, key=lambda each: (not each[1].same, each[1].relative))
            found.append((what, against, len(members), name.removesuffix(" (captured)"), worst))
        return found

    def __str__(self) -> str:
        head = ("what", "against", "count", "largest", "relative", "allowed", "of")
        lines = [head] + [
            (
                what,
                against,
                str(count),
                *(f"{x:.2g}" for x in (d.absolute, d.relative, d.tolerance)),
                name,
            )
            for what, against, count, name, d in self.rows()
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.verdict, *table, *([self.note] if self.note else [])])


class Differences:
    """Differences as they are found, the largest of each name over all steps."""

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance, self.step = tolerance, 0
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
        if ours is None or theirs is None:
            absolute = relative = float("inf")
            allowed = 0.0
        else:
            absolute, relative = apart(ours, theirs, floor)
            allowed = self._allowed(theirs)
        before = self.largest.get(name)
        if before is None or relative > before.relative:
            self.largest[name] = Difference(what, against, absolute, relative, allowed, self.step)

    def several(
        self,
        what: str,
        against: str,
        names: list[str],
        ours: list[Tensor],
        theirs: list[Tensor],
        more: str = "",
    ) -> None:
        """What is on one side only differs by all there is."""
        for number in range(max(len(ours), len(theirs))):
            name = names[number] if number < len(names) else f"{what} {number}"
            mine = ours[number] if number < len(ours) else None
            self.one(
                what,
                against,
                f"{name}{more}",
                mine,
                theirs[number] if number < len(theirs) else None,
            )

    def gradients(
        self, against: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], more: str = ""
    ) -> None:
        largest = max((_largest(value) for value in theirs.values()), default=0.0)
        for name in dict.fromkeys([*ours, *theirs]):
            named = f"gradient of {name}{more}"
            self.one("gradient", against, named, ours.get(name), theirs.get(name), _FLOOR * largest)

    def all_close(self, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all(
            apart(one, other.detach().cpu())[1] <= self._allowed(other) for one, other in pairs
        )

    def _allowed(self, tensor: Tensor) -> float:
        usual = TOLERANCES.get(tensor.dtype, 0.0)
        return usual if self.tolerance is None or usual == 0.0 else self.tolerance


def apart(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> tuple[float, float]:
    """The largest difference, and that over the largest magnitude; infinity where one has no such
    number."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf"), float("inf")
    if torch.equal(ours, theirs):
        return 0.0, 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    one, other = ours.to(wide), theirs.to(wide)
    alike = (ours == theirs) | (one.isnan() & other.isnan())
    difference = (one - other).abs().masked_fill(alike, 0.0)
    if not bool(difference.isfinite().all()):
        return float("inf"), float("inf")
    absolute = float(difference.max())
    if not (ours.is_floating_point() or ours.is_complex()):
        # Two large whole numbers may be one when written as a float64.
        absolute = max(absolute, 1.0)
    scale = max(_largest(theirs), floor)
    return absolute, absolute / scale if scale > 0.0 else (float("inf") if absolute > 0.0 else 0.0)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    wide = (tensor.abs() if tensor.is_complex() else tensor.to(torch.float64).abs()).to(
        torch.float64
    )
    return float(wide.masked_fill(~wide.isfinite(), 0.0).max())
