"""The sequence-to-sequence policy: what it draws is what it says it draws, and never what is not
allowed."""

import pytest
import torch

from roost.policies._lstm import _states_on_gpu, lstm_states, lstm_step
from roost.policies.seq2seq import Seq2Seq


def new_policy(
    groups=7, devices=4, twins=(-1, 0, 1, -1), seed=0, spread=2.0, allowed=None, **settings
):
    torch.manual_seed(seed)
    allowed = torch.ones(groups, devices, dtype=torch.bool) if allowed is None else allowed
    prior = torch.randn(groups, devices) * 0.3
    policy = Seq2Seq(
        torch.rand(groups, 5), allowed, prior, list(twins), hidden=8, spread=spread, **settings
    )
    return policy


WAYS = [
    {},
    {"attention": "dot"},
    {"attention": "additive", "aligned": False},
    {"autoregressive": False},
    {"temperature": 2.0, "tanh": 3.0},
]


def test_the_gradient_of_the_lstm_is_right():
    torch.manual_seed(1)
    inputs = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lstm_states, (inputs, weight))


def test_the_lstm_is_that_of_pytorch():
    torch.manual_seed(2)
    layer = torch.nn.LSTM(6, 4)
    inputs = torch.randn(9, 3, 6)
    # PyTorch's gates are in, forget, new, out; ours are new, in, forget, out.
    rows = torch.cat(
        [torch.arange(8, 12), torch.arange(0, 4), torch.arange(4, 8), torch.arange(12, 16)]
    )
    entered = (
        inputs @ layer.weight_ih_l0[rows].t() + layer.bias_ih_l0[rows] + layer.bias_hh_l0[rows]
    )
    weight = layer.weight_hh_l0[rows].t()
    states = lstm_states(entered, weight)
    torch.testing.assert_close(states, layer(inputs)[0])
    hidden = cell = torch.zeros(3, 4)
    for number in range(9):
        hidden, cell = lstm_step(entered[number], weight, hidden, cell)
        torch.testing.assert_close(hidden, states[number])


def test_the_way_of_the_gpu_is_the_same():
    torch.manual_seed(3)
    inputs = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(5, 3, 4, dtype=torch.float64)
    ways = [way(inputs, weight) for way in (lstm_states, _states_on_gpu)]
    torch.testing.assert_close(*ways)
    torch.testing.assert_close(
        *[torch.autograd.grad((way * slopes).sum(), (inputs, weight)) for way in ways]
    )


@pytest.mark.parametrize("settings", WAYS)
def test_samples_come_with_the_probabilities_they_were_drawn_with(settings):
    policy = new_policy(**settings)
    actions, log_probs = policy.sample(50, torch.Generator().manual_seed(3))
    assert actions.shape == (50, 7)
    torch.testing.assert_close(policy.log_probs(actions), log_probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones(50, 7))


@pytest.mark.parametrize("settings", WAYS)
def test_devices_are_drawn_as_often_as_their_probabilities_say(settings):
    policy = new_policy(groups=2, devices=3, twins=(-1, -1, -1), **settings)
    actions, _ = policy.sample(20_000, torch.Generator().manual_seed(4))
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    log_probs = policy.log_probs(pairs).gather(-1, pairs.unsqueeze(-1)).squeeze(-1).sum(dim=1)
    drawn = torch.bincount(actions[:, 0] * 3 + actions[:, 1], minlength=9) / len(actions)
    assert (drawn - log_probs.detach().exp()).abs().max() < 0.015


def test_each_choice_depends_on_those_before_it_and_on_none_after():
    policy = new_policy()
    actions = torch.zeros(2, 7, dtype=torch.long)
    actions[1, 3] = 3
    one, other = policy.log_probs(actions)
    torch.testing.assert_close(one[:4], other[:4])
    assert (one[4:] - other[4:]).abs().max() > 1e-4


@pytest.mark.parametrize("settings", WAYS)
def test_what_is_not_allowed_is_never_drawn(settings):
    allowed = torch.ones(7, 4, dtype=torch.bool)
    allowed[:, 2] = False
    allowed[3, :3] = False
    policy = new_policy(allowed=allowed, twins=(-1, -1, -1, -1), **settings)
    actions, _ = policy.sample(300, torch.Generator().manual_seed(5))
    assert not (actions == 2).any()
    assert (actions[:, 3] == 3).all()


def test_of_like_devices_the_first_is_used_first():
    policy = new_policy(twins=(-1, 0, 1, -1))
    actions, log_probs = policy.sample(300, torch.Generator().manual_seed(6))
    for row in actions.tolist():
        first = [row.index(device) if device in row else 99 for device in range(3)]
        assert first == sorted(first)
    assert (log_probs[:, 0, 1:3] < -1e6).all()


def test_it_begins_with_the_prior():
    policy = new_policy(spread=0.0, twins=(-1, -1, -1, -1))
    actions, log_probs = policy.sample(3, torch.Generator().manual_seed(7))
    torch.testing.assert_close(log_probs[0], torch.log_softmax(policy.fixed, dim=-1))
    assert len(actions) == 3
