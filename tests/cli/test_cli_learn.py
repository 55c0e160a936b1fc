"""`roost learn`: weights that `roost place` takes, the same after a kill, and refusals that say
what to mend."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partialmethod
from math import inf, log
from pathlib import Path

import numpy as np
import pytest

from roost import zoo
from roost.cli._learning_progress import LearningProgress
from roost.cli.learn import CHECKPOINT, LOCK, METRICS, WEIGHTS, Checkpoint
from roost.errors import InputError


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small members of a family, captured once."""
    folder = tmp_path_factory.mktemp("family")
    for number, member in enumerate(zoo.family_models("ptb", 2, 0)):
        zoo._capture(member.shrunk(), f"ptb_0_{number:03d}", True, "sgd").save(
            folder / f"ptb_0_{number:03d}.json.gz"
        )
    return folder


def prepared(folder: Path, graphs: Path) -> Path:
    """A folder to write to that has the graphs already."""
    (folder / "graphs").mkdir(parents=True)
    for path in graphs.iterdir():
        (folder / "graphs" / path.name).write_bytes(path.read_bytes())
    return folder


def command(folder: Path, *more: object) -> list[object]:
    given = ["--family", "ptb", "--on", "k80x2", "--graphs", 2, "--seconds", 0.5, "-o", folder]
    return ["learn", *given, *more]


def test_what_was_learned_is_a_file_that_place_takes(roost, graphs, tmp_path):
    folder = prepared(tmp_path / "out", graphs)
    result = roost(*command(folder, "--json"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["family"] == "ptb"
    assert found["clusters"] == ["k80x2"]
    assert json.loads((folder / "card.json").read_text())["seed"] == 0
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert {line["stage"] for line in lines} >= {0.0, 1.0, 2.0}
    assert not (folder / CHECKPOINT).exists()
    graph = folder / "graphs" / "ptb_0_001.json.gz"
    placing = ["place", graph, "--on", "k80x4", "--placer", "lister", "--trials", 200]
    placed = roost(*placing, "--weights", folder / WEIGHTS, "--json")
    assert placed.exit_code == 0, placed.output
    facts = json.loads(placed.stdout)
    assert facts["placer"] == "lister"
    assert {row["placer"] for row in facts["baselines"]} >= {"single", "expert"}


def test_killed_and_given_again_it_ends_with_the_same_weights(roost, graphs, tmp_path):
    whole, broken = prepared(tmp_path / "whole", graphs), prepared(tmp_path / "broken", graphs)
    assert roost(*command(whole)).exit_code == 0
    text = "import roost.cli.learn as l; l._SAVE_SECONDS = l.Checkpoint.seconds = 0.0; "
    text += "l.Checkpoint.__init__.__defaults__ = (0.0, *l.Checkpoint.__init__.__defaults__[1:]); "
    text += "from roost.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, command(broken))],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while child.poll() is None and not (broken / CHECKPOINT).exists():
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert (broken / CHECKPOINT).exists()
    assert not (broken / WEIGHTS).exists()
    assert roost(*command(broken)).exit_code == 0
    assert (broken / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert (broken / METRICS).read_bytes() == (whole / METRICS).read_bytes()


def test_a_checkpoint_of_another_command_is_refused(tmp_path):
    path = tmp_path / CHECKPOINT
    first = Checkpoint(path, {"seed": 1}, seconds=0.0)
    first.save({"a": np.ones(2)})
    assert (Checkpoint(path, {"seed": 1}).load() or {})["a"].tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="another command: seed was 1, not 2"):
        Checkpoint(path, {"seed": 2}).load()
    with pytest.raises(InputError, match="another command: its problems differ"):
        Checkpoint(path, {"seed": 1, "problems": ["a" * 16] * 99}).load()


def arrays(*given, **named):
    buffer = io.BytesIO()
    np.save(buffer, *given) if given else np.savez(buffer, **named)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"no",
        b"",
        arrays(np.ones(3)),
        arrays(about=np.array("{}"), metrics=np.array(0)),
        arrays(a=np.ones(2)),
    ],
)
def test_a_checkpoint_that_is_none_is_refused(tmp_path, data):
    path = tmp_path / CHECKPOINT
    path.write_bytes(data)
    with pytest.raises(InputError, match="no checkpoint of Roost"):
        Checkpoint(path, {}).load()


