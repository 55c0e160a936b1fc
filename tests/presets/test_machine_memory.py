"""Memory that is kept for the tensors to come."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from roost.presets import machine

# Three at a time of up to 48 MB, again and again: how many pages were new.
PROGRAM = """
import resource, sys
import torch
from roost.presets import machine
if sys.argv[1] == "kept":
    machine.keep_memory()

def faults():
    some = [torch.ones(size) for size in (12_000_000, 3_000_000, 9_000_000)]
    del some
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.set_num_threads(1)
begun = [faults() for _ in range(3)][-1]
print([faults() for _ in range(10)][-1] - begun)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the GNU C library")
def test_memory_that_was_given_back_is_used_again():
    new = {}
    for how in ("kept", "plain"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, check=True, text=True
        )
        new[how] = int(run.stdout)
    assert new["plain"] > 10_000  # or there is nothing to keep
    assert 3 * new["kept"] < new["plain"]


@pytest.mark.parametrize(
    ("allowed", "kept"),
    [
        (2**30, {-3: 2**30, -1: 2**31 - 1, -2: 2**26}),
        (2**25, {-3: 2**25, -1: 2**31 - 1, -2: 2**26}),
        (0, {}),
    ],
)
def test_a_library_that_refuses_large_blocks_is_asked_for_less_or_left_alone(
    monkeypatch, allowed, kept
):
    found = {}

    def mallopt(setting, value):
        if setting == -3 and value > allowed:
            return 0
        found[setting] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    machine.keep_memory()
    assert found == kept
