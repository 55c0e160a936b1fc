"""Pages of results are rendered from rows, and their templates hold no figures."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import pages  # noqa: E402
import rows  # noqa: E402

SCRIPTS = sorted({BENCHMARKS / script for script in pages.SCRIPTS.values()})
# Commands, and papers with their year, are no figures; nor are the digits of a name such as k80x4.
NO_FIGURE = r"`[^`]*`|\(?[A-Z][\w-]+ et al\.,? \(?(?:19|20)\d\d\)?"
FIGURE = r"(?<![\w./-])\d[\d.,]*(?:e-?\d+)?(?![\w/-])"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: path.stem)
def test_a_page_equals_its_rows(page):
    assert page.read_text() == pages.render(page)


def test_no_page_has_rows_without_a_page_or_a_page_without_rows():
    for page in pages.pages():
        assert page.with_suffix(".jsonl").exists()


def typed_figures(source):
    """Sentences in the strings of a script that hold a figure."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and isinstance(node.body[0], ast.Expr)
    }
    writers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not re.search("main|run|measured|_all", node.name)
    ]
    for writer in writers:
        for node in ast.walk(writer):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(NO_FIGURE, "", node.value)
                if id(node) not in skipped and len(text.split()) > 3 and re.search(FIGURE, text):
                    yield node.value


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_figure_is_typed_into_a_page(script):
    assert not list(typed_figures(script.read_text()))


def test_a_typed_figure_is_found():
    bad = 'def page():\n    return "the goal of 1.05 is met: 1.044"\n'
    assert list(typed_figures(bad))
    good = 'def page():\n    return f"the goal of {GOAL} (`--trials 5000`, Gao et al. 2018) is"\n'
    assert not list(typed_figures(good))


SOUND = {"commit": "0a1b2c3"}
UNSOUND = [{}, {"commit": ""}, {"commit": "0a1b2c3+"}, {"commit": "0a1", "commit_by_hand": True}]


@pytest.mark.parametrize("row", UNSOUND)
def test_no_conclusion_rests_on_a_row_without_a_clean_commit(row):
    assert rows.verdict(1.0, 1.05, [SOUND, row]).startswith("open")
    assert rows.mark("1.00", [SOUND, row]) == "1.00?"
    assert rows.sound([SOUND, row]) == [SOUND]


def test_verdicts_are_computed():
    assert rows.verdict(1.05, 1.05, [SOUND]) == "met"
    assert rows.verdict(1.06, 1.05, [SOUND]) == "missed"
    assert rows.verdict(1.06, 1.05, [SOUND], at_most=False) == "met"
    assert rows.verdict(1.0, 1.05, []) == "open: not measured"
    assert rows.mark("1.00", [SOUND]) == "1.00"


def test_pictures_are_drawn_from_their_rows():
    sys.path.insert(0, str(BENCHMARKS / "microbatches"))
    import pictures

    for row in rows.read(pictures.ROWS):
        drawn = pictures.IMAGES / f"microbatches_{row['picture']}.svg"
        assert drawn.read_text() == pictures.drawing(row)
