"""A small problem in files, and `roost` as a function."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_problem import DEVICES, build_cluster, build_graph
from typer.testing import CliRunner

from roost.cli import _search, app
from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.cost_models import estimate
from roost.simulator.compiling import teller

Roost = Callable[..., Any]


@pytest.fixture
def roost(monkeypatch: pytest.MonkeyPatch) -> Roost:
    """`roost` in this process. A slow machine adds no line of progress to what it says, nor one
    that has to compile."""
    monkeypatch.setattr(_search, "_PIPE_SECONDS", math.inf)
    monkeypatch.setattr(teller, "told", True)

    def run(*args: object, columns: int = 80) -> Any:
        return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)})

    return run


@pytest.fixture
def control_c() -> Iterator[None]:
    """Processes that are started hear Ctrl-C, also where these tests run in the background and do
    not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def refused(roost: Roost) -> Callable[..., str]:
    """The line that a call is refused with: exit code 2, nothing on standard output, no
    traceback."""

    def run(*args: object) -> str:
        result = roost(*args)
        assert result.exit_code == 2, result.output
        assert isinstance(result.exception, SystemExit)
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1, result.stderr
        assert errors[0] == lines[-1]
        return errors[0].removeprefix("error: ")

    return run


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with two graphs (in free.json any op runs anywhere), two clusters, a placement and a
    problem."""
    graph, cluster = build_graph(), build_cluster()
    graph.save(tmp_path / "graph.json")
    free = GraphBuilder("free")
    free.add("a", flop=1e9, output_bytes=100)
    free.add("b", inputs=["a"], flop=1e9)
    free.freeze().save(tmp_path / "free.json")
    cluster.save(tmp_path / "mini.toml")
    build_cluster(memory=10_000).save(tmp_path / "small.toml")
    Placement(np.array(DEVICES), devices=cluster.device_names).save(tmp_path / "placement.json")
    estimate(graph, cluster).save(tmp_path / "problem.json.gz")
    return tmp_path
