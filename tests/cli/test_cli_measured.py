"""`roost place --evaluate measured`: placements are run, the best is raced, and Ctrl-C leaves no
process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import roost as library
from roost.core.cluster import Cluster, Device, Link
from roost.search.measured import race as races
from roost.search.measured.candidates import Candidates
from roost.search.measured.worker import descendants

MODEL = [
    "rnnlm",
    *(f"--set={each}" for each in ("layers=1", "hidden=8", "vocab=20", "length=2", "batch=2")),
]


@pytest.fixture
def threads(tmp_path: Path) -> Path:
    """Two devices that are threads of this machine."""
    figures = {"peak": {"float32": 1e10}, "memory_bandwidth": 1e10}
    devices = tuple(Device(f"cpu:{number}", "cpu", 2**30, **figures) for number in range(2))
    Cluster("threads", devices, (Link("*", "*", 1e10),)).save(tmp_path / "threads.toml")
    return tmp_path / "threads.toml"


def test_placements_are_run_and_raced(roost, threads: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = [
        "place",
        *MODEL,
        "--train",
        "--on",
        threads,
        "--placer",
        "heft",
        "--trials",
        4,
        "-o",
        out,
    ]
    first = roost(*args, "--evaluate", "measured", "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["evaluate"] == "measured"
    assert found["feasible"]
    assert found["bound"] is None
    assert found["step_time"] > 0
    assert found["simulated_step_time"] == library.load(out / "timeline.json.gz").step_time
    race = found["race"]
    assert found["step_time"] == min(
        row["step_time"] for row in race["standings"] if row["baseline"]
    )
    assert {row["placer"] for row in race["standings"]} <= {"single", "heft"}
    result = library.load(out / "result.json")
    assert (result.best.source, result.best.placement) == (
        "measured",
        library.load(out / "placement.json"),
    )
    trials = (out / "trials.jsonl").read_text()
    assert trials.count('"source":"measured"') == trials.count('"row":"trial"') > 0
    # What the journal has is not run again; without a race the seconds are those of the search.
    second = roost(*args, "--evaluate", "measured", "--no-race")
    assert second.exit_code == 0, second.output
    assert (out / "trials.jsonl").read_text() == trials
    assert "Measured; simulated it takes " in second.stdout
    assert "Race: " not in second.stdout
    # Seconds of a simulated step are not mixed with measured ones, which are many times as long.
    assert re.search(
        r"^as simulated, in a step of .*:\ndevice +ops +busy +share", second.stdout, re.M
    )
    shares = re.findall(r"^cpu:\d +\d+ .*? (\d+)% ", second.stdout, re.M)
    assert len(shares) == 2
    assert 30 <= sum(map(int, shares)) <= 200
    assert "going on from" in second.stderr
    assert re.search(
        r"^Ended after \d of 4 trials: heft proposes no more placements$", second.stdout, re.M
    )


def test_a_model_of_transformers_is_timed_and_run(roost, threads: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1).save_pretrained(
        tmp_path / "model"
    )
    config = [tmp_path / "model" / "config.json", "--set", "length=4"]
    timed = roost("profile", *config, "--on", threads, "-o", tmp_path / "problem.json", "--json")
    assert timed.exit_code == 0, timed.output
    assert all(device["measured_step_time"] > 0 for device in json.loads(timed.stdout)["devices"])
    args = [
        "--costs",
        tmp_path / "problem.json",
        "--placer",
        "single",
        "--trials",
        2,
        "--evaluate",
        "measured",
    ]
    result = roost("place", *config, *args, "--no-race", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["feasible"], found["costs"], found["evaluate"]) == (True, "profiled", "measured")


def test_what_cannot_be_measured_is_refused(refused, files: Path, threads: Path) -> None:
    measured = ["--evaluate", "measured"]
    said = refused("place", files / "graph.json", "--on", threads, *measured)
    assert said.startswith(
        f"{files / 'graph.json'}: cannot be run; --evaluate measured needs the model itself"
    )
    assert "package.module:callable" in refused("place", "model.onnx", "--on", threads, *measured)
    Cluster(
        "odd",
        (Device("cpu:0", "cpu", 2**30), Device("tpu:0", "tpu", 2**30)),
        (Link("*", "*", 1e9),),
    ).save(files / "odd.toml")
    assert "device 'tpu:0' of cluster 'odd'" in refused(
        "place", *MODEL, "--on", files / "odd.toml", *measured
    )
    assert "of cluster 'h100x8' is not here: " in refused(
        "place", *MODEL, "--on", "h100x8", *measured
    )
    assert "is none of simulated, measured" in refused(
        "place", *MODEL, "--on", threads, "--evaluate", "guessed"
    )
    assert "add --evaluate measured" in refused("place", *MODEL, "--on", threads, "--race")


@pytest.mark.usefixtures("control_c")
def test_control_c_ends_with_the_best_so_far_and_leaves_no_process(
    threads: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [
        *MODEL,
        "--on",
        threads,
        "--placer",
        "annealing",
        "--seconds",
        600,
        "--evaluate",
        "measured",
        "-o",
        out,
    ]
    command = [sys.executable, "-m", "roost", "place", *map(str, argv), "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        path = out / "trials.jsonl"
        while child.poll() is None and (
            not path.exists() or '"row":"trial"' not in path.read_text()
        ):
            time.sleep(0.05)
        started = descendants(child.pid)
        while True:
            child.send_signal(signal.SIGINT)
            # One that comes in the midst of compiled code may be lost.
            with suppress(subprocess.TimeoutExpired):
                stdout, stderr = child.communicate(timeout=30)
                break
    finally:
        child.kill()
    assert child.returncode == 0, stderr
    found = json.loads(stdout)
    assert (found["ended"], found["evaluate"], found["race"]) == ("interrupted", "measured", None)
    assert "interrupted: this is the best so far" in stderr
    assert started
    until = time.monotonic() + 60
    while left := [pid for pid in started if _runs(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.usefixtures("control_c")
def test_control_c_in_the_race_ends_with_the_best_so_far_and_leaves_no_process(
    roost, threads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, laps = set(descendants(os.getpid())), Candidates.time_step
    racing = False

    def race(*args, own=races.race, **settings):
        nonlocal racing
        racing = True
        return own(*args, **settings)

    def lap(self, placement):
        if racing:
            os.kill(os.getpid(), signal.SIGINT)
        return laps(self, placement)

    monkeypatch.setattr(races, "race", race)
    monkeypatch.setattr(Candidates, "time_step", lap)
    args = [
        "place",
        *MODEL,
        "--on",
        threads,
        "--placer",
        "heft",
        "--trials",
        4,
        "-o",
        tmp_path,
        "--evaluate",
        "measured",
    ]
    result = roost(*args, "--json")
    assert racing
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["feasible"], found["race"]) == (True, None)
    assert "interrupted: not raced against the baselines" in result.stderr
    assert (
        library.load(tmp_path / "placement.json")
        == library.load(tmp_path / "result.json").best.placement
    )
    assert not [
        pid for pid in set(descendants(os.getpid())) - before if _runs(pid) and not _tidies_up(pid)
    ]


def _tidies_up(pid: int) -> bool:
    """Python's own process, which stays to the end."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
