"""`roost bound` and `roost placers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_problem import build_cluster, build_graph, tight_cluster

import roost as library
from roost import catalog
from roost.cli.placers import _joined, first_sentence
from roost.cost_models import estimate


def as_json(result: Any, code: int = 0) -> dict[str, Any]:
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_bound_is_below_the_best_single_device(roost, files: Path) -> None:
    found = as_json(roost("bound", files / "graph.json", "--on", files / "mini.toml", "--json"))
    problem = estimate(build_graph(), build_cluster())
    single = library.solve(problem, "single", trials=50).best.step_time
    assert found["single"]["step_time"] == single
    assert 0 < found["bound"]["step_time"] <= single
    assert found["bound"]["proof"]
    assert found["nothing_fits"] is None


def test_text_names_the_proof_and_what_could_be_saved(roost, files: Path) -> None:
    result = roost("bound", files / "graph.json", "--on", files / "mini.toml")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("No step is shorter than ")
    assert lines[0].endswith(")")
    assert "Everything on " in lines[1]
    assert lines[-1].startswith("tiny (6 ops) on mini, ")
    assert result.stderr == ""


def test_one_device_cannot_be_beaten_where_there_is_no_other(roost, tmp_path: Path) -> None:
    builder = library.GraphBuilder("one")
    builder.add("a", flop=1e9)
    builder.freeze().save(tmp_path / "one.json")
    text = roost("bound", tmp_path / "one.json", "--on", "cpu").stdout
    assert "Everything on cpu:0 takes exactly that: more devices cannot help" in text


def test_a_proof_that_nothing_fits_is_exit_code_3(roost, files: Path) -> None:
    tight_cluster(100).save(files / "tight.toml")
    result = roost("bound", files / "graph.json", "--on", files / "tight.toml", "--json")
    assert "nothing fits" in as_json(result, code=3)["nothing_fits"]
    assert result.stderr.startswith("error: nothing fits")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_seconds_that_are_none(refused, files: Path, seconds: str) -> None:
    message = refused(
        "bound", files / "graph.json", "--on", files / "mini.toml", "--seconds", seconds
    )
    assert "--seconds" in message


def test_placers_are_those_of_the_folder_each_with_a_sentence(roost) -> None:
    found = json.loads(roost("placers", "--json").stdout)["placers"]
    assert [each["name"] for each in found] == catalog.names("placers")
    assert all(each["purpose"].endswith(".") for each in found)
    text = roost("placers", columns=200).stdout
    assert all(each["purpose"] in text for each in found)


def test_a_sentence_does_not_end_within_et_al() -> None:
    assert first_sentence("single").endswith("Mirhoseini et al. 2017.")
    assert (
        first_sentence("mincut") == "MinCut: the mapping of `scotch` without the CPU, a baseline."
    )


def test_listing_placers_imports_nothing_heavy() -> None:
    code = "import sys; from roost.cli import app; app(['placers'], standalone_mode=False); "
    code += "print(*sorted({'numpy', 'numba', 'torch', 'scipy'} & set(sys.modules)), sep=',')"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == ""


def test_one_placer_with_its_settings(roost, refused) -> None:
    found = json.loads(roost("placers", "random", "--json").stdout)
    assert found["settings"] == {"num_samples": 64}
    assert found["about"].startswith("Random placements")
    text = roost("placers", "auto").stdout
    assert "baselines" in text
    assert "single, rules" in text
    assert "It has no settings." in roost("placers", "single").stdout
    assert refused("placers", "hefft") == "no placer called 'hefft'; did you mean 'heft'?"


def test_paragraphs_of_a_placer_are_folded_at_the_width_there_is() -> None:
    text = "one\ntwo\n\n- a list\n- stays\n\nthree\nfour"
    assert _joined(text) == "one two\n\n- a list\n- stays\n\nthree four"
