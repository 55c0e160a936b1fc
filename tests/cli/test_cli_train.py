"""`roost train`: a try-out of training with random data."""

import json

import pytest

from roost.core.cluster import Cluster, Device, Link


@pytest.fixture
def args(tmp_path):
    figures = {"peak": {"float32": 1e11}, "memory_bandwidth": 1e10}
    devices = tuple(Device(f"cpu:{number}", "cpu", 2**34, **figures) for number in range(2))
    Cluster("threads", devices, (Link("*", "*", 1e10),)).save(tmp_path / "threads.toml")
    small = [f"{key}={value}" for key, value in SMALL.items()]
    settings = [word for each in small for word in ("--set", each)]
    budget = ("--costs", "estimated", "--trials", "60", "--microbatches", "2")

    def words(*more):
        return ("train", "rnnlm", "--on", tmp_path / "threads.toml", *settings, *budget, *more)

    return words


SMALL = {"batch": 4, "length": 3, "layers": 1, "hidden": 8, "vocab": 20}


def test_it_trains_saves_and_goes_on(roost, args, tmp_path):
    saved = tmp_path / "run.safetensors"
    result = roost(*args("--steps", "3", "--json", "-o", saved, "--lr", "0.01"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["microbatches"] == 2
    assert found["steps"] == 3
    assert len(found["losses"]) == 3
    assert found["losses"][-1] < found["losses"][0]
    assert found["expected"] > 0
    assert found["step_time"] > 0
    again = roost(*args("--steps", "1", "--resume", saved, "--lr", "0.01"), columns=200)
    assert again.exit_code == 0, again.output
    assert "step 4: loss " in again.stdout
    assert "a batch of 4 in 2 microbatches of 2, on cpu:0, cpu:1" in again.stdout
    assert "a step measured" in again.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--steps", "0"), "--steps is 0"),
        (("--microbatches", "two"), "write a number, several as 2,4,8, or auto"),
        (("--microbatches", "3"), "Give one of 1, 2, 4"),
        (("--memory", "6GiB"), "write it as DEVICE=SIZE"),
        (("--optimizer", "adamm"), "did you mean 'adam'"),
        (("--resume", "nothing.safetensors"), "no such file"),
        (("-o", "nowhere/run.safetensors"), "does not exist"),
    ],
)
def test_wrong_options_are_refused(refused, args, more, said):
    assert said in refused(*args(*more))
