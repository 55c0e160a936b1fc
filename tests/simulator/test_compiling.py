"""Whoever waits for a compiler is told so."""

from __future__ import annotations

import ast
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import roost
from roost.simulator.compiling import Teller, teller
from roost.simulator.kernels.base import compiled_sources


def compiling(module: str) -> Any:
    return SimpleNamespace(
        data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))}
    )


def test_compiling_is_told_once_and_only_of_ours(caplog):
    caplog.set_level(logging.INFO)
    found = Teller()
    found.on_start(compiling("somebody.else"))
    found.on_start(SimpleNamespace(data=None))
    assert not caplog.messages
    for _ in range(2):
        found.on_start(compiling("roost.simulator.kernels.batch"))
    assert caplog.messages == ["compiling the simulator, once on this machine: a minute or two"]


def test_numba_tells_what_it_compiles(caplog, monkeypatch):
    """What Numba calls it with is what it looks for."""
    import numba

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(teller, "told", False)
    numba.njit(lambda x: x + 1)(1)  # of this file
    assert not teller.told
    function = lambda x: x + 2  # noqa: E731
    function.__module__ = "roost.simulator.kernels.batch"
    numba.njit(function)(1)
    assert teller.told
    assert len(caplog.messages) == 1


def names_compiled_in(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything of ours that the compiled functions of a file use."""
    tree = ast.parse(path.read_text())
    decorators = {"compiled", "bare", "inlined"}
    used = {
        name.id
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id in decorators for d in function.decorator_list)
        for statement in function.body  # annotations are not compiled
        for name in ast.walk(statement)
        if isinstance(name, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("roost"):
            for each in node.names:
                if (each.asname or each.name) in used:
                    yield str(node.module), each.name


def test_machine_code_is_kept_for_the_text_of_everything_that_is_compiled():
    """A change to a file that is left out would go unnoticed, and the old code would run."""
    known = compiled_sources()
    root = Path(roost.__file__).parent
    found = 0
    for folder in ("bounds", "placers", "search", "simulator"):
        for path in (root / folder).rglob("*.py"):
            for module, name in names_compiled_in(path):
                found += 1
                assert path in known, f"{path} has compiled loops"
                home = Path(str(importlib.import_module(module).__file__))
                assert home in known, f"{path} compiles {name} of {home}"
    assert found > 50
