"""The journal of a search: what is in it, what it refuses, and that a search goes on from any part
of it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Clock, Counting, Told, fork_join, placements

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Result, best_of
from roost.errors import InputError
from roost.placers import Evaluate, Placer, Round
from roost.placers._annealing.population import Heat
from roost.placers._lister.weights import new_tensors
from roost.placers.auto import Auto
from roost.placers.genetic import Genetic
from roost.placers.lister import Lister
from roost.placers.random import Random
from roost.policies.weights import save_weights
from roost.search import journal as journals
from roost.search import journal_lines
from roost.search.budget import Budget
from roost.search.evaluate import Progress
from roost.search.solve import search
from roost.testing.problems import training_like
from roost.testing.tiny_problems import tiny_problem


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(result: Result) -> tuple[str, float, int, str]:
    return result.best.placement.digest, result.best.step_time, result.num_trials, result.ended


def write(path: Path, trials: int = 40) -> Result:
    return search(fork_join(), "random", trials=trials, journal=path, prove=False)


def test_every_trial_is_a_line_and_the_best_so_far_have_their_placements(tmp_path: Path) -> None:
    path, seen = tmp_path / "trials.jsonl", list[Progress]()
    result = search(
        fork_join(), "random", trials=40, journal=path, on_trial=seen.append, prove=False
    )
    head, *lines = rows_of(path)
    assert (head["row"], head["placer"], head["seed"], head["graph"]) == (
        "head",
        "random",
        0,
        "fork_join",
    )
    assert head["problem"] == fork_join().digest
    assert "Random(num_samples=64)" in head["settings"]
    assert [line["digest"] for line in lines] == [
        progress.trial.placement.digest for progress in seen
    ]
    assert [line["step_time"] for line in lines] == [progress.trial.step_time for progress in seen]
    best = inf
    for line in lines:
        assert ("placement" in line) == (line["step_time"] < best)
        best = min(best, line["step_time"])
    assert best == result.best.step_time


def test_a_line_is_with_the_system_before_anybody_is_told_of_it(tmp_path: Path) -> None:
    path, counts = tmp_path / "trials.jsonl", list[bool]()

    def count(progress: Progress) -> None:
        lines = path.read_text().splitlines()[1:]
        counts.append(
            progress.trial.placement.digest in {json.loads(line)["digest"] for line in lines}
        )

    search(fork_join(), "random", trials=40, journal=path, on_trial=count, prove=False)
    assert len(counts) == 40
    assert all(counts)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"problem": tiny_problem("chain")}, "problem"),
        ({"placer": "single"}, "placer"),
        ({"placer": Random(num_samples=3)}, "settings"),
        ({"seed": 1}, "seed"),
    ],
)
def test_the_journal_of_another_search_is_refused_by_the_field_that_differs(
    tmp_path: Path, changed: dict[str, Any], field: str
) -> None:
    path = tmp_path / "trials.jsonl"
    given: dict[str, Any] = {
        "problem": fork_join(),
        "placer": "random",
        "seed": 0,
        "trials": 10,
        "journal": path,
    }
    search(**given, prove=False)
    before = path.read_bytes()
    with pytest.raises(
        InputError,
        match=rf"trials\.jsonl: {field}: this search has .*, the file .*begin a new file",
    ):
        search(**(given | changed), prove=False)
    assert path.read_bytes() == before


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    path.write_text(path.read_text().replace('"version":1', '"version":2', 1))
    with pytest.raises(InputError, match="version: this search has 1, the file 2"):
        write(path)


@pytest.mark.parametrize("field", ["roost", "code", "numpy", "numba"])
def test_a_journal_of_other_code_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    head, *lines = path.read_text().splitlines(keepends=True)
    changed = json.dumps(json.loads(head) | {field: "another"}) + "\n"
    path.write_text("".join([changed, *lines]))
    with pytest.raises(
        InputError,
        match=rf"trials\.jsonl: another version of \w+ wrote this journal \({field}: "
        r"this search has .*, the file 'another'\); .*: begin a new file",
    ):
        write(path)


def test_the_code_in_the_head_is_that_of_the_placers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = journals._code()
    for folder in ("placers", "simulator"):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(journals.catalog, "ROOT", tmp_path)
        empty = journals._code.__wrapped__()
        (tmp_path / folder / "one.py").write_text("one = 1\n")
        assert len({before, empty, journals._code.__wrapped__()}) == 3


def edited(path: Path, edit: Any) -> None:
    """Every trial of a journal as `edit` makes it."""
    head, *lines = rows_of(path)
    for line in lines:
        edit(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))


@pytest.mark.parametrize("peak", [[], [1], [1] * 9])
def test_memory_of_other_devices_is_told_with_its_line(tmp_path: Path, peak: list[int]) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    edited(path, lambda line: line.update(peak_memory=peak))
    with pytest.raises(
        InputError, match=rf"trials\.jsonl: line 2: peak_memory: has {len(peak)} entries, cluster"
    ):
        write(path)


def test_a_placement_that_does_not_belong_there_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)

    def shorten(line: dict[str, Any]) -> None:
        line["digest"] = "another"
        if "placement" in line:
            line["placement"]["device"] = line["placement"]["device"][:2]

    edited(path, shorten)
    with pytest.raises(
        InputError, match=r"trials\.jsonl: trial another: the placement has 2 entries"
    ):
        write(path)


@pytest.mark.parametrize("torn", [b'{"row":"trial","dig', b"\x00\xff", b"{"])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "trials.jsonl"
    result = write(path)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert said(write(path)) == said(result)
    assert path.read_bytes() == whole


def test_a_head_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    result = write(path)
    for keep in (0, 1, 40):
        path.write_bytes(path.read_bytes()[:keep])
        assert said(write(path)) == said(result)
        assert len(rows_of(path)) == 41


@pytest.mark.parametrize(
    "text", ["dear diary", "dear diary\n", '{"row": "trial"', "[1, 2]\nmore", "\n", "\n\n"]
)
def test_the_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(text)
    with pytest.raises(InputError, match="line 1"):
        write(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage",
        b"",
        b'{"row":"trial"}',
        b'{"row":"what"}',
        b"\xff\xfe",
        b'{"row":"trial","digest":"x","step_time":-1,"peak_memory":[],"feasible":true,"elapsed":0}',
        b'{"row":"trial","digest":"x","step_time":1,"peak_memory":["a"],"feasible":true,"elapsed":0}',
    ],
)
def test_garbage_in_the_middle_is_told_with_its_line(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:7], garbage, *lines[7:], b""]))
    with pytest.raises(InputError, match=r"trials\.jsonl: line 8: .*mend it, or begin a new file"):
        write(path)


def test_a_second_head_is_garbage(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], lines[0], b""]))
    with pytest.raises(InputError, match="line 4: is a second head"):
        write(path)


def test_a_journal_that_another_search_writes_to_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    write(path)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            InputError, match="another search is writing to it; wait for it, or name another file"
        ):
            write(path)
    assert write(path).num_trials == 40


@pytest.mark.parametrize(
    "name", ["missing/trials.jsonl", "folder", "bad\0name", "/proc/trials.jsonl"]
)
def test_where_nothing_can_be_written_the_path_and_the_reason_are_said(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / name)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), Path("/dev/full"), tmp_path / "pipe"):
        with pytest.raises(InputError, match="cannot be written: it is no file"):
            write(path)


class _Disk:
    """A file on a disk with so much room: as a system does, it writes what it has room for and says
    how much."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 100, 1500])
