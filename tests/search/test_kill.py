"""A search that is killed at any moment loses no finished trial, and goes on to where it would have
come."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roost.core.trial import Result
from roost.placers._annealing.population import Heat
from roost.placers.annealing import Annealing
from roost.search.journal_lines import HeadLine, RoundLine, TrialLine
from roost.search.solve import search
from roost.testing.problems import training_like

KILLS = 10
TRIALS = 1_000_000  # a few seconds
CHILD = "import sys, pathlib, test_kill; test_kill.run(pathlib.Path(sys.argv[1]))"


def run(path: Path) -> Result:
    """The search, which has many trials by themselves and many short rounds."""
    placer = Annealing(starts=("single", "random", "rules"), heat=Heat(batches=20))
    return search(training_like(300, 3), placer, trials=TRIALS, seed=5, journal=path, prove=False)


def whole_lines(path: Path) -> list[Any]:
    """Every line that ends; each must be what it says it is."""
    data = path.read_bytes() if path.exists() else b""
    decoder = msgspec.json.Decoder(HeadLine | TrialLine | RoundLine)
    return [decoder.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def digests(lines: list[Any]) -> list[str]:
    return [line.problem if isinstance(line, HeadLine) else line.digest for line in lines]


def killed_at(path: Path, num_lines: int, delay: float) -> int:
    """Run the search in a process of its own, and kill that soon after it has written so many
    lines; its exit code."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=Path(__file__).parent)
    try:
        while child.poll() is None and (
            not path.exists() or path.read_bytes().count(b"\n") < num_lines
        ):
            time.sleep(0.002)
        time.sleep(delay)
    finally:
        child.kill()
        code = child.wait()
    return code


def test_a_search_killed_at_ten_moments_comes_to_the_same_end(tmp_path: Path) -> None:
    unbroken = run(tmp_path / "unbroken.jsonl")
    expected = digests(whole_lines(tmp_path / "unbroken.jsonl"))
    rng = np.random.default_rng(11)
    moments = np.sort(rng.integers(0, len(expected) - 20, KILLS))
    path, codes, before = tmp_path / "killed.jsonl", [], 0
    for moment in moments.tolist():
        codes.append(killed_at(path, moment, float(rng.uniform(0.0, 0.03))))
        found = digests(whole_lines(path))
        # The way of the unbroken search, nothing twice and nothing left out.
        assert found == expected[: len(found)]
        assert len(found) >= before
        before = len(found)
    assert codes.count(-signal.SIGKILL) >= KILLS - 2  # or they were too late to show anything
    assert before > len(expected) // 2
    result = run(path)
    assert digests(whole_lines(path)) == expected
    assert result.best.placement.digest == unbroken.best.placement.digest
    assert result.best.step_time == unbroken.best.step_time
    assert (result.num_trials, result.ended) == (unbroken.num_trials, unbroken.ended)
