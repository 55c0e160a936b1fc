"""Changes one operator, comparison or constant at a time, and shows which changes no test notices.

    python benchmarks/mutants.py run --count 300 --seed 0        a sample of all folders but zoo and cli
    python benchmarks/mutants.py run --folders learners,core     those of the sample in these folders
    python benchmarks/mutants.py run --most-compiled 2           at most 2 of each folder in compiled loops
    python benchmarks/mutants.py show                            counts, and the open mutants

A mutant is a copy of Roost with one such change. It is killed if a test of its folder fails or
takes too long. Tests that call the changed function run first. Then come those that share fixtures
with them, or start processes; no other test can notice the change.
`run` works in a copy of the tracked files, with a cache of compiled loops of its own; the checkout
stays as it is. A mutant of a compiled loop takes minutes: all loops are compiled again.

Each mutant is one row. `run` can be stopped, and continues: it skips a killed mutant as long as its
file is the same, and a mutant that survived as long as its file and its tests are.
`equal_mutants.toml` lists survivors that change no result, each with the reason. Those with `needs`
run on other hardware alone, so no test here can notice them.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from mutant_tests import Calls, Chosen, Copy, digest, import_heavy

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "out" / "mutants.jsonl"
EQUAL = Path(__file__).parent / "equal_mutants.toml"
KEY = ("file", "function", "code", "change")  # of a mutant in EQUAL
OUTCOMES = ("killed", "equal", "not tested here", "open")
LEFT_OUT = {"cli", "zoo", "testing"}  # `testing` helps tests, and has none of its own

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
    """Folders and files of the tests that mirror a folder, and its contract."""
    tests = tree / "tests"
    contract = tests / "contracts" / f"test_{folder}.py"
    found = [tests / folder, *sorted(tests.glob(f"test_{folder}*.py")), contract]
    return [path for path in found if path.exists()]


def sample(tree: Path, names: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants drawn among all those of the folders, every one as likely as another."""
    files = [file for name in names for file in sorted((tree / "src/roost" / name).rglob("*.py"))]
    every = [mutant for file in files for mutant in mutants_of(tree, file)]
    return random.Random(seed).sample(every, min(count, len(every)))


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


def is_compiled(tree: Path, mutant: Mutant) -> bool:
    """True if the change makes Numba compile all loops again."""
    return "roost.simulator.kernels" in (tree / mutant.file).read_text() or (
        "/kernels/" in mutant.file
    )


def run(names: list[str], path: Path, place: Path, drawn: Settings) -> None:
    """Try the mutants that have no row yet, folder by folder; those of compiled loops last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    provenance = rows.measured_with()
    import_heavy()
    copy = Copy(place)
    every = sample(copy.tree, folders(), drawn.count, drawn.seed)
    loops = [one for one in every if is_compiled(copy.tree, one)]
    for compiled in (False, True):
        for name in names:
            mine = [one for one in every if one.folder == name and (one in loops) == compiled]
            past = rows.read(path)
            left = [one for one in mine if not is_known(row_of(copy.tree, one), past)]
            left = left[: drawn.most_compiled] if compiled else left
            kind = " of compiled loops" if compiled else ""
            print(f"{name}: {len(mine)} mutants{kind}, {len(left)} to try", flush=True)
            calls = copy.calls(tests_of(copy.tree, name)) if left else Calls()
            for mutant in left:
                row = row_of(copy.tree, mutant) | tried(copy, mutant, calls, compiled)
                with path.open("a") as file:
                    file.write(json.dumps(row | {"seed": drawn.seed} | provenance) + "\n")
                if row["outcome"] == "survived":
                    print(f"  survived: {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    show(path)


def tried(copy: Copy, mutant: Mutant, calls: Calls, compiled: bool) -> rows.Row:
    """Run the tests that call the changed function; if none fails, others that may notice.

    Where no test is known to call it, and for compiled loops, run all tests of the folder.
    """
    target = copy.tree / mutant.file
    original = target.read_text()
    kept = copy.loops()
    near = f"test_{Path(mutant.file).stem.strip('_')}.py"
    callers = [] if compiled else calls.tests_of(mutant.file, mutant.function)
    outcome, took, named = "passed", 0.0, ""
    try:
        target.write_text(mutated(original, mutant))
        for chosen in [callers, calls.others_of(callers)] if callers else [list(calls.seconds)]:
            if not chosen:
                continue
            files = sorted({copy.tree / test.partition("::")[0] for test in chosen})
            plugin = Chosen(calls.order(chosen, near), calls, 1800 if compiled else 0)
            outcome, seconds, named = copy.test(files, 7200, plugin)
            took += seconds
            if outcome != "passed":
                break
    finally:
        target.write_text(original)
        for folder in copy.loops() - kept:
            shutil.rmtree(folder)
    return {
        "outcome": "survived" if outcome == "passed" else "killed",
        "by": named if outcome == "failed" else outcome,
        "seconds": round(took, 1),
        "compiled": compiled,
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
    counts: Counter[tuple[str, str]] = Counter()
    reasons = explained()
    for row in latest.values():
        outcome = outcome_of(row, reasons)
        counts[Path(row["file"]).parts[2], outcome] += 1
        counts["all", outcome] += 1
        if outcome == "open":
            print(f"open: {row['file']}:{row['line']}: {row['change']}")
    for folder in dict.fromkeys(name for name, _ in counts):
        figures = [f"{counts[folder, outcome]} {outcome}" for outcome in OUTCOMES]
        print(f"{folder}: {', '.join(figures)}")


def explained() -> dict[tuple[str, ...], dict[str, str]]:
    """The survivors with a reason, by their place and change."""
    every = tomllib.loads(EQUAL.read_text())["mutant"]
    return {tuple(one[name] for name in KEY): one for one in every}


def outcome_of(row: rows.Row, reasons: dict[tuple[str, ...], dict[str, str]]) -> str:
    """One of OUTCOMES."""
    if row["outcome"] == "killed":
        return "killed"
    reason = reasons.get(tuple(row[name] for name in KEY))
    return "open" if reason is None else "not tested here" if "needs" in reason else "equal"


@dataclass(frozen=True)
class Settings:
    """How the sample is drawn."""

    count: int
    seed: int
    most_compiled: int  # mutants of compiled loops in each folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("do", choices=["run", "show"])
    parser.add_argument("--folders", help="such as learners,core; by default all but zoo and cli")
    parser.add_argument("--count", type=int, default=300, help="mutants over all folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-compiled", type=int, default=1000, help="compiled, of each folder")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "roost-mutants")
    given = parser.parse_args()
    if given.do == "show":
        show(given.rows)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the tests that run
    names = given.folders.split(",") if given.folders else folders()
    drawn = Settings(given.count, given.seed, given.most_compiled)
    run(names, given.rows, given.place.absolute(), drawn)


if __name__ == "__main__":
    main()
