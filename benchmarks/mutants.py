"""Changes one operator, comparison or constant at a time, and shows which changes no test notices.

    python benchmarks/mutants.py run --count 300 --seed 0           all folders but zoo and cli
    python benchmarks/mutants.py run --folders learners,core        these folders
    python benchmarks/mutants.py show                               counts, and the open mutants

A mutant is a copy of Roost with one such change. It is killed if a test of its folder fails or
takes too long. `run` works in a copy of the tracked files, with a cache of compiled loops of its
own; the checkout stays as it is. A mutant of a compiled loop takes minutes: all loops are compiled
again.

Each mutant is one row. `run` can be stopped, and continues: it skips a killed mutant as long as its
file is the same, and a mutant that survived as long as its file and its tests are.
`equal_mutants.toml` lists survivors that change no result, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "out" / "mutants.jsonl"
EQUAL = Path(__file__).parent / "equal_mutants.toml"
LEFT_OUT = {"cli", "zoo", "testing"}  # `testing` helps tests, and has none of its own
MEMORY = 8 << 30  # bytes: a mutant may ask for ever more

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # relative to the checkout
    site: int  # number of the change among those of the file
    line: int
    code: str  # the line as it stands
    change: str  # such as `a < b -> a <= b`
    function: str  # such as `Links._ordered`; "" outside of all

    @property
    def folder(self) -> str:
        """The folder of `src/roost/`, or the module beside the folders."""
        return Path(self.file).relative_to("src/roost").parts[0].removesuffix(".py")


class Changer(ast.NodeTransformer):
    """Numbers the places where a file can change, and makes one of the changes."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted = wanted
        self.sites: list[tuple[int, str, str]] = []  # line, change, function
        self.inside: list[str] = []  # names of the classes and functions around

    def visit(self, node: ast.AST) -> Any:
        """Change the node if it is the wanted one; leave out what no test can notice."""
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        for name in ("annotation", "returns", "decorator_list", "type_params"):
            if getattr(node, name, None):
                return self._but(node, name)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return node
        changed = self._changed(node)
        if changed is not None:
            change = f"{ast.unparse(node)} -> {ast.unparse(changed)}"
            self.sites.append((node.lineno, change, ".".join(self.inside)))
            if len(self.sites) - 1 == self.wanted:
                return changed
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return self.generic_visit(node)
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    def _but(self, node: ast.AST, name: str) -> ast.AST:
        """Visit a node without one of its parts."""
        part = getattr(node, name)
        setattr(node, name, [] if isinstance(part, list) else None)
        result = self.visit(node)
        setattr(result, name, part)
        return result

    def _changed(self, node: ast.AST) -> Any:
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return ast.BinOp(left, OPERATORS[type(op)](), right)
            case ast.BoolOp(op, values):
                return ast.BoolOp(OPERATORS[type(op)](), values)
            case ast.Compare(left, [op], right):
                return ast.Compare(left, [OPERATORS[type(op)]()], right)
            case ast.AugAssign(target, op, value) if type(op) in OPERATORS:
                return ast.AugAssign(target, OPERATORS[type(op)](), value)
            case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
                return operand
            case ast.Constant(bool(value)):
                return ast.Constant(not value)
            case ast.Constant(int(value) | float(value)):
                return ast.Constant(value + 1)
            case ast.IfExp(ast.Call() | ast.Name() | ast.Attribute() as test, yes, no):
                return ast.IfExp(ast.UnaryOp(ast.Not(), test), yes, no)
            case ast.If(ast.Call() | ast.Name() | ast.Attribute() as test, body, orelse):
                return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        return None


def mutants_of(tree: Path, file: Path) -> Iterator[Mutant]:
    """All changes of one file of a tree."""
    text = file.read_text()
    changer = Changer()
    changer.visit(ast.parse(text))
    lines = text.splitlines()
    for site, (line, change, function) in enumerate(changer.sites):
        short = change if "\n" not in change else change.partition("\n")[0] + " -> negated"
        name = str(file.relative_to(tree))
        yield Mutant(name, site, line, lines[line - 1].strip(), short, function)


def mutated(text: str, mutant: Mutant) -> str:
    """The text of a file with the change."""
    changed = Changer(mutant.site).visit(ast.parse(text))
    return ast.unparse(ast.fix_missing_locations(changed))


def folders() -> list[str]:
    """Folders of `src/roost/` with tests."""
    named = sorted(file.parent.name for file in (ROOT / "src/roost").glob("*/__init__.py"))
    return [name for name in named if name not in LEFT_OUT and tests_of(ROOT, name)]


def tests_of(tree: Path, folder: str) -> list[Path]:
    """Folders and files of the tests that mirror a folder."""
    tests = [tree / "tests" / folder, *sorted((tree / "tests").glob(f"test_{folder}*.py"))]
    return [path for path in tests if path.exists()]


def nearest_first(tests: list[Path], mutant: Mutant) -> list[Path]:
    """Tests with those of the mutant's own file in front: they kill it soonest."""
    name = f"test_{Path(mutant.file).stem.strip('_')}.py"
    near = [file for path in tests for file in sorted(path.rglob(name))]
    return [*near, *tests]


