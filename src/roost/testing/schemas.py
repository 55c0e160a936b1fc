"""Writes the JSON Schema of every file format: `python -m roost.testing.schemas docs/schemas`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from roost.core import files, formats


def published() -> dict[str, bytes]:
    """The text of each schema file, by file name."""
    texts: dict[str, bytes] = {}
    for name, schema in formats.schemas().items():
        text = msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"
        # A description is a docstring, which may be wrapped.
        texts[f"{name.removeprefix('roost.')}.schema.json"] = re.sub(rb"\\n +", b" ", text)
    return texts


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in published().items():
        files.write_bytes(Path(folder) / name, text)


if __name__ == "__main__":
    main(sys.argv[1])
