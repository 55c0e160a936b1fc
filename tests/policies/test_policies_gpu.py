"""The policies on a GPU: the same numbers as on the CPU."""

from __future__ import annotations

import pytest
import torch

from roost.policies._lstm import lstm_states
from roost.policies.seq2seq import Seq2Seq

pytestmark = pytest.mark.gpu


def policy(**more: object) -> Seq2Seq:
    torch.manual_seed(0)
    features = torch.rand(40, 7)
    allowed = torch.rand(40, 4) > 0.1
    allowed[:, 0] = True
    return Seq2Seq(
        features, allowed, torch.zeros(40, 4), [-1, -1, 1, 2], hidden=32, spread=1.0, **more
    )


@pytest.mark.parametrize("attention", ["none", "dot", "additive"])
@pytest.mark.parametrize("autoregressive", [True, False])
def test_draws_and_gradients_are_those_of_the_cpu(attention: str, autoregressive: bool) -> None:
    here = policy(attention=attention, autoregressive=autoregressive)
    there = policy(attention=attention, autoregressive=autoregressive).to("cuda")
    for turn in range(3):  # recorded in the first, replayed in the others, with other weights
        drawn = [p.sample(6, torch.Generator().manual_seed(turn)) for p in (here, there)]
        assert torch.equal(drawn[0][0], drawn[1][0].cpu())
        torch.testing.assert_close(drawn[0][1], drawn[1][1].cpu(), rtol=1e-3, atol=1e-3)
        for p, (actions, _) in zip((here, there), drawn, strict=True):
            p.zero_grad()
            chosen = p.log_probs(actions).gather(-1, actions.unsqueeze(-1))
            chosen.mean().backward()
            with torch.no_grad():
                for weights in p.parameters():
                    if weights.grad is not None:
                        weights.add_(weights.grad, alpha=0.1)
        for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.cpu(), rtol=1e-3, atol=1e-4)


def test_the_lstm_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(30, 5, 64), torch.randn(16, 64) * 0.2
    gradients = []
    for device in ("cpu", "cuda"):
        x, w = (each.clone().to(device).requires_grad_() for each in (inputs, weight))
        lstm_states(x, w).square().sum().backward()
        gradients.append((x.grad.cpu(), w.grad.cpu()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
