"""`roost place`: what it finds, what it writes, how it goes on, and what it says where nothing
fits."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_problem import build_cluster, build_graph, tight_cluster

import roost as library
from roost.cli import _search
from roost.cost_models import estimate

ROOST = [sys.executable, "-m", "roost"]
FILES = [
    "placement.json",
    "problem.json.gz",
    "result.json",
    "timeline.json.gz",
    "trace.json.gz",
    "trials.jsonl",
]


def args(
    files: Path, *more: object, placer: str = "rules", cluster: str = "mini.toml"
) -> list[object]:
    found = [
        "place",
        files / "graph.json",
        "--on",
        files / cluster,
        "--placer",
        placer,
        "--trials",
        300,
    ]
    return [*found, *more]


def as_json(result: Any, code: int = 0) -> dict[str, Any]:
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_what_the_library_finds(roost, files: Path) -> None:
    found = as_json(roost(*args(files, "--json")))
    problem = estimate(build_graph(), build_cluster())
    result = library.solve(problem, "rules", trials=300)
    step = library.simulate(problem, result.best.placement)
    assert found["step_time"] == result.best.step_time == step.step_time
    assert found["order"] == result.best.placement.order
    assert found["bound"] == {"step_time": result.bound.step_time, "proof": result.bound.proof}
    assert found["gap"] == pytest.approx(result.gap)
    assert found["num_trials"] == result.num_trials
    assert found["feasible"]
    assert [device["peak_memory"] for device in found["devices"]] == step.peak_memory.tolist()
    single = library.solve(problem, "single", trials=300).best
    assert found["single"]["step_time"] == single.step_time
    assert found["ratio_to_single"] == result.best.step_time / single.step_time


def test_a_problem_file_needs_no_cluster(roost, files: Path) -> None:
    alone = roost(
        "place", files / "problem.json.gz", "--placer", "rules", "--trials", 300, "--json"
    )
    both = roost(*args(files, "--json"))
    assert as_json(alone) | {"seconds": 0} == as_json(both) | {"seconds": 0}


def test_auto_shows_the_placers_it_asked(roost, files: Path) -> None:
    found = as_json(roost(*args(files, "--json", placer="auto")))
    asked = {row["placer"]: row for row in found["baselines"]}
    assert asked["single"]["step_time"] == found["single"]["step_time"]
    assert all(
        row["step_time"] >= found["step_time"] for row in found["baselines"] if row["feasible"]
    )
    steps = [row["step_time"] for row in found["baselines"]]
    assert steps == sorted(steps)


def test_text_has_the_verdict_and_both_tables(roost, files: Path) -> None:
    result = roost(*args(files, placer="auto"))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert " a step, " in lines[0]
    assert lines[0].endswith("alone, fits")
    assert "(proof: " in lines[1]
    assert lines[2].startswith("tiny (6 ops) on mini, ")
    assert lines[3].startswith("auto, seed 0: ")
    first = [line.split()[0] for line in lines[4:] if line]
    assert [word for word in first if ":" in word] == ["cpu:0", "cuda:0", "cuda:1"]
    assert {"placer", "auto", "single"} <= set(first)
    assert result.stderr == ""
    assert all(len(line) <= 80 for line in lines)


def test_baselines_that_were_not_asked_are_named(roost, files: Path) -> None:
    given = args(files, placer="auto", cluster="mini.toml")
    whole = as_json(roost(*given, "--trials", 3000, "--json"))
    assert whole["not_asked"] == []
    short = as_json(roost(*given, "--trials", 4, "--json"))
    asked = [row["placer"] for row in short["baselines"]]
    assert asked
    assert not {*asked} & {*short["not_asked"]}
    assert {"metis", "scotch"} <= {*short["not_asked"]}
    assert (
        "not asked, for lack of time, of trials or of a package: "
        in roost(*given, "--trials", 4).stdout
    )


def test_a_step_that_meets_its_bound_is_called_optimal(roost, tmp_path: Path) -> None:
    builder = library.GraphBuilder("one")
    builder.add("a", flop=1e9)
    builder.freeze().save(tmp_path / "one.json")
    text = roost(
        "place", tmp_path / "one.json", "--on", "cpu", "--trials", 20, "--placer", "single"
    ).stdout
    assert "1.00 of the" in text
    assert "This is optimal: no placement has a shorter step" in text


def test_a_step_of_no_time_divides_by_nothing(roost, tmp_path: Path) -> None:
    builder = library.GraphBuilder("idle")
    builder.parameter("weight", 100)
    builder.freeze().save(tmp_path / "idle.json")
    result = roost(
        "place", tmp_path / "idle.json", "--on", "cpu", "--trials", 20, "--placer", "single"
    )
    assert result.exit_code == 0
    assert result.stdout.startswith("0 s a step, cpu:0 alone takes 0 s, fits\n")


def test_a_model_of_the_zoo(roost) -> None:
    more = ["--on", "k80x2", "--placer", "single", "--trials", 20, "--json"]
    found = as_json(roost("place", "cifar10_cnn", "--train", "--set", "batch=2", *more))
    graph = library.zoo.build("cifar10_cnn", train=True, batch=2)
    assert sum(device["num_ops"] for device in found["devices"]) == graph.num_ops


# -o DIR


def test_the_files_are_written_and_belong_together(roost, files: Path) -> None:
    folder = files / "deep" / "er"
    result = roost(*args(files, "-o", folder, "--json"))
    found = as_json(result)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert sorted(Path(path).name for path in found["files"].values()) == FILES
    placement, saved = library.load(folder / "placement.json"), library.load(folder / "result.json")
    problem = estimate(build_graph(), build_cluster())
    assert (
        library.simulate(problem, placement).step_time == found["step_time"] == saved.best.step_time
    )
    assert library.load(folder / "timeline.json.gz").step_time == found["step_time"]
    assert result.stderr.startswith("wrote placement.json, ")


def test_the_same_command_goes_on_from_its_trials(roost, files: Path) -> None:
    folder = files / "out"
    whole = as_json(roost(*args(files, "-o", folder, "--json")))
    journal = folder / "trials.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    again = roost(*args(files, "-o", folder, "--json"))
    found = as_json(again)
    assert again.stderr.startswith(f"going on from {journal}")
    for key in ("step_time", "order", "num_trials", "devices", "baselines"):
        assert found[key] == whole[key]


def test_trials_of_another_search_are_refused(roost, refused, files: Path) -> None:
    roost(*args(files, "-o", files / "out"))
    message = refused(*args(files, "-o", files / "out", "--seed", 7))
    assert message.startswith(f"{files / 'out' / 'trials.jsonl'}: seed: ")
    again = roost(*args(files, "-o", files / "out", "--seed", 7))
    assert "going on from" not in again.stderr


def test_a_folder_that_cannot_be(refused, files: Path) -> None:
    path = files / "graph.json"
    assert refused(*args(files, "-o", path)) == f"{path}: is a file; -o names a folder"
    assert "cannot be made: Not a directory" in refused(*args(files, "-o", path / "below"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(refused, files: Path) -> None:
    folder = files / "locked"
    folder.mkdir(mode=0o500)
    assert (
        refused(*args(files, "-o", folder)) == f"{folder}: cannot be written to: Permission denied"
    )


@pytest.mark.parametrize("name", FILES)
def test_what_stands_in_the_way_is_told_before_the_search(
    refused, files: Path, monkeypatch, name: str
) -> None:
    monkeypatch.setattr("roost.cli._problem.read", lambda *given: pytest.fail("it was read"))
    folder = files / "out"
    (folder / name).mkdir(parents=True)
    message = f"{folder / name}: is a folder; move it away, or name another folder"
    assert refused(*args(files, "-o", folder)) == message
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    assert f"{name}: is no plain file" in refused(*args(files, "-o", folder))


@pytest.mark.parametrize("limit", [100, 5_000])
def test_a_disk_that_is_full_is_an_error_line(roost, refused, files: Path, limit: int) -> None:
    # All that is compiled is in its cache, which is on the same disk.
    roost(*args(files, placer="random"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        message = refused(*args(files, "-o", files / "out", placer="random"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert message == f"{files / 'out' / 'trials.jsonl'}: cannot be written: File too large"


@pytest.mark.usefixtures("control_c")
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_control_c_shows_and_writes_the_best_so_far(files: Path, told: signal.Signals) -> None:
    folder = files / "out"
    command = [
        *ROOST,
        *map(str, args(files, "-o", folder, "--trials", 10**12, "--json", placer="annealing")),
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = folder / "trials.jsonl"
    for _ in range(1200):
        if journal.exists() and journal.read_bytes().count(b'"round"') > 2:
            break
        time.sleep(0.1)
    running.send_signal(told)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0, stderr
    assert json.loads(stdout)["ended"] == "interrupted"
    assert "interrupted: this is the best so far\n" in stderr
    assert library.load(folder / "result.json").ended == "interrupted"


# Nothing fits: exit code 3.


def test_nothing_fits_is_exit_code_3_with_the_best_try(roost, files: Path) -> None:
    tight_cluster(9_000).save(files / "tight.toml")
    result = roost(*args(files, "--json", cluster="tight.toml"))
    found = as_json(result, code=3)
    assert not found["feasible"]
    assert found["gap"] is None
    fix = found["fix"]
    assert found["missing_bytes"][fix["device"]] == fix["missing_bytes"] > 0
    assert fix["batch"] is None
    assert result.stderr.startswith("error: nothing fits")
    assert f"more on {fix['device']}" in result.stderr
    text = roost(*args(files, cluster="tight.toml"))
    assert text.exit_code == 3
    assert "does not fit: " in text.stdout
    assert "too large for any one device" in text.stdout


def test_where_it_is_proved_that_nothing_fits_the_best_try_is_not_long_looked_for(
    roost, files: Path
) -> None:
    tight_cluster(9_000).save(files / "tight.toml")
    for placer in ("annealing", "auto"):
        found = as_json(
            roost(*args(files, "--json", "--trials", 10**9, placer=placer, cluster="tight.toml")),
            code=3,
        )
        assert 0 < found["num_trials"] <= 2000
    assert _search.briefly(None, None) == (2.0, None)
    assert _search.briefly(600.0, 10**9) == (2.0, 2000)
    assert _search.briefly(0.5, 7) == (0.5, 7)
    assert _search.briefly(None, 7) == (None, 7)  # equal trials, equal results


def test_the_batch_that_would_fit_does_fit(roost, tmp_path: Path) -> None:
    model = [
        "cifar10_cnn",
        "--train",
        "--on",
        "k80x2",
        "--placer",
        "single",
        "--trials",
        20,
        "--json",
    ]
    result = roost("place", *model, "--set", "batch=200000")
    batch = as_json(result, code=3)["fix"]["batch"]
    assert 1 <= batch < 200000
    assert result.stderr.splitlines()[-1].endswith(f"; batch {batch} surely fits")
    assert as_json(roost("place", *model, "--set", f"batch={batch}"))["feasible"]


# Bad input: exit code 2, before any time is spent.


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--placer", "hefft"], "no placer called 'hefft'; did you mean 'heft'?"),
        (["--placer", "hetf"], "no placer called 'hetf'; did you mean 'heft'?"),
        (["--placer", "no_such_package:Mine"], "cannot load the placer 'no_such_package:Mine'"),
        (
            ["--placer", "roost.errors:InputError"],
            "'roost.errors:InputError' is no placer: it has no method place",
        ),
        (["--trials", 0], "evaluates nothing"),
        (["--seconds", -1], "must be a number that is not negative"),
        (["--seed", -1], "seed is -1"),
        (["--train"], "is captured already; --train is for models, leave it out"),
        (["--set", "batch=2"], "is captured already; --set is for models, leave it out"),
    ],
)
def test_what_is_refused(refused, files: Path, more: list[object], message: str) -> None:
    assert message in refused(*args(files, *more))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.json", "none.json: no such file"),
        ("cifar11_cnn", "did you mean 'cifar10_cnn'"),
        ("none.onnx", "none.onnx"),
        ("placement.json", "holds a placement, not a graph or a problem"),
    ],
)
def test_sources_that_are_refused(
    refused, files: Path, monkeypatch, source: str, message: str
) -> None:
    monkeypatch.chdir(files)
    assert message in refused("place", source, "--on", "mini.toml")


def test_a_source_without_a_cluster(refused, files: Path) -> None:
    assert "add --on CLUSTER" in refused("place", files / "graph.json")
    assert "add --on CLUSTER" in refused("place", "cifar10_cnn")


def edited(files: Path, name: str, **changes: dict[str, Any]) -> Path:
    """The graph with some ops changed."""
    graph = json.loads((files / "graph.json").read_text())
    for op in graph["ops"]:
        op.update(changes.get(op["name"], {}))
    (files / name).write_text(json.dumps(graph))
    return files / name


@pytest.mark.parametrize("verb", ["place", "compare", "bound"])
def test_a_group_without_a_device_is_refused(refused, files: Path, verb: str) -> None:
    path = edited(files, "parted.json", left={"allowed": ["cpu"]}, right={"allowed": ["cuda"]})
    assert "group 'pair' has no device of cluster 'mini'" in refused(
        verb, path, "--on", files / "mini.toml"
    )


def test_a_graph_that_the_cluster_cannot_run_is_named(refused, files: Path) -> None:
    path = edited(files, "tpu.json", load={"allowed": ["tpu"]})
    assert refused("place", path, "--on", files / "mini.toml").startswith(
        f"{path}: op 'load' may only run on tpu; "
    )


def test_more_trials_than_a_float_holds(roost, files: Path) -> None:
    assert as_json(roost(*args(files, "--json", "--trials", "1" + "0" * 400, placer="single")))[
        "feasible"
    ]


@pytest.mark.parametrize("placer", ["contiguous", "rules", "annealing", "auto"])
def test_an_answer_however_short_the_time(roost, files: Path, placer: str) -> None:
    given = ["--on", files / "mini.toml", "--placer", placer, "--seconds", 1e-9, "--json"]
    assert as_json(roost("place", files / "graph.json", *given))["num_trials"] >= 1
