"""The errors Roost raises.

    RoostError
    ├─ InputError(ValueError)       the caller can mend it; the message quotes the input
    │   ├─ GraphError               the graph is not one: a cycle, a missing input, a repeated name
    │   ├─ UnsupportedOp            a front-end met an op it cannot describe
    │   └─ UnknownName              no such thing; suggests the nearest
    ├─ Infeasible                   nothing fits; carries device and missing bytes
    ├─ MissingExtra(ImportError)    says which extra to install
    ├─ ExecutionError               a device failed; carries op, device, placement
    ├─ VerificationFailed           a placed step has other numbers; carries the first op that
    differs, and its device
    └─ BudgetSpent                  internal; `solve` catches it

A placement that overflows memory is a result (`trial.feasible` is false), never an exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class RoostError(Exception):
    """Anything Roost raises on purpose."""


class InputError(RoostError, ValueError):
    """Something the caller gave is wrong, and the caller can mend it."""


class GraphError(InputError):
    """A graph that is not a directed acyclic graph of well-described ops."""


class UnsupportedOp(InputError):
    """A front-end met an op it cannot describe."""


class UnknownName(InputError):
    """A name that is not among the known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        message = f"no {what} called {name!r}"
        if near:
            message += f"; did you mean {near[0]!r}?"
        elif names:
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            message += f"; known: {shown}"
        super().__init__(message)
        self.name = name
        self.nearest = near[0] if near else None


class Infeasible(RoostError):
    """Nothing fits: no placement can be found that stays within the memory of every device."""

    def __init__(self, message: str, device: str = "", missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.device = device
        self.missing_bytes = missing_bytes
        self.result: Any = None  # of the search that found nothing, with its best try
        # What a smaller batch would have to leave of the activations.
        self.activation_share: float | None = None


class MissingExtra(RoostError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: pip install 'roost[{extra}]'")
        self.extra = extra


class ExecutionError(RoostError):
    """A device failed while it ran a placement."""

    def __init__(self, message: str, op: str = "", device: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.device = device


class VerificationFailed(RoostError):
    """A placed step does not have the numbers of the unplaced one."""

    def __init__(self, message: str, op: str = "", device: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.device = device


class BudgetSpent(RoostError):
    """The budget of trials or seconds is spent."""
