"""`roost compare`: every placer and seed at equal budgets, one bound, and a line for those that
cannot be asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from small_problem import build_cluster, build_graph, tight_cluster

import roost as library
from roost import catalog
from roost.cli import _search
from roost.cost_models import estimate
from roost.placers._lister.weights import new_tensors
from roost.placers.post import Post
from roost.policies.weights import save_weights


def args(files: Path, placers: str, *more: object, cluster: str = "mini.toml") -> list[object]:
    found = ["compare", files / "graph.json", "--on", files / cluster, "--placers", placers]
    return [*found, "--trials", 40, "--seeds", 3, *more]


def as_json(result: Any, code: int = 0) -> dict[str, Any]:
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_what_the_library_finds(roost, files: Path) -> None:
    found = as_json(roost(*args(files, "random,single", "--json")))
    problem = estimate(build_graph(), build_cluster())
    rows = {row["placer"]: row for row in found["placers"]}
    results = [library.solve(problem, "random", trials=40, seed=seed) for seed in range(3)]
    steps = [result.best.step_time for result in results]
    row = rows["random"]
    assert [each["step_time"] for each in row["seeds"]] == steps
    assert [each["num_trials"] for each in row["seeds"]] == [40, 40, 40]
    assert row["step_time"] == median(steps)
    assert row["spread"] == pytest.approx((max(steps) - min(steps)) / median(steps))
    single = library.solve(problem, "single", trials=40).best.step_time
    assert row["ratio_to_single"] == median(steps) / single
    assert rows["single"]["ratio_to_single"] == 1.0
    assert row["gap"] == pytest.approx(1 - found["bound"]["step_time"] / median(steps))
    assert all(
        each["step_time"] >= found["bound"]["step_time"]
        for row in found["placers"]
        for each in row["seeds"]
    )


def test_the_best_comes_first_and_who_cannot_be_asked_says_why(roost, files: Path) -> None:
    result = roost(*args(files, "single,published,random"))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.startswith(("single ", "random ", "published"))]
    assert [row.split()[0] for row in rows] == ["single", "random"]
    assert "without published: the published placement is for 4 GPUs" in " ".join(lines)
    assert "median of 3 seeds; no placement has a step below " in result.stdout
    assert all(len(line) <= 80 for line in lines)
    assert result.stderr == ""


def test_a_missing_package_is_a_line_and_not_the_end(roost, files: Path, monkeypatch) -> None:
    from roost.errors import MissingExtra
    from roost.placers.metis import Metis

    def place(*_: object) -> None:
        raise MissingExtra("pymetis", "partition")

    monkeypatch.setattr(Metis, "place", place)
    found = as_json(roost(*args(files, "metis,single", "--json")))
    assert [row["placer"] for row in found["placers"]] == ["single", "metis"]
    assert found["placers"][1]["why_not"] == "this needs pymetis: pip install 'roost[partition]'"


def test_where_no_placer_can_be_asked_it_says_why(refused, files: Path) -> None:
    assert refused(*args(files, "published")).startswith(
        "published: the published placement is for 4 GPUs"
    )


def test_all_placers_where_none_is_named(monkeypatch) -> None:
    from roost.cli.compare import _names

    assert _names(None) == catalog.names("placers")
    assert _names(" single, heft,single ") == ["single", "heft"]


def test_nothing_fits_is_exit_code_3_after_the_table(roost, files: Path) -> None:
    tight_cluster(9_000).save(files / "tight.toml")
    result = roost(*args(files, "single,heft", "--json", cluster="tight.toml"))
    found = as_json(result, code=3)
    assert [row["num_feasible"] for row in found["placers"]] == [0, 0]
    assert result.stderr.startswith("error: nothing fits")
    assert "The best try needs " in result.stderr
    text = roost(*args(files, "single,heft", cluster="tight.toml")).stdout
    assert "lacks " in text
    assert "single: 0 of 3 seeds fit" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--placers", "single,hefft"], "no placer called 'hefft'; did you mean 'heft'?"),
        (["--placers", " , "], "names no placer"),
        (["--placers", "roost.errors:InputError"], "is no placer"),
        (["--seeds", 0], "--seeds is 0"),
        (["--trials", 0], "evaluates nothing"),
    ],
)
def test_what_is_refused(refused, files: Path, more: list[object], message: str) -> None:
    assert message in refused(*args(files, "single", *more))


def test_a_class_that_is_no_placer_is_not_shown_as_one(refused) -> None:
    assert "'roost.errors:InputError' is no placer" in refused("placers", "roost.errors:InputError")


OUTSIDE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Faulty:
    def place(self, problem, evaluate):
        return 1 / len(evaluate([]))

@dataclass(frozen=True)
class Needy:
    size: int

    def place(self, problem, evaluate): ...
"""


