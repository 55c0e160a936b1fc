"""Writes the published JSON Schema of every file format: `python -m roost.testing.schemas
docs/schemas`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from roost.core import files, formats


def published() -> dict[str, bytes]:
    """The schema files by name, as they should be."""
    return {
        f"{name.removeprefix('roost.')}.schema.json": msgspec.json.format(
            msgspec.json.encode(schema), indent=2
        )
        + b"\n"
        for name, schema in formats.schemas().items()
    }


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in published().items():
        files.write_bytes(Path(folder) / name, text)


if __name__ == "__main__":
    main(sys.argv[1])