@pytest.mark.parametrize(
    "changed",
    [{"a": np.zeros(2)}, {"a": np.ones(1)}, {"a": np.ones(2, np.float32)}, {"a": None}, {"b": np.ones(1)},
     {"metrics": np.array(-5)}, {"metrics": np.zeros(2, int)}, {"about": np.array("[]")}],
)  # fmt: skip
def test_a_checkpoint_that_was_changed_is_refused(tmp_path, changed):
    path = tmp_path / CHECKPOINT
    Checkpoint(path, {"seed": 1}, seconds=0.0).save({"a": np.ones(2)})
    with np.load(path) as file:
        found = dict(file) | changed
    path.write_bytes(arrays(**{name: value for name, value in found.items() if value is not None}))
    with pytest.raises(InputError, match="is not as it was written"):
        Checkpoint(path, {"seed": 1}).load()


def test_figures_that_are_gone_are_not_made_up(tmp_path):
    metrics = tmp_path / METRICS
    metrics.write_text("{}\n" * 9)
    checkpoint = Checkpoint(tmp_path / CHECKPOINT, {}, seconds=0.0, metrics=metrics)
    checkpoint.save({"a": np.ones(2)})
    metrics.write_text("{}\n")
    assert checkpoint.load()
    assert metrics.read_text() == "{}\n"


@pytest.mark.parametrize("name", [WEIGHTS, CHECKPOINT, METRICS, "card.json"])
def test_what_is_in_the_way_is_told_before_any_work(refused, tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"{name}: is a folder; move it away" in refused(*command(tmp_path))
    assert not (tmp_path / "graphs").exists()


def test_graphs_that_are_a_file_are_in_the_way(refused, tmp_path):
    (tmp_path / "graphs").write_text("mine")
    assert "graphs: is a file" in refused(*command(tmp_path))


def test_a_graph_that_was_changed_makes_it_another_command(
    roost, refused, graphs, tmp_path, monkeypatch
):
    folder = prepared(tmp_path / "out", graphs)
    monkeypatch.setattr(Checkpoint, "save", partialmethod(_save_and_end, Checkpoint.save))
    assert roost(*command(folder)).exit_code == 130
    first, second = sorted((folder / "graphs").iterdir())
    first.write_bytes(second.read_bytes())
    assert "is of another command: its problems differ" in refused(*command(folder))


def _save_and_end(self, save, state):
    self.saved = -1e9
    save(self, state)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--family": "cifar"}, "did you mean 'cifar10'"),
        ({"--on": "k80x3"}, "k80x"),
        ({"--on": ","}, "names no cluster"),
        ({"--placer": "heft"}, "does not learn over a family; these do: "),
        ({"--graphs": 0}, "--graphs 0"),
        ({"--made-up": -1}, "--made-up -1"),
        ({"--seconds": 0}, "--seconds 0"),
        ({"--seconds": "nan"}, "--seconds nan"),
        ({"--seconds": 1e300}, "--seconds 1e+300"),
        ({"--seed": -1}, "--seed -1"),
        ({"--seed": 2**63}, f"--seed {2**63}"),
    ],
)
def test_what_cannot_be_is_refused(refused, tmp_path, changed, said):
    given = {"--family": "ptb", "--on": "k80x2", "-o": tmp_path / "out"} | changed
    assert said in refused("learn", *(part for pair in given.items() for part in pair))


def test_weights_for_a_placer_that_has_none_are_refused(refused, files):
    said = refused(
        "place",
        files / "free.json",
        "--on",
        "k80x2",
        "--placer",
        "heft",
        "--weights",
        files / "free.json",
    )
    assert "takes no weights" in said


