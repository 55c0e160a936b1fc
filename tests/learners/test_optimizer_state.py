"""Weights and Adam's moments as arrays, and the device that a policy learns on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roost.errors import InputError
from roost.learners.hardware import check_train_on, torch_device
from roost.learners.optimizer_state import adam_arrays, restore_adam, restore_state, state_arrays
from roost.learners.threads import one_thread


def new(seed=0):
    torch.manual_seed(seed)
    policy = torch.nn.Linear(3, 2)
    return policy, torch.optim.Adam(policy.parameters(), lr=0.1)


def teach(policy, optimizer, parameters=("weight", "bias")):
    for name in parameters:
        weight = getattr(policy, name)
        weight.grad = -torch.ones_like(weight)
    optimizer.step()


def test_an_array_is_a_copy_that_later_steps_leave_alone():
    policy, optimizer = new()
    teach(policy, optimizer)
    state = state_arrays(policy, optimizer)
    assert set(state) == {"weight.weight", "weight.bias"} | {
        f"adam.{number}.{key}" for number in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    before = {name: value.copy() for name, value in state.items()}
    teach(policy, optimizer)
    assert all((state[name] == value).all() for name, value in before.items())
    assert state["adam.0.step"] == 1
    assert state["adam.0.exp_avg"] == pytest.approx(np.full((2, 3), -0.1))


def test_a_parameter_without_an_update_has_no_moments():
    policy, optimizer = new()
    teach(policy, optimizer, ["bias"])
    state = state_arrays(policy, optimizer)
    again, restored = new(1)
    restore_state(again, restored, state)
    assert set(adam_arrays(restored)) == {name for name in state if name.startswith("adam.1.")}
    for pair in ((policy, optimizer), (again, restored)):
        teach(*pair)
    for ours, theirs in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("adam.2.step", np.zeros(()), "'adam.2.step' belongs to no parameter"),
        ("adam.0.momentum", np.zeros(()), "'adam.0.momentum' belongs to no parameter"),
        ("adam.0.step", np.full((), -1.0), "'adam.0.step' has a number below 0"),
        ("adam.1.exp_avg_sq", np.array([0.0, -1.0]), "'adam.1.exp_avg_sq' has a number below 0"),
        ("adam.1.exp_avg", np.zeros(3), "adam.1.exp_avg"),
        ("adam.0.step", np.zeros(1), "adam.0.step"),
        ("weight.bias", np.zeros(3), "weight.bias"),
    ],
)
def test_a_state_of_another_network_is_refused(name, value, message):
    policy, optimizer = new()
    teach(policy, optimizer)
    state = state_arrays(policy, optimizer)
    state["adam.1.exp_avg_sq"] = np.zeros(2, np.float32)  # 0 is no number below 0
    restore_state(policy, optimizer, state)
    with pytest.raises(InputError, match=message):
        restore_state(policy, optimizer, state | {name: value.astype(np.float32)})


def test_a_state_without_one_of_its_moments_is_refused():
    policy, optimizer = new()
    teach(policy, optimizer)
    state = adam_arrays(optimizer)
    del state["adam.0.exp_avg"]
    with pytest.raises(InputError, match=r"adam\.0\.exp_avg"):
        restore_adam(optimizer, state)


def test_a_policy_learns_on_the_device_that_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="PyTorch sees 0 GPUs"):
        torch_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert torch_device("auto") == torch_device("cuda") == torch.device("cuda")
    assert torch_device("cuda:1") == torch.device("cuda:1")
    assert torch_device("cpu:7").type == "cpu"
    with pytest.raises(InputError, match="sees 2 GPUs"):
        torch_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "cuda:x", "cpu,cuda", None, 0])
def test_a_device_of_no_machine_is_refused(name):
    with pytest.raises(InputError, match="must be auto, cpu, cuda or cuda:N"):
        check_train_on(name)


def test_a_small_network_learns_in_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