def test_a_placer_that_raises_is_a_line_and_not_the_end(roost, files: Path, monkeypatch) -> None:
    monkeypatch.chdir(files)  # where it is looked for
    Path("outside_faulty.py").write_text(OUTSIDE)
    result = roost(*args(files, "outside_faulty:Faulty,single"))
    assert result.exit_code == 0, result.output
    assert (
        "without outside_faulty:Faulty: ZeroDivisionError: division by zero (outside_faulty.py:7)"
        in " ".join(result.stdout.split())
    )
    assert "single " in result.stdout


def test_a_placer_with_settings_but_no_defaults_is_refused(
    refused, files: Path, monkeypatch
) -> None:
    monkeypatch.chdir(files)
    Path("outside_needy.py").write_text(OUTSIDE)
    assert "needs settings that have no default: " in refused(
        *args(files, "outside_needy:Needy,single")
    )


def test_a_graph_that_is_too_large_for_an_exact_answer_is_a_line(roost, tmp_path: Path) -> None:
    builder = library.GraphBuilder("long")
    for number in range(151):
        builder.add(f"op{number}", flop=1.0)
    builder.freeze().save(tmp_path / "long.json")
    given = [
        "compare",
        tmp_path / "long.json",
        "--on",
        "cpu",
        "--placers",
        "cpsat,single",
        "--trials",
        9,
        "--seeds",
        1,
    ]
    found = as_json(roost(*given, "--json"))
    assert found["placers"][1]["why_not"].startswith(
        "151 groups are more than the 150 that cpsat takes"
    )


def test_names_from_elsewhere_are_whole_in_the_table(roost, files: Path) -> None:
    lines = roost(*args(files, "roost.placers.single:Single,heft")).stdout.splitlines()
    assert any(line.startswith("Single ") for line in lines)
    both = (
        _search.show_name("a:Same", ["a:Same", "b:Same"]),
        _search.show_name("a:One", ["a:One", "b:Same"]),
    )
    assert both == ("a:Same", "One")


def test_in_a_pipe_no_line_is_folded_and_none_ends_in_blanks(files: Path) -> None:
    command = [sys.executable, "-m", "roost", *map(str, args(files, "single,published"))]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, env=env
    ).stdout.splitlines()
    assert [line.rstrip() for line in lines] == lines
    assert max(map(len, lines)) > 100
    assert any(
        line.startswith("spread: ") and line.endswith("could at most be saved") for line in lines
    )


def test_a_gap_is_none_only_where_that_is_proved() -> None:
    shown = [_search.show_gap(share) for share in (None, 0.0, -1e-12, 1e-4, 0.02)]
    assert shown == ["-", "0.0%", "0.0%", "<0.1%", "2.0%"]


def learned(path: Path, policy: str = "lister") -> Path:
    save_weights(path, policy, new_tensors(np.random.default_rng(1)), {})
    return path


def test_a_variant_is_asked_of_those_that_have_it(roost, files: Path) -> None:
    found = as_json(roost(*args(files, "post,single", "--variant", "heuristic", "--json")))
    assert {row["placer"]: row["variant"] for row in found["placers"]} == {
        "post": "heuristic",
        "single": None,
    }
    problem = estimate(build_graph(), build_cluster())
    row = next(row for row in found["placers"] if row["placer"] == "post")
    assert (
        row["seeds"][1]["step_time"]
        == library.solve(problem, Post.heuristic(), trials=40, seed=1).best.step_time
    )
    assert (
        "post, heuristic "
        in roost(*args(files, "post,single", "--variant", "heuristic"), columns=120).stdout
    )


def test_weights_are_given_to_the_placer_they_are_for(roost, files: Path) -> None:
    weights = learned(files / "policy.safetensors")
    found = as_json(roost(*args(files, "lister,placeto,single", "--weights", weights, "--json")))
    given = {row["placer"]: row["weights"] for row in found["placers"]}
    assert given == {"lister": str(weights), "placeto": None, "single": None}


def test_what_is_for_none_of_the_placers_is_refused(refused, files: Path) -> None:
    weights = learned(files / "policy.safetensors")
    assert "placer 'single' has none" in refused(
        *args(files, "single,random", "--variant", "paper")
    )
    assert "has paper" in refused(*args(files, "seq2seq", "--variant", "papr"))
    assert "takes no weights; lister and placeto do" in refused(
        *args(files, "single,heft", "--weights", weights)
    )
    assert "policy is 'lister', not 'placeto'" in refused(
        *args(files, "heft,placeto", "--weights", weights)
    )
    assert "no such file" in refused(*args(files, "heft,lister", "--weights", files / "none"))
    both = ["--weights", weights, "--variant", "paper"]
    assert "give one" in refused(*args(files, "lister,seq2seq", *both))
