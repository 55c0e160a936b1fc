"""Rows of results: their provenance, and the conclusions that they allow.

A row is one line of JSON in `benchmarks/results/`. It is sound when the script that measured it
wrote down a commit without uncommitted changes. Pages show every row, mark the figures that rest on other rows with `?`, and
draw conclusions from sound rows alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def read(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured_with() -> Row:
    """Provenance of a new row: command, commit, versions and processor."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    packages = ("numpy", "numba", "torch")
    return {
        "command": " ".join(["python", name, *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
    }


@cache
def commit() -> str:
    """The commit of this checkout, with a + where files changed since.

    Outside a checkout it is the variable COMMIT of the environment, or "".
    """
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "")
    changed = "\n".join(line for line in changed.splitlines() if "benchmarks/results/" not in line)
    return found + ("+" if changed else "")


@cache
def machine() -> str:
    """Such as `AMD EPYC, 2 cores, x86_64`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else "unknown processor"
    return f"{processor}, {os.cpu_count()} cores, {platform.machine()}"


def is_sound(row: Row) -> bool:
    """Whether the script itself wrote down a commit without uncommitted changes."""
    said = str(row.get("commit") or "")
    return bool(said) and not said.endswith("+") and not row.get("commit_by_hand")


def sound(rows: Iterable[Row]) -> list[Row]:
    """The rows that conclusions may rest on."""
    return [row for row in rows if is_sound(row)]


def mark(figure: str, rows: Iterable[Row]) -> str:
    """The figure, with a ? where one of its rows is not sound."""
    return figure if not figure or all(map(is_sound, rows)) else f"{figure}?"


def provenance(rows: list[Row]) -> str:
    """A paragraph for the top of a page: which commits its rows come from."""
    clean, changed, late, silent = [], [], [], []
    for row in rows:
        said = str(row.get("commit") or "")
        changed_then, typed = said.endswith("+"), row.get("commit_by_hand")
        (silent if not said else changed if changed_then else late if typed else clean).append(said)
    parts = []
    if clean:
        parts.append(f"{len(clean)} name a commit ({_counted(clean)})")
    if changed:
        parts.append(f"{len(changed)} were measured with uncommitted changes ({_counted(changed)})")
    if late:
        parts.append(f"{len(late)} had their commit typed in afterwards ({_counted(late)})")
    if silent:
        parts.append(f"{len(silent)} name no commit")
    text = f"Rows: {len(rows)}. Of these, " + ", ".join(parts) + "."
    if not clean:
        return f"{text} So this page supports no conclusion.\n"
    if changed or late or silent:
        text += " A `?` marks figures that rest on the latter, and no conclusion rests on them."
    return text + "\n"


def verdict(figure: float, goal: float, rows: list[Row], at_most: bool = True) -> str:
    """`met` or `missed`; `open` where a row is not sound, or there is no row."""
    if not rows:
        return "open: not measured"
    unsound = sum(not is_sound(row) for row in rows)
    if unsound:
        return f"open: {unsound} of {len(rows)} rows have no clean commit"
    return "met" if (figure <= goal if at_most else figure >= goal) else "missed"


def _counted(commits: list[str]) -> str:
    counts = {name: commits.count(name) for name in dict.fromkeys(commits)}
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
