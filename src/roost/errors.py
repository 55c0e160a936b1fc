"""The errors Roost raises.

    RoostError
    ├─ InputError(ValueError)       wrong input, which the caller can mend; quoted in the message
    │   ├─ GraphError               a cycle, a missing input, a repeated name
    │   ├─ UnsupportedOp            a front-end cannot describe an op
    │   └─ UnknownName              suggests the nearest known name
    ├─ Infeasible                   nothing fits; carries device and missing bytes
    ├─ MissingExtra(ImportError)    says which extra to install
    ├─ ExecutionError               a device failed; carries op, device, placement
    ├─ VerificationFailed           a placed step has other numbers; carries the first op
    └─ BudgetSpent                  internal; `solve` catches it

A placement that overflows memory is a result (`trial.feasible` is false), never an exception.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_LONG_TEXT = 2000  # characters of a message, from which its names are cut
_LONG_NAME = re.compile(r"\S{200,}")


def cut(text: str) -> str:
    """A message with long names cut in the middle: a file can hold a name of 100 MB."""
    if len(text) <= _LONG_TEXT:
        return text
    text = _LONG_NAME.sub(lambda name: f"{name[0][:80]}...{name[0][-80:]}", text)
    half = _LONG_TEXT // 2
    return text if len(text) <= _LONG_TEXT else f"{text[:half]} ... {text[-half:]}"


class RoostError(Exception):
    """Anything Roost raises on purpose."""

    def __str__(self) -> str:
        return cut(super().__str__())


class InputError(RoostError, ValueError):
    """An argument is wrong, and the caller can mend it."""


class GraphError(InputError):
    """A graph that is not a directed acyclic graph of well-described ops."""


class UnsupportedOp(InputError):
    """A front-end cannot describe an op."""


class UnknownName(InputError):
    """An unknown name; suggests the nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = [] if len(name) > _LONG_TEXT else difflib.get_close_matches(name, names, 1, 0.5)
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
    """Nothing fits: no placement stays within the memory of every device."""

    def __init__(self, message: str, device: str = "", missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.device = device
        self.missing_bytes = missing_bytes
        self.result: Any = None  # of the search, with its best trial
        self.activation_share: float | None = None  # with which the best trial would fit
        self.microbatches: int | None = None  # a number of microbatches that would fit


class MissingExtra(RoostError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: pip install 'roost[{extra}]'")
        self.extra = extra


class _AtOp(RoostError):
    """An error at one op, on one device."""

    def __init__(self, message: str, op: str = "", device: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.device = device


class ExecutionError(_AtOp):
    """A device failed while it ran a placement."""


class VerificationFailed(_AtOp):
    """A placed step does not have the numbers of the unplaced one."""


class BudgetSpent(RoostError):
    """The budget of trials or seconds is spent."""
