"""Exit codes of `roost`, and errors as one line."""

from __future__ import annotations

import os
import sys
from typing import Any

from typer.core import TyperGroup

from roost.cli import _console
from roost.errors import Infeasible, InputError, MissingExtra, RoostError, VerificationFailed

# Typer ends bad usage with 2 too, Ctrl-C with 130, a closed pipe with 1.
BAD_INPUT = 2
NOTHING_FITS = 3
NOT_VERIFIED = 4
_OTHER = 1


class Group(TyperGroup):
    """The verbs. A RoostError becomes a line and an exit code. Other errors are bugs."""

    def main(self, *args: Any, **settings: Any) -> Any:
        _open_streams()
        _console.listen()
        try:
            return super().main(*args, **settings)
        except RoostError as error:
            _console.error(str(error))
            raise SystemExit(_code(error)) from None
        except OSError as error:
            _abandon_output()
            _console.error(str(error))
            raise SystemExit(BAD_INPUT) from None

    def invoke(self, ctx: Any) -> Any:
        result = super().invoke(ctx)
        sys.stdout.flush()  # here a full disk is still an error line, and not when Python ends
        return result


def _open_streams() -> None:
    """Discard output to streams that were closed before Python began, as with `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115


def _abandon_output() -> None:
    """Discard the rest of standard output if it cannot be written: Python would fail at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _code(error: RoostError) -> int:
    if isinstance(error, InputError | MissingExtra):
        return BAD_INPUT
    if isinstance(error, VerificationFailed):
        return NOT_VERIFIED
    return NOTHING_FITS if isinstance(error, Infeasible) else _OTHER
