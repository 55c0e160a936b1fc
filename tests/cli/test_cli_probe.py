"""`roost probe`, `roost profile`, and `--on here`."""

from __future__ import annotations

import json
import os

import pytest

import roost as package
from roost import load
from roost.presets import machine, probe

SMALL = (
    "--set",
    "batch=1",
    "--set",
    "length=4",
    "--set",
    "layers=1",
    "--set",
    "hidden=16",
    "--set",
    "heads=2",
)


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    """A folder of its own, and figures that take no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    figures = {
        "peak": {"float32": 1e11, "bfloat16": 2e11},
        "memory_bandwidth": 1e10,
        "launch_overhead": 2e-6,
    }

    def measured(virtual: int) -> dict:
        names = [f"cpu:{number}" for number in range(virtual)] or ["cpu"]
        links = (
            [["*", "*", 5e9, 2e-5, "copied by a thread", 0.0, 0.0, 0.0, 0.0]] if virtual > 1 else []
        )
        return {"devices": dict.fromkeys(names, figures), "links": links}

    monkeypatch.setattr(probe, "measured", measured)


def test_the_machine_is_shown(roost) -> None:
    text = roost("probe", columns=120).stdout
    for part in ("here: ", "cpu", "float32 100 GFLOP/s", "10.0 GB/s", "2.00 us", "measured here"):
        assert part in text


def test_the_machine_as_a_file_and_as_json(roost, tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    result = roost("probe", "--virtual", 2, "--memory", "cpu:1=512MiB", "-o", path, "--json")
    found = json.loads(result.stdout)
    assert [device["name"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    assert found["devices"][1]["memory"] == 512 * 2**20
    assert "wrote" in result.stderr
    cluster = package.load(path)
    assert [device.memory for device in cluster.devices] == [
        device["memory"] for device in found["devices"]
    ]
    assert cluster.latency[0, 1] == 2e-5


def test_caps_are_refused_with_what_to_do(refused) -> None:
    assert "as DEVICE=SIZE" in refused("probe", "--memory", "cpu")
    assert "'cuda:0'" in refused("probe", "--memory", "cuda:0=1GiB")
    assert "can be had" in refused("probe", "--memory", "cpu=1PiB")


def test_refresh_measures_anew(roost, monkeypatch) -> None:
    roost("probe")
    calls = []
    before = probe.measured
    monkeypatch.setattr(probe, "measured", lambda virtual: calls.append(virtual) or before(virtual))
    roost("probe")
    assert calls == []
    roost("probe", "--refresh")
    assert calls == [0]


def test_every_verb_takes_this_machine(roost, files) -> None:
    found = json.loads(roost("bound", files / "free.json", "--on", "here", "--json").stdout)
    assert found["cluster"] == "here"
    found = json.loads(roost("clusters", "here", "--json").stdout)
    assert [device["name"] for device in found["devices"]] == ["cpu"]
    placed = json.loads(
        roost("place", "gpt2", *SMALL, "--on", "here", "--placer", "single", "--json").stdout
    )
    assert placed["cluster"] == "here"


def test_a_model_is_profiled(roost, tmp_path) -> None:
    path = tmp_path / "problem.json"
    arguments = ("profile", "gpt2", *SMALL, "--train", "--optimizer", "adam")
    result = roost(*arguments, "-o", path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_timed"] == found["num_signatures"] > 10
    assert found["fallen_back"] == []
    assert {"mm", "adam", "attention_backward"} <= {row["kind"] for row in found["kinds"]}
    [device] = found["devices"]
    assert device["name"] == "cpu"
    assert device["measured_step_time"] > 0
    assert device["predicted_step_time"] == pytest.approx(device["op_time"])
    assert sum(row["seconds"]["cpu"] for row in found["kinds"]) == pytest.approx(device["op_time"])
    problem = package.load(path)
    assert problem.graph.digest == found["digest"]
    assert problem.costs.source == "profiled"
    settings = {"batch": 1, "length": 4, "layers": 1, "hidden": 16, "heads": 2}
    assert (
        found["digest"]
        == package.zoo.build("gpt2", train=True, optimizer="adam", **settings).digest
    )
    text = roost(*arguments, "--no-measure", columns=120).stdout
    assert "0 timed now" in text
    assert "predicted step" in text
    assert "adam" in text


def test_threads_are_profiled_as_devices(roost, tmp_path) -> None:
    path = tmp_path / "two.toml"
    roost("probe", "--virtual", 2, "-o", path)
    result = roost("profile", "gpt2", *SMALL, "--on", path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [device["name"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    assert all(device["measured_step_time"] > 0 for device in found["devices"])
    assert all(device["calibrated"] is None for device in found["devices"])


def test_costs_are_held_against_whole_steps(roost, tmp_path) -> None:
    path, problem = tmp_path / "two.toml", tmp_path / "problem.json"
    roost("probe", "--virtual", 2, "-o", path)
    arguments = (
        "profile",
        "gpt2",
        *SMALL,
        "--on",
        path,
        "--calibrate",
        "--no-measure",
        "-o",
        problem,
    )
    found = json.loads(roost(*arguments, "--json").stdout)
    assert all(device["calibrated"] > 0 for device in found["devices"])
    assert found["costs"] == "profiled, held against whole steps on cpu:0 and cpu:1"
    assert load(problem).costs.source == found["costs"]
    assert "calibrated by" in roost(*arguments).stdout


def test_a_model_that_does_not_fit_is_not_run(roost, tmp_path) -> None:
    path = tmp_path / "tight.toml"
    roost("probe", "--memory", "cpu=1KiB", "-o", path)
    found = json.loads(roost("profile", "gpt2", *SMALL, "--on", path, "--json").stdout)
    assert found["devices"][0]["measured_step_time"] is None
    assert found["devices"][0]["not_measured"] == "does not fit"


def test_what_cannot_be_profiled_is_refused(refused, files) -> None:
    assert "no model called 'gpt3'" in refused("profile", "gpt3")
    assert "cannot be timed" in refused("profile", files / "graph.json")
    assert "is not on this machine" in refused("profile", "gpt2", *SMALL, "--on", "k80x2")
    assert "no optimizer called" in refused(
        "profile", "gpt2", *SMALL, "--train", "--optimizer", "adma"
    )
    assert "cannot load" in refused("profile", "no_such_module:thing")


def test_where_it_cannot_be_written_is_told_before_anything_is_measured(
    refused, tmp_path, monkeypatch
) -> None:
    """Timing takes minutes."""

    def never(*args: object) -> None:
        raise AssertionError("this was to be refused first")

    monkeypatch.setattr(probe, "probe", never)
    (tmp_path / "folder.json").mkdir()
    for verb, suffix in ((("probe",), "toml"), (("profile", "gpt2", *SMALL), "json")):
        said = refused(*verb, "-o", tmp_path / "none" / f"x.{suffix}")
        assert (
            said
            == f"{tmp_path}/none/x.{suffix}: cannot be written: folder {tmp_path}/none does not exist"
        )
        assert f"is saved as .{suffix} or .{suffix}.gz" in refused(*verb, "-o", tmp_path / "x.txt")
    assert "is a directory" in refused("profile", "gpt2", "-o", tmp_path / "folder.json")
    with monkeypatch.context() as closed:
        closed.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        assert "cannot be written: Permission denied" in refused("probe", "-o", tmp_path / "x.toml")


def test_measuring_is_told_on_standard_error(roost) -> None:
    assert (
        roost("probe").stderr
        == "measuring this machine, once for its hardware: less than a minute\n"
    )
    assert roost("probe").stderr == ""
