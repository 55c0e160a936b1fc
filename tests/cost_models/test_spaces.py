"""What ops hold for themselves on a GPU is measured once for each unique op."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from roost.cost_models.timing import workspaces
from roost.frontends.torch import step_of
from roost.presets import measurement_cache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def step():
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
    )
    return step_of(nn.Sequential(*layers).eval(), torch.randn(2, 3, 16, 16))


def of_kind(step, kind):
    return [op for op, each in enumerate(step.graph.kinds) if each == kind]


def test_ops_that_are_alike_are_called_once_and_what_was_found_is_kept(step, monkeypatch):
    called = []
    monkeypatch.setattr(
        workspaces, "held", lambda work, device: called.append(work.signature) or len(called) * 100
    )
    found = workspaces.spaces(step, CPU)
    assert found[of_kind(step, "convolution")].tolist() == [100, 200, 200]
    assert found[of_kind(step, "relu")].tolist() == [300]
    assert found[step.graph.is_parameter].sum() == 0
    assert len(called) == 3
    assert np.array_equal(workspaces.spaces(step, CPU), found)
    assert len(called) == 3
    workspaces.spaces(step, CPU, cache=False)
    assert len(called) == 6


def test_what_cannot_be_run_holds_nothing_as_far_as_is_known(step, monkeypatch):
    def fails(work, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(workspaces, "held", fails)
    assert workspaces.spaces(step, CPU).sum() == 0
    # There is room again: what failed was not kept.
    monkeypatch.setattr(workspaces, "held", lambda work, device: 7)
    assert workspaces.spaces(step, CPU)[of_kind(step, "convolution")].tolist() == [7, 7, 7]


def test_a_damaged_size_is_measured_anew(step, monkeypatch):
    monkeypatch.setattr(workspaces, "held", lambda work, device: 7)
    workspaces.spaces(step, CPU)
    [path] = measurement_cache.folder().glob("spaces-*.json")
    kept = json.loads(path.read_text())
    wrong = [-1, "7", True]
    kept["found"] = {name: wrong[number % 3] for number, name in enumerate(kept["found"])}
    path.write_text(json.dumps(kept))
    assert set(workspaces.spaces(step, CPU)[of_kind(step, "convolution")]) == {7}


@pytest.mark.gpu
def test_workspaces_of_convolutions_are_found():
    """Beside the operands of a call: the peak of a run is what the graph says, and that."""
    gpu = torch.device("cuda", 0)
    model = nn.Conv2d(64, 256, 3, padding=1).to(gpu, torch.bfloat16).eval()
    images = torch.randn(16, 64, 56, 56, device=gpu, dtype=torch.bfloat16)
    step = step_of(model, images)
    [space] = workspaces.spaces(step, gpu)[of_kind(step, "convolution")]
    with torch.no_grad():
        model(images)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = model(images)
        beyond = torch.cuda.max_memory_allocated() - before - made.nbytes
    assert abs(int(space) - beyond) <= 2**21
    assert workspaces.spaces(step, gpu)[of_kind(step, "convolution")].tolist() == [space]
