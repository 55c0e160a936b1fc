"""How readable the code is, in figures: one table for each folder, and one line for each goal.

    python benchmarks/house.py [CHECKOUT]           the table, for this checkout or another one
    python benchmarks/house.py --beside CHECKOUT    the same with the figures of an older checkout

Tokens are those of `tokenize` without comments and layout. A line counts where a token begins on
it. Complexity is the number of decisions in a function plus one. A sentence of README and docs
ends at a full stop, a colon, a semicolon, a question or an exclamation mark; code blocks, tables
and headings are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NO_NOUN = {"what", "whether", "how", "where"}
DECISIONS = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.Assert,
)


@dataclass
class Folder:
    """Sizes of one folder of `src/roost/`."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0


@dataclass
class House:
    """All figures of one checkout."""

    folders: dict[str, Folder] = field(default_factory=lambda: defaultdict(Folder))
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    private: list[str] = field(default_factory=list)
    complex: list[str] = field(default_factory=list)
    longest_file: tuple[int, str] = (0, "")
    docstrings: int = 0
    without_noun: list[str] = field(default_factory=list)
    sentences: list[tuple[int, str]] = field(default_factory=list)  # words, page

    def totals(self) -> Folder:
        """All folders together."""
        total = Folder()
        for folder in self.folders.values():
            total.files += folder.files
            total.lines += folder.lines
            total.code_lines += folder.code_lines
            total.tokens += folder.tokens
        return total

    def goals(self) -> list[tuple[str, str, str]]:
        """Figure, value and goal."""
        total = self.totals()
        words = [count for count, _ in self.sentences]
        twice = [name for name, files in self.classes.items() if len(files) > 1]
        return [
            ("tokens", f"{total.tokens:,}", "7 % fewer"),
            ("tokens for a line", f"{total.tokens / total.code_lines:.2f}", "at most 9"),
            ("class names defined more than once", f"{len(twice)}", "0"),
            ("imports of another folder's private names", f"{len(self.private)}", "0"),
            ("functions over complexity 15", f"{len(self.complex)}", ""),
            ("longest file, lines", f"{self.longest_file[0]}", "under 450"),
            ("docstrings without a noun at the start", f"{len(self.without_noun)}", "under 20"),
            ("longest sentence, words", f"{max(words)}", "under 40"),
            ("mean sentence, words", f"{sum(words) / len(words):.1f}", "under 20"),
        ]


def inspect(checkout: Path) -> House:
    """Read all of `src/roost/`, README and docs of a checkout."""
    house = House()
    root = checkout / "src" / "roost"
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        text = path.read_text()
        _count(house.folders[place.parts[0] if len(place.parts) > 1 else "."], text)
        lines = text.count("\n")
        house.longest_file = max(house.longest_file, (lines, str(place)))
        _read(house, place, ast.parse(text))
    pages = [checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))]
    pages += [page for page in (checkout / "CONTRIBUTING.md",) if page.exists()]
    for page in pages:
        name = str(page.relative_to(checkout))
        house.sentences += [(len(each.split()), name) for each in sentences(page.read_text())]
    return house


def _count(folder: Folder, text: str) -> None:
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
    ]
    folder.files += 1
    folder.lines += text.count("\n")
    folder.tokens += len(tokens)
    folder.code_lines += len({token.start[0] for token in tokens})


def _read(house: House, place: Path, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            house.classes[node.name].append(str(place))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and complexity(node) > 15:
            house.complex.append(f"{place}: {node.name} ({complexity(node)})")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            house.docstrings += bool(words)
            if words and words[0].lower().strip(",.:") in NO_NOUN:
                house.without_noun.append(f"{place}: {' '.join(words[:12])}")
        if isinstance(node, ast.ImportFrom):
            house.private += _private(place, node)


def _private(place: Path, node: ast.ImportFrom) -> Iterator[str]:
    """Names with an underscore that a file imports from another folder of the package."""
    here = place.parts[0].removesuffix(".py")
    for each in node.names:
        package, *there = f"{node.module}.{each.name}".split(".")
        hidden = any(part.startswith("_") and not part.startswith("__") for part in there)
        if package == "roost" and hidden and there[0] != here:
            yield f"{place}: {'.'.join(there)}"


def complexity(function: ast.AST) -> int:
    """Decisions in a function plus one; functions inside it count as their own."""
    count, waiting = 1, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, DECISIONS):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.match_case):
            count += 1
        waiting += ast.iter_child_nodes(node)
    return count


def sentences(page: str) -> list[str]:
    """The sentences of a page, without code, tables and headings."""
    text = re.sub(r"```.*?```", "\n\n", page, flags=re.S)
    kept = ["" if line.startswith(("    ", "|", "#")) else line for line in text.split("\n")]
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(kept))
    whole = [" ".join(block.split()) for block in blocks]
    parts = [part for block in whole for part in re.split(r"(?<=[.:;!?])\s+", block)]
    return [part for part in parts if re.search(r"[A-Za-z]", part)]


def table(house: House) -> str:
    """Sizes of each folder."""
    rows = ["| folder | files | lines | tokens | tokens a line |", "|---|---|---|---|---|"]
    for name, folder in [*sorted(house.folders.items()), ("in all", house.totals())]:
        density = folder.tokens / max(1, folder.code_lines)
        rows.append(
            f"| {name} | {folder.files} | {folder.lines:,} | {folder.tokens:,} | {density:.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--beside", type=Path, help="an older checkout")
    parser.add_argument("--names", action="store_true", help="also list what misses a goal")
    given = parser.parse_args()
    house = inspect(given.checkout)
    before = None if given.beside is None else inspect(given.beside)
    print(table(house))
    print("\n| figure |", "before |" if before else "", "now | goal |")
    print("|---|---|---|---|" if before else "|---|---|---|")
    for number, (name, value, goal) in enumerate(house.goals()):
        old = f" {before.goals()[number][1]} |" if before else ""
        print(f"| {name} |{old} {value} | {goal} |")
    if given.names:
        show_names(house)


def show_names(house: House) -> None:
    """List what stands behind each figure, the worst first."""
    twice = {name: files for name, files in house.classes.items() if len(files) > 1}
    longest = Counter({f"{page}: {count} words": count for count, page in house.sentences})
    for title, lines in {
        "classes": [f"{name}: {', '.join(files)}" for name, files in sorted(twice.items())],
        "private": house.private,
        "complex": house.complex,
        "docstrings": house.without_noun,
        "sentences": [f"{name}" for name, count in longest.most_common(20) if count > 40],
    }.items():
        print(f"\n{title}:", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
