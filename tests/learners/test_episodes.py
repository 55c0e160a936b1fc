"""Updates of a policy that improves placements in episodes."""

from __future__ import annotations

import numpy as np
import torch

from roost.learners.episodes import EpisodeSteps, PolicyUpdate, StepBaseline, returns
from roost.learners.rewards import standardised


def improved(
    update: PolicyUpdate, rate: float, parts: list[slice]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Probabilities of three devices after an update in which the first was good, and the others
    were not."""
    logits = torch.nn.Parameter(torch.zeros(4, 1, 3))
    chosen = np.array([[0, 1], [0, 2], [1, 0], [2, 0]])
    advantage = np.where(chosen == 0, 1.0, -1.0)
    before = np.full(chosen.shape, np.log(1 / 3))
    steps = EpisodeSteps.of(chosen, before, advantage, torch.device("cpu"))

    def score(part: slice) -> torch.Tensor:
        return torch.log_softmax(logits.expand(4, 2, 3)[part], dim=-1)

    figures = update.apply(torch.optim.SGD([logits], rate), score, parts, steps, 0.0)
    return torch.softmax(logits.detach(), dim=-1), figures


def test_what_was_good_gets_likelier_and_parts_make_no_difference() -> None:
    whole, figures = improved(PolicyUpdate(), 0.5, [slice(0, 4)])
    parts, again = improved(PolicyUpdate(), 0.5, [slice(0, 3), slice(3, 4)])
    assert (whole[..., 0] > 1 / 3).all()
    torch.testing.assert_close(whole, parts)
    assert abs(figures["loss"] - again["loss"]) < 1e-6


def test_a_policy_that_went_too_far_makes_no_further_pass() -> None:
    far, figures = improved(PolicyUpdate(passes=4), 0.5, [slice(0, 4)])
    near, stopped = improved(PolicyUpdate(passes=4, most_kl=1e-4), 0.5, [slice(0, 4)])
    once, _ = improved(PolicyUpdate(passes=1), 0.5, [slice(0, 4)])
    assert stopped["kl"] > 1e-4  # it is seen with the second pass, and that is not made
    assert not torch.allclose(far, near)
    torch.testing.assert_close(near, once)
    assert figures["kl"] >= 0


def test_returns_baselines_and_advantages() -> None:
    reward = np.array([[1.0, 0.0], [2.0, 4.0]])
    assert returns(reward, 0.5).tolist() == [[2.0, 2.0], [2.0, 4.0]]
    baseline = StepBaseline(2, 2)
    assert baseline.at(np.arange(2)).tolist() == [0.0, 0.0]
    for round_returns in (reward, 3 * reward):
        baseline.add(np.arange(2), round_returns)
    assert baseline.at(np.arange(2)).tolist() == [1.0, 6.0]
    assert standardised(np.zeros((2, 2)), 0.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert abs(standardised(reward, 0.0).mean()) < 1e-12
