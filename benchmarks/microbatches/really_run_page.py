"""The page of `really_run.py`: tables and goals, all of them from the rows."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import rows as results
from rows import Row


def page(rows_file: Path) -> str:
    return results.provenance(results.read(rows_file))
