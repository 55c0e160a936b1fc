"""A folder imports only what stands before it on the line from model to running placement."""

import ast
from graphlib import CycleError, TopologicalSorter
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
# Families of a folder, in order: each imports only families before it.
FAMILIES = {
    "placers": [
        "_shared",
        "_listing",
        "_splits",
        "_genetic",
        "_annealing",
        "_starts",
        "_microbatches",
        "_episodes",
        "toolkit",
        "_learning",
        "_placeto",
        "_lister",
    ],
    "runtime": ["step", "ops", "whole"],
}
APART = {("ops", "whole")}  # families that do not import each other
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


def family_of(folder, parts):
    return parts[0] if len(parts) > 1 and parts[0] in FAMILIES[folder] else None


def test_families_are_all_named():
    for folder, names in FAMILIES.items():
        found = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert found == set(names)


def test_families_import_only_those_before_them():
    wrong = []
    for folder, order in FAMILIES.items():
        for path in (ROOT / folder).rglob("*.py"):
            here = family_of(folder, path.relative_to(ROOT / folder).parts)
            for name in imports(path) if here else ():
                parts = name.split(".")[1:]
                there = family_of(folder, parts[1:]) if parts[0] == folder else None
                if there is None or there == here:
                    continue
                if order.index(there) > order.index(here) or (there, here) in APART:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runs_at_import_or_later(tree):
    """All imports but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            yield node
        yield from runs_at_import_or_later(node)


def cycle(edges):
    """Modules that import each other, round about; none where the imports have an order."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_round_about():
    """Imports inside functions count: they are for speed, not to break a cycle."""
    paths = {module_name(path): path for path in ROOT.rglob("*.py")}
    edges = {}
    for name, path in paths.items():
        there = set()
        for node in runs_at_import_or_later(ast.parse(path.read_text())):
            for each in node.names:
                full = f"{node.module}.{each.name}"
                there |= {full if full in paths else node.module} & paths.keys()
        edges[name] = there - {name}
    edges["roost"] = set()  # its names are fetched when they are used
    assert not cycle(edges)


def test_the_check_sees_a_cycle():
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == set("abc")


def test_no_folder_imports_private_names_of_another():
    wrong = []
    for path in ROOT.rglob("*.py"):
        here = unit(path.relative_to(ROOT).parts)
        for name in imports(path):
            there = name.split(".")[1:]
            hidden = [part for part in there if part.startswith("_") and part != "__version__"]
            if hidden and there[0] != here:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_check_sees_an_upward_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from roost.cli import main\n")
    assert list(imports(bad)) == ["roost.cli.main"]
