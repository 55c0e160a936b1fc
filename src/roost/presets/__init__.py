"""Clusters by name: one TOML file per machine, each with the source of every figure."""

from __future__ import annotations

import os
from pathlib import Path

from roost import catalog
from roost.core.cluster import Cluster
from roost.errors import UnknownName

HERE = "here"  # the name of this machine


def names() -> list[str]:
    """The presets, sorted."""
    return catalog.names("presets", ".toml")


def cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a preset, or in a file; raises UnknownName with the nearest preset.

    `here` is this machine. A preset wins over a file of its name in the working directory: write
    `./cpu` for the file.
    """
    if os.fspath(name_or_path) == HERE:
        from roost.presets.probe import probe

        return probe()
    from roost.core import formats  # msgspec is slow to import, and names() does not need it

    text = os.fspath(name_or_path)
    known = names()
    if text in known:
        path = catalog.ROOT / "presets" / f"{text}.toml"
    elif _looks_like_a_path(text):
        path = Path(text)
    else:
        raise UnknownName("preset", text, [*known, HERE])
    loaded: Cluster = formats.load_as(Cluster, path)
    return loaded


def _looks_like_a_path(text: str) -> bool:
    if text.endswith((".toml", ".gz")) or "/" in text or os.sep in text:
        return True
    return os.path.isfile(text)  # noqa: PTH113  Path.is_file raises on a name too long