@pytest.mark.parametrize("placer", ["random", "rules"])
def test_a_disk_that_fills_leaves_whole_lines_and_the_search_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, placer: str
) -> None:
    path, problem = tmp_path / "trials.jsonl", fork_join()
    whole = said(search(problem, placer, trials=60, prove=False))
    opened = journals.open_journal

    def filling(*given: Any) -> journals.Journal:
        journal = opened(*given)
        journal._file = _Disk(journal._file, room)  # type: ignore[assignment]
        return journal

    monkeypatch.setattr("roost.search.solve.open_journal", filling)
    source = Counting(problem)
    with pytest.raises(
        InputError, match=r"trials\.jsonl: cannot be written: No space left on device"
    ):
        search(problem, placer, trials=60, journal=path, source=source, prove=False)
    assert source.closed
    assert path.read_bytes().endswith(b"\n")
    assert rows_of(path)[0]["row"] == "head"
    monkeypatch.undo()
    assert said(search(problem, placer, trials=60, journal=path, prove=False)) == whole


def _damage(path: Path, change: Any) -> None:
    """Change the first array of the first round that has one."""
    lines = rows_of(path)
    state = next(line["state"] for line in lines if line["row"] == "round" and line["state"])
    change(state[sorted(state)[0]])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "change",
    [
        {"data": "!!!"},
        {"data": "AAA"},
        {"data": ""},
        {"dtype": "object"},
        {"dtype": "float32"},
        {"dtype": "int8"},
        {"shape": [3, 3, 3]},
        {"shape": []},
        {"shape": [-1]},
        {"shape": ["x"]},
        {"shape": [2**62, 2**62]},
    ],
    ids=repr,
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_state_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], sealed: bool
) -> None:
    path, problem = tmp_path / "trials.jsonl", fork_join()
    search(problem, "annealing", trials=500, journal=path, prove=False)
    if not sealed:  # as if the digest had been mended too
        monkeypatch.setattr(journal_lines, "rows_digest", lambda state: "")
        lines = rows_of(path)
        for line in lines:
            line["digest"] = "" if line["row"] == "round" else line.get("digest")
        lines[0].pop("digest")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _damage(path, lambda row: row.update(change))
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"trials\.jsonl.*(state|line)"):
        search(problem, "annealing", trials=500, journal=path, prove=False)
    assert path.read_bytes() == before