def sample(tree: Path, names: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants drawn among all those of the folders, every one as likely as another."""
    files = [file for name in names for file in sorted((tree / "src/roost" / name).rglob("*.py"))]
    every = [mutant for file in files for mutant in mutants_of(tree, file)]
    return random.Random(seed).sample(every, min(count, len(every)))


class Copy:
    """A copy of the tracked files, in which the tests of a mutant run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.tree = place / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)

    def loops(self) -> set[Path]:
        """The caches of compiled loops: one for each state of their text."""
        return set((self.place / "numba").glob("*/kernels-*"))

    def test(self, tests: list[Path], limit: float) -> tuple[str, float, str]:
        """`passed`, `failed` or `slow`; seconds; the test that failed."""
        env = os.environ | {
            "NUMBA_CACHE_DIR": str(self.place / "numba"),
            "PYTHONPATH": str(self.tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            *map(str, tests),
        ]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            )
            try:
                code = process.wait(limit)
                outcome = "passed" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                outcome = "slow"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            lines = output.read().strip().splitlines()
        if outcome == "failed" and code in (3, 4, 5):
            raise RuntimeError(f"pytest cannot run {tests}: {lines[-1:]}")
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return outcome, time.monotonic() - began, (named or lines or [""])[-1][:200]


def digest(paths: list[Path]) -> str:
    """Digest of files, and of all Python files of folders."""
    text = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text.update(file.read_bytes())
    return text.hexdigest()[:16]


def row_of(tree: Path, mutant: Mutant) -> rows.Row:
    """The row of a mutant, without its outcome."""
    return {
        "file": mutant.file,
        "line": mutant.line,
        "code": mutant.code,
        "change": mutant.change,
        "function": mutant.function,
        "site": mutant.site,
        "source": digest([tree / mutant.file]),
        "tests": digest(tests_of(tree, mutant.folder)),
    }


def is_known(row: rows.Row, past: list[rows.Row]) -> bool:
    """True if the mutant was killed before, or survived these same tests."""
    return any(
        all(old[key] == row[key] for key in ("file", "site", "source"))
        and (old["outcome"] == "killed" or old["tests"] == row["tests"])
        for old in past
    )


def run(names: list[str], count: int, seed: int, path: Path, place: Path) -> None:
    """Try the mutants that have no row yet, folder by folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    provenance = rows.measured_with()
    copy = Copy(place)
    drawn = sample(copy.tree, names, count, seed)
    for name in names:
        mine = [mutant for mutant in drawn if mutant.folder == name]
        past = rows.read(path)
        left = [one for one in mine if not is_known(row_of(copy.tree, one), past)]
        print(f"{name}: {len(mine)} mutants, {len(left)} of them not tried yet", flush=True)
        if not left:
            continue
        tests = tests_of(copy.tree, name)
        for _ in range(2):  # the first time, Numba compiles all loops
            outcome, seconds, named = copy.test(tests, 3600)
            if outcome != "passed":
                raise SystemExit(f"the tests of {name} fail without a change: {named}")
        for mutant in left:
            row = row_of(copy.tree, mutant) | tried(copy, mutant, seconds) | {"seed": seed}
            with path.open("a") as file:
                file.write(json.dumps(row | provenance) + "\n")
            if row["outcome"] == "survived":
                print(f"  survived: {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    show(path)


def tried(copy: Copy, mutant: Mutant, seconds: float) -> rows.Row:
    """Run the tests of a mutant, which take `seconds` without a change, and give the outcome."""
    target = copy.tree / mutant.file
    original = target.read_text()
    kept = copy.loops()
    is_compiled = "roost.simulator.kernels" in original or "/kernels/" in mutant.file
    limit = 60 + 4 * seconds + (1800 if is_compiled else 0)
    try:
        target.write_text(mutated(original, mutant))
        tests = nearest_first(tests_of(copy.tree, mutant.folder), mutant)
        outcome, took, named = copy.test(tests, limit)
    finally:
        target.write_text(original)
        for folder in copy.loops() - kept:
            shutil.rmtree(folder)
    return {
        "outcome": "survived" if outcome == "passed" else "killed",
        "by": named if outcome == "failed" else outcome,
        "seconds": round(took, 1),
    }


def show(path: Path) -> None:
    """Print counts by folder, and the open mutants, from the latest row of each.

    Rows of files that have changed since do not count.
    """
    latest = {
        (row["file"], row["site"]): row
        for row in rows.read(path)
        if (ROOT / row["file"]).is_file() and row["source"] == digest([ROOT / row["file"]])
    }
    equal = tomllib.loads(EQUAL.read_text())["mutant"]
    key = ("file", "function", "code", "change")
    explained = {tuple(one[name] for name in key) for one in equal}
    counts: Counter[tuple[str, str]] = Counter()
    for row in latest.values():
        folder = Path(row["file"]).parts[2]
        outcome = row["outcome"]
        if outcome == "survived":
            is_equal = tuple(row[name] for name in key) in explained
            outcome = "equal" if is_equal else "open"
        counts[folder, outcome] += 1
        counts["all", outcome] += 1
        if outcome == "open":
            print(f"open: {row['file']}:{row['line']}: {row['change']}")
    for folder in dict.fromkeys(name for name, _ in counts):
        figures = [f"{counts[folder, key]} {key}" for key in ("killed", "equal", "open")]
        print(f"{folder}: {', '.join(figures)}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("do", choices=["run", "show"])
    parser.add_argument("--folders", help="such as learners,core; by default all but zoo and cli")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "roost-mutants")
    given = parser.parse_args()
    if given.do == "show":
        show(given.rows)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the tests that run
    names = given.folders.split(",") if given.folders else folders()
    run(names, given.count, given.seed, given.rows, given.place.absolute())


if __name__ == "__main__":
    main()