def test_weights_that_are_none_are_refused(refused, files):
    said = refused(
        "place",
        files / "free.json",
        "--on",
        "k80x2",
        "--placer",
        "lister",
        "--weights",
        files / "free.json",
    )
    assert "free.json" in said
    assert "no safetensors file" in said


def test_a_finished_course_is_not_run_again(roost, graphs, tmp_path):
    folder = prepared(tmp_path / "out", graphs)
    assert roost(*command(folder)).exit_code == 0
    before = (folder / WEIGHTS).stat().st_mtime_ns
    again = roost(*command(folder, "--json"))
    assert again.exit_code == 0
    assert "already has the weights of this command" in again.stderr
    assert json.loads(again.stdout)["family"] == "ptb"
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    assert roost(*command(folder, "--seed", 1)).exit_code == 0
    assert (folder / WEIGHTS).stat().st_mtime_ns > before


def test_two_runs_in_one_folder_do_not_mix(roost, refused, graphs, tmp_path):
    folder = prepared(tmp_path / "out", graphs)
    with (folder / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        said = refused(*command(folder))
    assert (
        said
        == f"{folder}: another roost learn is writing to it; wait for it, or name another folder"
    )
    assert not (folder / METRICS).exists()
    assert roost(*command(folder)).exit_code == 0


def test_a_run_keeps_others_out_until_its_end(refused, roost, graphs, tmp_path, monkeypatch):
    folder, tried = prepared(tmp_path / "out", graphs), []
    save = Checkpoint.save

    def save_and_ask(self, state):
        if not tried:
            tried.append(refused(*command(folder)))
        save(self, state)

    monkeypatch.setattr(Checkpoint, "save", save_and_ask)
    assert roost(*command(folder)).exit_code == 0
    assert "another roost learn is writing to it" in tried[0]


def test_weights_from_a_pipe_or_a_folder_are_refused(refused, files):
    os.mkfifo(files / "pipe")
    place = ["place", files / "free.json", "--on", "k80x2", "--placer", "lister", "--weights"]
    assert "pipe: is no plain file" in refused(*place, files / "pipe")
    assert "is a directory" in refused(*place, files)


def test_the_line_of_progress_says_how_far_how_good_and_how_long():
    now = [100.0]
    standing = LearningProgress("lister", ("rules", "targets"), [1.0, 4.0], lambda: now[0])
    assert standing.line() == "lister: making ready 2 problems"
    standing.add({"stage": 0.0, "done": 1.0, "of": 10.0, "progress": 0.1, "mean_cost": log(1.0)})
    assert standing.line() == "lister: 10%, 0.50 of single and expert, rules 1 of 10, 2 problems"
    now[0] = 110.0
    standing.add({"stage": 1.0, "done": 1.0, "of": 2.0, "progress": 0.2})
    assert (
        standing.line()
        == "lister: 20%, 80 s left, 0.50 of single and expert, targets 1 of 2, 2 problems"
    )
    now[0] = 200.0
    assert "13 min left" in standing.line()
    now[0] = 2000.0
    assert "4.2 h left" in standing.line()


def test_the_best_of_each_problem_counts_and_what_has_no_baseline_does_not():
    standing = LearningProgress("placeto", (), [1.0, 4.0, inf])
    for number, best in ((0, 0.8), (0, 0.5), (0, 0.7), (1, 8.0), (2, 1.0)):
        standing.add(
            {"done": 3.0, "of": 9.0, "progress": 1 / 3, "problem": float(number), "best": best}
        )
    assert (
        standing.line() == "placeto: 33%, 1.00 of single and expert, round 3 of 9, 3 of 3 problems"
    )
    standing = LearningProgress("lister", (), [1.0, inf])
    standing.add({"done": 3.0, "of": 9.0, "mean_cost": 0.0})
    assert "of single" not in standing.line()