def test_a_changed_state_is_told_even_where_it_could_be_read(tmp_path: Path) -> None:
    path, problem = tmp_path / "trials.jsonl", fork_join()
    search(problem, "annealing", trials=500, journal=path, prove=False)

    def change(row: dict[str, Any]) -> None:
        row["data"] = "/" * (len(row["data"].rstrip("=")) - 1) + "8" + "=" * row["data"].count("=")

    _damage(path, change)
    with pytest.raises(InputError, match="not as it was written"):
        search(problem, "annealing", trials=500, journal=path, prove=False)


def test_a_round_that_lost_a_placement_is_told(tmp_path: Path) -> None:
    path, problem = tmp_path / "trials.jsonl", fork_join()
    search(problem, "annealing", trials=500, journal=path, prove=False)
    lines = rows_of(path)
    for line in lines:
        for trial in line.get("trials", ()):
            trial.pop("placement")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"trials\.jsonl: trial .* has no placement"):
        search(problem, "annealing", trials=500, journal=path, prove=False)


SEARCHES: list[tuple[str | Placer, int, Problem]] = [
    ("random", 64, training_like(40, 3)),
    ("annealing", 9000, training_like(40, 3)),
    (Genetic(individuals=32), 6000, training_like(40, 3)),
    ("auto", 9000, training_like(40, 3)),
    ("annealing", 3000, tiny_problem("streamed")),
    ("auto", 3000, tiny_problem("streamed")),
]
IDS = ["random", "annealing", "genetic", "auto", "annealing, streamed", "auto, streamed"]


