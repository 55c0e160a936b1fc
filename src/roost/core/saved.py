"""The `save` method of all nouns. `formats.py` registers the function that writes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

_writers: list[Callable[[object, str | Path], None]] = []


def register(writer: Callable[[object, str | Path], None]) -> None:
    """Set the function that writes a noun to a file."""
    _writers[:] = [writer]


class Saved:
    """A noun with a file format of its own."""

    def save(self, path: str | Path) -> None:
        """Write the noun to a file, compressed if the name ends in `.gz`."""
        if not _writers:  # what reads and writes files is slow to import, so it comes when needed
            importlib.import_module("roost.core.formats")
        _writers[0](self, path)
