"""What a row of results was measured with: the commit, and the machine in a few words."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str:
    """The commit of this checkout, with a + where files of it were changed since; "" outside a
    checkout."""
    here = Path(__file__).parent
    try:
        found = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(
            here, "status", "--porcelain", "--untracked-files=no", "--", "../../src", "."
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found + ("+" if changed else "")


@cache
def machine() -> str:
    """Such as `AMD EPYC, 2 cores, x86_64`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores, {platform.machine()}"


def measured_with() -> dict[str, str]:
    """For a row."""
    return {"commit": commit(), "machine": machine()}


def told(rows: list[dict[str, object]], key: str = "commit") -> str:
    """`0dde31b (12 rows), not recorded (30)`: what rows say of themselves, for a page."""
    counts: dict[str, int] = {}
    for row in rows:
        said = str(row.get(key) or "not recorded")
        counts[said] = counts.get(said, 0) + 1
    return ", ".join(f"{said} ({count:,} rows)" for said, count in counts.items())


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()