@pytest.mark.parametrize(("placer", "trials", "problem"), SEARCHES, ids=IDS)
def test_a_search_that_was_cut_anywhere_goes_on_to_the_same_end(
    tmp_path: Path, placer: str | Placer, trials: int, problem: Problem
) -> None:
    path = tmp_path / "trials.jsonl"
    source = Counting(problem)
    whole = search(problem, placer, trials=trials, seed=2, journal=path, source=source, prove=False)
    assert 0.9 * trials < whole.num_trials <= trials
    unwritten = search(problem, placer, trials=trials, seed=2, prove=False)
    assert said(unwritten) == said(whole)
    lines = path.read_bytes().splitlines(keepends=True)
    cuts = sorted({1, 2, 3, len(lines) // 3, len(lines) // 2, len(lines) - 1, len(lines)})
    for cut in cuts:
        path.write_bytes(b"".join(lines[:cut]))
        known = sum(len(line.get("trials", [line])) for line in rows_of(path)[1:])
        again = Counting(problem)
        result = search(
            problem, placer, trials=trials, seed=2, journal=path, source=again, prove=False
        )
        assert said(result) == said(whole)
        assert {n: t.step_time for n, t in result.baselines.items()} == {
            n: t.step_time for n, t in whole.baselines.items()
        }
        assert known + len(again.asked) == len(source.asked)  # nothing twice
        assert [row.get("digest") for row in rows_of(path)] == [
            json.loads(line).get("digest") for line in lines
        ]


@pytest.mark.parametrize("more", [10, 300, 3000, 20000])
def test_a_search_goes_on_with_another_budget(tmp_path: Path, more: int) -> None:
    problem, path = training_like(40, 3), tmp_path / "trials.jsonl"
    before = search(problem, "auto", trials=3000, journal=path, prove=False)
    after = search(problem, "auto", trials=more, journal=path, prove=False)
    assert after.num_trials <= more
    assert after.num_trials > 0.9 * more
    assert more < 3000 or not before.best.better_than(after.best)


def test_a_search_whose_seconds_are_spent_gives_all_that_it_had(tmp_path: Path) -> None:
    problem, path, clock = training_like(40, 3), tmp_path / "trials.jsonl", Clock()

    def run() -> tuple[Result, int]:
        budget = Budget(seconds=1.0, clock=clock)
        source = Counting(problem, clock, 0.004)
        return search(
            problem,
            Auto(heat=Heat(batches=4), threads=1),
            budget=budget,
            journal=path,
            source=source,
            prove=False,
        ), len(source.asked)

    first, asked = run()
    assert first.ended == "budget"
    assert len(first.baselines) >= 2
    again, more = run()
    assert said(again) == said(first)
    assert set(again.baselines) == set(first.baselines)
    assert asked > 100
    assert more == 0
    assert again.seconds == pytest.approx(first.seconds, abs=0.01)


def test_the_seconds_of_trials_that_the_journal_has_are_spent(tmp_path: Path) -> None:
    problem, path, clock = fork_join(), tmp_path / "trials.jsonl", Clock()

    def endless(problem: Problem, evaluate: Evaluate) -> Placement:
        for placement in placements(problem, 1000):
            evaluate([placement])
        raise AssertionError("it went on")

    asked = []
    for seconds in (20, 20, 50):
        source = Counting(problem, clock, 1.0)
        budget = Budget(seconds=seconds, clock=clock)
        result = search(
            problem, Told(endless), budget=budget, journal=path, source=source, prove=False
        )
        assert (result.num_trials, result.seconds) == (seconds, seconds)
        asked.append(len(source.asked))
    assert asked == [20, 0, 30]


def test_of_a_batch_only_what_is_not_known_is_evaluated(tmp_path: Path) -> None:
    problem, path = fork_join(), tmp_path / "trials.jsonl"
    batch = placements(problem, 6)

    def asking(which: list[Placement]) -> Told:
        return Told(lambda problem, evaluate: best_of(evaluate(which)).placement)

    search(problem, asking(batch[2:5]), trials=100, journal=path, prove=False)
    source, seen = Counting(problem), list[Progress]()
    search(
        problem,
        asking(batch),
        trials=100,
        journal=path,
        source=source,
        on_trial=seen.append,
        prove=False,
    )
    assert source.asked == [batch[n].digest for n in (0, 1, 5)]
    assert [progress.trial.placement for progress in seen] == batch


def test_what_a_placer_does_not_ask_for_again_is_not_lost(tmp_path: Path) -> None:
    problem, path = fork_join(), tmp_path / "trials.jsonl"
    batch = placements(problem, 6)

    def asking(which: list[Placement]) -> Told:
        def run(problem: Problem, evaluate: Evaluate) -> Placement:
            evaluate.named("first")(which)
            evaluate.named("second").round(lambda: Round(which[:1], 10))
            assert evaluate.best is not None
            return evaluate.best.placement

        return Told(run)

    first = search(problem, asking(batch[:3]), trials=100, journal=path, prove=False)
    again = search(problem, asking(batch[3:]), trials=100, journal=path, prove=False)
    assert not first.best.better_than(again.best)
    assert again.num_trials == first.num_trials + 3  # its rounds were taken from the journal
    little = search(problem, asking(batch[3:4]), trials=11, journal=path, prove=False)
    assert little.num_trials <= 11


def test_a_round_that_was_left_out_does_not_take_the_state_of_another(tmp_path: Path) -> None:
    """With more to spend a placer may do what it had left out before, and then what the journal
    has."""
    problem, path, ran = fork_join(), tmp_path / "trials.jsonl", list[str]()
    batch = placements(problem, 2)

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        def done(what: str) -> Round:
            ran.append(what)
            return Round(batch[:1], 5, {what: np.arange(3)})

        for what in ("long", "short", "") if evaluate.simulations_left > 50 else ("short", ""):
            state = evaluate.round(lambda what=what: done(what), what)  # type: ignore[misc]
            assert list(state) == [what]
        return batch[0]

    search(problem, Told(run), trials=20, journal=path, prove=False)
    search(problem, Told(run), trials=100, journal=path, prove=False)
    assert ran == ["short", "", "long"]


def test_a_search_on_known_ground_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    first = write(path)
    before = path.read_bytes()
    source = Counting(fork_join())
    again = search(fork_join(), "random", trials=40, journal=path, source=source, prove=False)
    assert said(again) == said(first)
    assert (source.asked, path.read_bytes()) == ([], before)
    assert again.best.peak_memory.tolist() == first.best.peak_memory.tolist()
    assert replace(again.best, seconds=0.0).source == "simulated"


def test_every_dtype_of_a_state_comes_back(tmp_path: Path) -> None:
    state = {
        "bool": np.array([True, False]),
        "int8": np.array([[1, -2]], dtype=np.int8),
        "int32": np.arange(3, dtype=np.int32),
        "int64": np.array(7),
        "uint64": np.array([2**63], dtype=np.uint64),
        "float64": np.array([0.1, inf, -0.0]),
        "empty": np.zeros((0, 4)),
    }
    problem, path = fork_join(), tmp_path / "trials.jsonl"
    seen: list[Any] = []

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        seen.append(evaluate.round(lambda: Round(placements(problem, 1), 5, state)))
        return placements(problem, 1)[0]

    for _ in range(2):
        search(problem, Told(run), trials=10, journal=path, prove=False)
    for name, array in state.items():
        assert seen[1][name].dtype == array.dtype
        assert seen[1][name].shape == array.shape
        assert seen[1][name].tobytes() == array.tobytes()


def weights_of(path: Path, seed: int) -> Lister:
    save_weights(path, "lister", new_tensors(np.random.default_rng(seed)), {})
    return Lister(weights=str(path), varied=0, tune=False)


def test_other_weights_under_the_same_name_are_another_search(tmp_path: Path) -> None:
    path, weights = tmp_path / "trials.jsonl", tmp_path / "policy.safetensors"
    search(fork_join(), weights_of(weights, 1), trials=40, journal=path, prove=False)
    search(fork_join(), weights_of(weights, 1), trials=40, journal=path, prove=False)
    moved = weights_of(tmp_path / "moved.safetensors", 1)
    search(fork_join(), moved, trials=40, journal=path, prove=False)
    other = weights_of(weights, 2)
    with pytest.raises(
        InputError, match=r"settings: this search has other ones, the file weights='[0-9a-f]{16}'"
    ):
        search(fork_join(), other, trials=40, journal=path, prove=False)
