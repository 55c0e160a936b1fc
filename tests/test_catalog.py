"""Plug-ins by name: files of Roost, and entry points of installed packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import roost
from roost import catalog
from roost.cli import app
from roost.errors import InputError, UnknownName

PACKAGE = '''
from dataclasses import dataclass

import numpy as np

from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.report.exports import Export


@dataclass(frozen=True)
class Last:
    """Everything on the last device."""

    def place(self, problem, evaluate):
        last = problem.cluster.num_devices - 1
        evaluate([problem.placement(np.full(problem.graph.num_ops, last))])
        return evaluate.best.placement


class Second:
    def estimate(self, graph, cluster):
        return Costs(np.ones((graph.num_ops, cluster.num_devices)) * ~graph.is_parameter[:, None])


class Words:
    suffixes = (".words",)

    def read(self, source, *, train, optimizer, **options):
        builder = GraphBuilder("words")
        builder.add("only")
        return builder.freeze()


@dataclass
class Digest(Export):
    name: str

    @classmethod
    def of(cls, model, problem, placement):
        return cls(placement.digest)

    def text(self):
        return self.name + "\\n"

    def facts(self):
        return {"digest": self.name}
'''
ENTRIES = """
[roost.placers]
last = made_up_roost:Last
heft = made_up_roost:NoSuch
[roost.cost_models]
second = made_up_roost:Second
[roost.frontends]
words = made_up_roost:Words
[roost.exporters]
digest = made_up_roost:Digest
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a made-up package where Python finds installed ones."""

    def made(name: str = "made_up_roost", entries: str = ENTRIES) -> Path:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nSummary: It is made up.\n")
        (info / "entry_points.txt").write_text(entries)
        (tmp_path / f"{name}.py").write_text(PACKAGE)
        importlib.invalidate_caches()
        return tmp_path

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_up_roost", raising=False)
    return made


def test_listing_names_imports_nothing(install: Install) -> None:
    install()
    assert "last" in catalog.names("placers")
    assert "digest" in catalog.names("report/exports")
    listing = CliRunner().invoke(app, ["placers"]).stdout
    assert "It is made up. (made_up_roost)" in " ".join(listing.split())
    assert "made_up_roost" not in sys.modules


def test_an_installed_package_adds_every_kind_of_plug_in(install: Install) -> None:
    folder = install()
    source = folder / "model.words"
    source.write_text("")
    command = [str(source), "--on", "k80x2"]
    place = [*command, "--placer", "last", "--trials", "3", "-o", str(folder / "out")]
    placed = CliRunner().invoke(app, ["place", *place])
    assert placed.exit_code == 0, placed.output
    problem = roost.load(folder / "out" / "problem.json.gz")
    found = roost.load(folder / "out" / "placement.json")
    assert found.device.tolist() == [problem.cluster.num_devices - 1]
    assert roost.estimate(problem.graph, "k80x2", "second").op_time.tolist() == [[1.0, 1.0, 1.0]]
    export = ["export", *command, "--placement", str(folder / "out"), "--format", "digest"]
    text = CliRunner().invoke(app, export).stdout
    assert text == f"{found.digest}\n"


def test_a_name_of_roost_itself_wins(install: Install) -> None:
    install()
    assert catalog.find("placers", "heft").__module__ == "roost.placers.heft"


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install()
    install("other_roost", "[roost.placers]\nlast = other_roost:Last\n")
    with pytest.raises(InputError, match="2 placers called 'last'; name one of them as made_up"):
        catalog.find("placers", "last")
    assert catalog.find("placers", "other_roost:Last").__name__ == "Last"


def test_an_entry_point_that_cannot_be_loaded_is_named(install: Install) -> None:
    install("broken_roost", "[roost.placers]\nnone = broken_roost:NoSuch\n")
    with pytest.raises(InputError, match="cannot load the placer 'none'"):
        catalog.find("placers", "none")


@pytest.mark.parametrize(
    ("folder", "text"),
    [("report/exports", "no exporter called 'device_mapp'; did you mean 'device_map'"),
     ("cost_models", "no cost model called 'device_mapp'")],
)  # fmt: skip
def test_an_unknown_name_says_of_what_kind(folder: str, text: str) -> None:
    with pytest.raises(UnknownName, match=text):
        catalog.find(folder, "device_mapp")
