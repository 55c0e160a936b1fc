"""Whoever waits for a compiler is told so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from roost.simulator.compiling import Teller, teller


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
