"""`benchmarks/mutants.py`: one change at a time, and none that a test cannot notice."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import mutants  # noqa: E402

TEXT = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1

@cache(size=8)
def area(side: int | None = 3, exact: bool = False) -> float | None:
    if exact and not side < 0:
        return -side * side
    total = [a - b for a, b in zip(side, side, strict=True)]
    total += [1.5]
    return total if ready(total) else None
"""
CHANGES = [
    ("area", "3 -> 4"),
    ("area", "False -> True"),
    ("area", "exact and (not side < 0) -> exact or not side < 0"),
    ("area", "not side < 0 -> side < 0"),
    ("area", "side < 0 -> side <= 0"),
    ("area", "0 -> 1"),
    ("area", "-side * side -> -side / side"),
    ("area", "-side -> side"),
    ("area", "a - b -> a + b"),
    ("area", "total += [1.5] -> total -= [1.5]"),
    ("area", "1.5 -> 2.5"),
    ("area", "total if ready(total) else None -> total if not ready(total) else None"),
]


def test_a_mutant_is_one_change_outside_of_types_and_decorators(tmp_path):
    file = tmp_path / "area.py"
    file.write_text(TEXT)
    found = list(mutants.mutants_of(tmp_path, file))
    assert sorted((one.function, one.change) for one in found) == sorted(CHANGES)
    texts = [mutants.mutated(TEXT, one) for one in found]
    assert len({ast.unparse(ast.parse(TEXT)), *texts}) == len(CHANGES) + 1
    for one, text in zip(found, texts, strict=True):
        assert one.change.partition(" -> ")[2] in text.replace("(not side < 0)", "not side < 0")


def test_the_same_seed_draws_the_same_mutants():
    drawn = mutants.sample(ROOT, ["learners", "plan"], 20, 0)
    assert drawn == mutants.sample(ROOT, ["learners", "plan"], 20, 0)
    assert drawn != mutants.sample(ROOT, ["learners", "plan"], 20, 1)
    assert {one.folder for one in drawn} <= {"learners", "plan"}


def test_a_mutant_is_tried_again_when_its_file_changed_or_it_survived_other_tests():
    row = {"file": "a.py", "site": 1, "source": "s", "tests": "t"}
    for outcome, changed, known in (
        ("killed", {}, True),
        ("killed", {"tests": "u"}, True),
        ("killed", {"source": "u"}, False),
        ("survived", {}, True),
        ("survived", {"tests": "u"}, False),
    ):
        assert mutants.is_known(row, [row | changed | {"outcome": outcome}]) == known


def test_each_mutant_that_is_explained_as_equal_is_there():
    """A line that changed needs another look."""
    for one in tomllib.loads(mutants.EQUAL.read_text())["mutant"]:
        every = mutants.mutants_of(ROOT, ROOT / one["file"])
        keys = [(m.function, m.code, m.change) for m in every]
        assert (one["function"], one["code"], one["change"]) in keys, one
        assert one["why"]
