"""The code in README and docs runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import roost
from roost import catalog
from roost.core import formats
from roost.testing import check_placer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(\w+)\n(.*?)```(?:\s+```text\n(.*?)```)?", re.S)


def blocks(language):
    for page in PAGES:
        for number, (kind, code, output) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language:
                yield pytest.param(code, output, id=f"{page.name}-{number}")


@pytest.mark.parametrize(("code", "output"), list(blocks("python")))
def test_python_blocks_run(code, output):
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == output


@pytest.mark.parametrize(("code", "output"), [*blocks("json"), *blocks("toml")])
def test_files_in_docs_are_sound(code, output):
    toml = not code.lstrip().startswith("{")
    assert formats.decode(code.encode(), "docs", toml=toml) is not None


def test_command_line_in_the_readme_prints_what_it_says():
    text = (ROOT / "README.md").read_text()
    command, expected = re.search(
        r"    \$ (roost simulate [^\n]*)\n(.*?)\n\n`--trace", text, re.S
    ).groups()
    argv = [sys.executable, "-m", "roost", *command.partition("#")[0].split()[1:]]
    found = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, env={"COLUMNS": "80", "PATH": ""}
    )
    assert found.returncode == 0, found.stderr
    lines = [line.strip() for line in expected.splitlines()]
    assert [line.strip() for line in found.stdout.splitlines()] == lines


def test_the_first_block_of_the_readme_comes_early_and_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = lines.index("```python")
    assert begin < 25
    assert lines.index("```", begin) - begin - 1 <= 10


def test_the_shipped_graph_is_the_one_the_example_builds():
    code = "import inception_v3, sys; sys.stdout.write(inception_v3.build().digest)"
    built = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "examples", text=True)
    assert roost.load(ROOT / "examples" / "inception_v3.json.gz").digest == built


def test_the_demo_runs_and_writes_what_it_says(tmp_path):
    argv = [sys.executable, "examples/demo.py", "--seconds", "0.3", "--out", str(tmp_path)]
    found = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    rows = {line.split()[0] for line in found.stdout.splitlines() if " ms " in line}
    assert {"auto", "published", "single", "scotch"} <= rows
    assert "no placement can be faster than" in " ".join(found.stdout.split())
    for name in ("placement.json", "result.json", "timeline.json.gz", "trace.json.gz"):
        assert name in found.stdout
        assert (tmp_path / name).exists()
    result, timeline = (
        roost.load(tmp_path / "result.json"),
        roost.load(tmp_path / "timeline.json.gz"),
    )
    assert result.best.step_time == timeline.step_time


def test_the_placer_in_the_docs_keeps_the_contract():
    [code] = [code for code, _ in (p.values for p in blocks("python")) if "class Windows" in code]
    known = {"__name__": "windows"}
    exec(code.partition("\n\n\nproblem = ")[0], known)
    check_placer(known["Windows"](width=2))


def test_roost_place_in_the_readme_prints_what_it_says(tmp_path):
    text = (ROOT / "README.md").read_text()
    command, expected = re.search(
        r"    \$ (roost place [^\n]*)\n(.*?)\n\n    \$", text, re.S
    ).groups()
    argv = command.partition("#")[0].split()[1:]
    argv[argv.index("-o") + 1] = str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-m", "roost", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"COLUMNS": "80", "PATH": ""},
    )
    assert found.returncode == 0, found.stderr
    shown, printed = (
        [re.sub(r" in [\d.]+ s$", "", line.strip()) for line in each.splitlines()]
        for each in (expected, found.stdout)
    )
    assert printed == shown


def test_every_placer_is_in_the_docs():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "placers.md").read_text(), re.M)
    assert sorted(rows) == catalog.names("placers")
