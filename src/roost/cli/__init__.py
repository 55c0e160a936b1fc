"""The `roost` command: one file for each verb.

`main` imports the verbs (`_app`) itself, so that Ctrl-C works during the import. Up to `main` the
command imports nothing slow, such as `typing`: Ctrl-C there shows a traceback of Python.
"""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False  # true for type checkers
if TYPE_CHECKING:
    from typing import Any

    from roost.cli._app import app

__all__ = ["app", "main"]

_INTERRUPTED = 130


def main() -> None:
    """The `roost` command. SIGTERM ends it as Ctrl-C does: a search writes the best so far."""
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        from roost.cli._app import app

        app(prog_name="roost")  # also as `python -m roost`: completion depends on the name
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'roost.cli' has no attribute {name!r}")
    from roost.cli._app import app

    return app
