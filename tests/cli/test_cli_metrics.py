"""Figures of placers that learn: metrics.jsonl and TensorBoard's files, once each, also after going
on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roost.cli import _search
from roost.cli._metrics import METRICS, Metrics
from roost.errors import InputError
from roost.testing.problems import training_like


def args(files: Path, folder: Path, *more: object, placer: str = "post") -> list[object]:
    problem = files / "training.json.gz"
    training_like(40, 3).save(problem)
    return ["place", problem, "--placer", placer, "-o", folder, *more]


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_a_placer_that_learns_leaves_its_figures(roost, files: Path) -> None:
    result = roost(*args(files, files / "out", "--trials", 60, "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"]["metrics"] == str(files / "out" / METRICS)
    found = lines(files / "out")
    assert found
    assert all({"trials", "seconds", "best", "entropy"} <= line.keys() for line in found)
    assert [line["trials"] for line in found] == sorted(line["trials"] for line in found)


def test_a_placer_that_does_not_leaves_none(roost, files: Path) -> None:
    result = roost(*args(files, files / "out", "--trials", 60, "--json", placer="heft"))
    assert "metrics" not in json.loads(result.stdout)["files"]
    assert not (files / "out" / METRICS).exists()


def test_what_comes_again_is_there_once(tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    for trials in (10, 20, 30):
        first.add({"trials": trials, "best": 1.0})
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"trials": 40, "be')  # killed while it wrote
    again = Metrics(tmp_path, going_on=True)
    again.add({"trials": 30, "best": 0.5})
    again.add({"trials": 40, "best": 0.5})
    assert [(line["trials"], line["best"]) for line in lines(tmp_path)] == [
        (10, 1.0),
        (20, 1.0),
        (30, 0.5),
        (40, 0.5),
    ]
    Metrics(tmp_path)
    assert not (tmp_path / METRICS).exists()


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("mine\nand mine\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: has a line that Roost did not write"):
        Metrics(tmp_path, going_on=True).add({"trials": 1.0})
    assert (tmp_path / METRICS).read_text() == "mine\nand mine\n"


def test_tensorboard_gets_every_figure(roost, files: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = roost(*args(files, files / "out", "--trials", 60, "--tensorboard"))
    assert result.exit_code == 0, result.output
    read = events.EventAccumulator(str(files / "out" / "events"))
    read.Reload()
    written = lines(files / "out")
    assert {*read.Tags()["scalars"]} == set().union(*(line.keys() for line in written))
    best = [(event.step, event.value) for event in read.Scalars("best")]
    assert best == [(line["trials"], pytest.approx(line["best"])) for line in written]


def test_a_file_where_tensorboards_folder_goes(refused, files: Path) -> None:
    pytest.importorskip("tensorboard")
    (files / "out").mkdir()
    (files / "out" / "events").write_text("mine")
    assert "events: is a file; " in refused(
        *args(files, files / "out", "--trials", 60, "--tensorboard")
    )


def test_figures_that_cannot_be_written_name_their_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "gone")
    with pytest.raises(InputError, match=r"gone/metrics.jsonl: cannot be written: No such file"):
        metrics.add({"best": 1.0})


def test_tensorboard_needs_a_folder(refused, files: Path) -> None:
    said = refused("place", files / "free.json", "--on", files / "mini.toml", "--tensorboard")
    assert said == "--tensorboard needs a folder to write to; name it with -o"


@pytest.mark.parametrize(
    ("placer", "variant", "said"),
    [
        ("post", "best", "--variant best: placer 'post' has paper, heuristic"),
        (
            "heft",
            "paper",
            "--variant paper: placer 'heft' has none; seq2seq, spotlight, post and placeto have",
        ),
    ],
)
def test_a_variant_that_is_none(refused, files: Path, placer: str, variant: str, said: str) -> None:
    assert refused(*args(files, files / "out", "--variant", variant, placer=placer)) == said


def test_variants_are_other_settings() -> None:
    from roost.placers.post import Post

    assert _search.placer_with("post", None, "paper") == Post.paper() != Post()
    assert _search.placer_with("post", None, "heuristic") == Post.heuristic()
    with pytest.raises(InputError, match="give one"):
        _search.placer_with("post", Path("w"), "paper")


def test_progress_names_what_is_to_be_beaten(roost, files: Path, monkeypatch) -> None:
    monkeypatch.setattr(_search, "_PIPE_SECONDS", 0.0)
    result = roost(*args(files, files / "out", "--trials", 60, placer="random"))
    assert result.exit_code == 0, result.output
    assert re.search(r" by random, \d\.\d\d of (single|expert), bound ", result.stderr)
