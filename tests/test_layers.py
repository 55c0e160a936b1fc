"""A folder imports only what stands before it on the line from model to running placement."""

import ast
from pathlib import Path

import roost

LINE = [
    "errors",
    "catalog",
    "core",
    "frontends",
    "zoo",
    "transforms",
    "presets",
    "cost_models",
    "simulator",
    "bounds",
    "runtime",
    "policies",
    "learners",
    "placers",
    "search",
    "environments",
    "report",
    "plan",
    "cli",
    "testing",
]
# Families of a folder, and the families that each of them imports.
FAMILIES = {"runtime": {"step": set(), "ops": {"step"}, "whole": {"step"}}}
ROOTS = {"__init__", "__main__"}  # of the package itself
ROOT = Path(roost.__file__).parent


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "roost")


def unit(parts):
    return parts[0].removesuffix(".py")


def test_every_folder_is_on_the_line():
    found = {unit(path.relative_to(ROOT).parts) for path in ROOT.rglob("*.py")} - ROOTS
    assert found <= set(LINE)


def test_imports_point_back_along_the_line():
    wrong = []
    for path in ROOT.rglob("*.py"):
        here = unit(path.relative_to(ROOT).parts)
        if here in ROOTS:
            continue
        for name in imports(path):
            there = [*name.split("."), "roost itself"][1]
            allowed = {here, *LINE[: LINE.index(here)], "__version__"}
            if there not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_families_of_a_folder_import_only_those_they_may():
    wrong = []
    for folder, families in FAMILIES.items():
        for here, known in families.items():
            for path in (ROOT / folder / here).rglob("*.py"):
                for name in imports(path):
                    _, top, *inside = name.split(".")
                    if top == folder and inside[0] not in {here, *known}:
                        wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_check_sees_an_upward_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from roost.cli import main\n")
    assert list(imports(bad)) == ["roost.cli.main"]
