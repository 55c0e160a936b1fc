"""Every equation of the learners against a worked example, a closed form or autograd.

The policy is a table of logits with one softmax for each stage. Plain gradient steps of length 1
replace Adam, so that a step shows the gradient itself.
"""

from __future__ import annotations

from math import e, log, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roost.learners.episodes import EpisodeSteps, PolicyUpdate, StepBaseline, returns
from roost.learners.gradients import clip_norm, clipped_gradients, log_probs_of, mean_entropy
from roost.learners.ppo import Ppo, guarantee
from roost.learners.recorded import advantages, clipped, imitate
from roost.learners.reinforce import Reinforce
from roost.learners.rewards import penalised, standardised
from roost.learners.softmaxes import Softmaxes

# Stage 0 has probabilities 1/2, 1/4, 1/4; stage 1 has 1/8, 5/8, 1/4.
PROBABILITIES = np.array([[0.5, 0.25, 0.25], [0.125, 0.625, 0.25]])
OLD = np.array([[0.4, 0.4, 0.2], [0.2, 0.5, 0.3]])
ACTIONS = np.array([[0, 1], [2, 0], [0, 2], [1, 1]])  # [batch, stages]


class Table(torch.nn.Module):
    """A policy that is a table of logits."""

    def __init__(self, probabilities=PROBABILITIES):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.from_numpy(np.log(probabilities)))

    def log_probs(self, actions):
        return torch.log_softmax(self.logits, dim=-1).expand(len(actions), -1, -1)


def stepped(learner_class, *settings, **named):
    """A learner of a table, whose step is the gradient."""
    learner = learner_class(Table(), *settings, **named)
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), 1.0)
    return learner


def step_of(learner, *batch):
    """The change of the logits by one update, and the figures of it."""
    before = learner.policy.logits.detach().clone()
    figures = learner.update(*batch)
    return (learner.policy.logits.detach() - before).numpy(), figures


def one_hot(actions):
    return np.eye(3)[actions]  # [batch, stages, choices]


def entropy_of(p):
    return -(p * np.log(p)).sum(axis=-1, keepdims=True)


def slope_of_entropy(p):
    """Gradient of the mean entropy of the stages: dH / dz = -p (log p + H)."""
    return -p * (np.log(p) + entropy_of(p)) / len(p)


def test_published_results_rest_on_these_settings():
    assert (Reinforce.rate, Reinforce.decay, Reinforce.drop_failures_after) == (0.01, 0.9, 5000)
    assert not Reinforce.standardise
    assert (Ppo.rate, Ppo.epochs, Ppo.target_kl, Ppo.penalty) == (0.01, 4, 0.01, 1.0)
    update = PolicyUpdate()
    assert (update.passes, update.clip, update.most_norm, update.most_kl) == (1, 0.2, 1.25, np.inf)
    for learner in (Reinforce(Table(), 1.0, 0.5), Ppo(Table(), 0.5)):
        assert learner.optimizer.param_groups[0]["lr"] == 0.5


# REINFORCE


def test_a_step_of_reinforce_or_ppo_is_at_most_1_long():
    actions, none = torch.from_numpy(ACTIONS), np.zeros(4, dtype=bool)
    step, figures = step_of(stepped(Reinforce, 99.0), actions, np.arange(4.0), none, 0.0)
    assert figures["gradient_norm"] > 2
    assert np.linalg.norm(step) == pytest.approx(1.0, rel=1e-5)
    old = torch.from_numpy(np.log(OLD)).expand(4, -1, -1)
    gains = torch.tensor([99.0, 0.0, 0.0, 0.0])
    step, _ = step_of(stepped(Ppo, epochs=1), actions, old, gains, 0.0)
    assert np.linalg.norm(step) == pytest.approx(1.0, rel=1e-5)


def test_the_baseline_of_reinforce_follows_the_mean_signal():
    learner, none = Reinforce(Table(), 10.0, decay=0.9), np.zeros(4, dtype=bool)
    actions = torch.from_numpy(ACTIONS)
    figures = learner.update(actions, np.array([1.0, 3.0, 2.0, 2.0]), none, 0.0)
    assert figures["baseline"] == 10.0  # of this update
    assert learner.baseline == pytest.approx(9.2)  # 0.9 * 10 + 0.1 * 2
    figures = learner.update(actions, np.array([4.0, 4.0, 6.0, 2.0]), none, 0.0)
    assert figures["baseline"] == pytest.approx(9.2)
    assert learner.baseline == pytest.approx(8.68)  # 0.9 * 9.2 + 0.1 * 4


def test_reinforce_climbs_the_advantage_over_the_baseline():
    learner = stepped(Reinforce, 1.5)
    signal = np.array([1.0, 1.75, 1.25, 2.0])
    step, figures = step_of(
        learner, torch.from_numpy(ACTIONS), signal, np.zeros(4, dtype=bool), 0.3
    )
    advantage = 1.5 - signal  # a lower signal is better
    slope = one_hot(ACTIONS) - PROBABILITIES  # of log p(action)
    expected = (advantage[:, None, None] * slope).mean(axis=0)
    expected += 0.3 * slope_of_entropy(PROBABILITIES)
    assert step == pytest.approx(expected)
    assert figures["gradient_norm"] == pytest.approx(np.linalg.norm(expected))
    assert figures["entropy"] == pytest.approx(entropy_of(PROBABILITIES).mean())


def test_standardised_advantages_of_reinforce_have_mean_0_and_deviation_1():
    learner = stepped(Reinforce, 1.5, standardise=True)
    signal = np.array([1.0, 1.5, 1.25, 1.75])  # deviation 0.2795
    step, _ = step_of(learner, torch.from_numpy(ACTIONS), signal, np.zeros(4, dtype=bool), 0.0)
    advantage = (1.375 - signal) / sqrt(0.078125)
    slope = (one_hot(ACTIONS) - PROBABILITIES) / 2  # the mean of the two stages
    assert step == pytest.approx((advantage[:, None, None] * slope).mean(axis=0))


def test_a_standardised_advantage_of_reinforce_is_at_most_3():
    for sign in (1.0, -1.0):
        learner = stepped(Reinforce, 1.5, standardise=True)
        actions = np.resize(ACTIONS, (20, 2))
        signal = np.zeros(20)
        signal[0] = sign  # sqrt(19) = 4.36 deviations from the mean
        step, _ = step_of(learner, torch.from_numpy(actions), signal, np.zeros(20, dtype=bool), 0.0)
        advantage = np.full(20, sign / sqrt(19))
        advantage[0] = -3.0 * sign
        slope = (one_hot(actions) - PROBABILITIES) / 2
        assert step == pytest.approx((advantage[:, None, None] * slope).mean(axis=0))


def test_reinforce_that_drops_failures_learns_from_the_rest_alone():
    failed = np.array([False, True, False, False])
    signal = np.array([1.0, 50.0, 1.25, 2.0])
    dropping, learner = stepped(Reinforce, 1.5, drop_failures_after=0), stepped(Reinforce, 1.5)
    step, figures = step_of(dropping, torch.from_numpy(ACTIONS), signal, failed, 0.3)
    rest = torch.from_numpy(ACTIONS[~failed])
    expected, _ = step_of(learner, rest, signal[~failed], np.zeros(3, dtype=bool), 0.3)
    assert step == pytest.approx(expected)
    assert figures["failed"] == 0.25
    assert dropping.baseline == pytest.approx(0.9 * 1.5 + 0.1 * 4.25 / 3)


# PPO


def ppo_figures(penalty=1.0, target=1.0):
    """A learner that makes no step, and the figures of its policy."""
    learner = Ppo(Table(), epochs=0, target_kl=target, penalty=penalty)
    actions = torch.from_numpy(ACTIONS)
    old = torch.from_numpy(np.log(OLD)).expand(4, -1, -1)
    return learner, learner.update(actions, old, torch.tensor([1.0, -2.0, 0.5, 0.25]), 0.0)


def test_the_figures_of_ppo_are_those_of_a_worked_example():
    # Ratios of new to old, by sample: (0.5 / 0.4, 0.625 / 0.5), (0.25 / 0.2, 0.125 / 0.2), ...
    ratio = np.array([[1.25, 1.25], [1.25, 0.625], [1.25, 0.25 / 0.3], [0.625, 1.25]])
    gain = np.array([1.0, -2.0, 0.5, 0.25])[:, None] * ratio
    kl = [
        0.4 * log(0.8) + 0.4 * log(1.6) + 0.2 * log(0.8),
        0.2 * log(1.6) + 0.5 * log(0.8) + 0.3 * log(1.2),
    ]
    _, figures = ppo_figures(penalty=3.0)
    assert figures["surrogate"] == pytest.approx(gain.mean())
    assert figures["kl"] == pytest.approx(np.mean(kl))
    assert figures["kl_of_worst_stage"] == pytest.approx(max(kl))
    assert figures["penalty"] == 3.0
    assert figures["surrogate_less_penalty"] == pytest.approx(gain.mean() - 3.0 * np.mean(kl))
    bound = gain.sum(axis=1).mean() - 2.0 * 2 * (2 - 1) * max(kl)
    assert figures["guaranteed"] == pytest.approx(bound)
    assert figures["entropy"] == pytest.approx(entropy_of(OLD).mean())


def test_the_guarantee_takes_off_advantage_times_stages_times_divergence():
    assert guarantee(2.0, 0.01, 3.0, 4) == pytest.approx(2.0 - 3.0 * 4 * 3 * 0.01)


def test_ppo_climbs_the_surrogate_less_its_penalty():
    learner = stepped(Ppo, epochs=1, penalty=0.7)
    advantage = np.array([1.0, -2.0, 0.5, 0.25])
    old = torch.from_numpy(np.log(OLD)).expand(4, -1, -1)
    step, _ = step_of(learner, torch.from_numpy(ACTIONS), old, torch.from_numpy(advantage), 0.3)
    rows = np.arange(2)
    ratio = PROBABILITIES[rows, ACTIONS] / OLD[rows, ACTIONS]
    weight = (advantage[:, None] * ratio)[..., None]
    gain = (weight * (one_hot(ACTIONS) - PROBABILITIES)).mean(axis=0) / 2
    divergence = (PROBABILITIES - OLD) / 2  # the gradient of KL(old, new) is new - old
    expected = gain - 0.7 * divergence + 0.3 * slope_of_entropy(PROBABILITIES)
    assert step == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "penalty", "becomes"),
    [
        (1.51, 4.0, 8.0),
        (1.49, 4.0, 4.0),
        (1 / 1.49, 4.0, 4.0),
        (1 / 1.51, 4.0, 2.0),
        (2.0, 600.0, 1000.0),
        (0.5, 1.5e-4, 1e-4),
    ],
)
def test_the_penalty_of_ppo_doubles_or_halves_beyond_half_off_its_target(share, penalty, becomes):
    divergence = ppo_figures()[1]["kl"]
    learner, figures = ppo_figures(penalty, divergence / share)
    assert figures["penalty"] == penalty  # of this update
    assert learner.penalty == becomes


def test_the_penalty_of_ppo_stays_where_the_divergence_is_at_its_limit():
    learner = Ppo(Table(), epochs=0, target_kl=0.0)
    actions = torch.from_numpy(ACTIONS)
    with torch.no_grad():
        old = learner.policy.log_probs(actions)
    assert learner.update(actions, old, torch.ones(4), 0.0)["kl"] == 0.0
    assert learner.penalty == 1.0


# Episodes


def test_returns_are_discounted_sums_to_the_end():
    reward = np.array([[1.0, 0.0], [2.0, 4.0], [8.0, -16.0]])
    expected = [
        [1 + 0.5 * 2 + 0.25 * 8, 0.5 * 4 - 0.25 * 16],
        [2 + 0.5 * 8, 4 - 0.5 * 16],
        [8, -16],
    ]
    assert returns(reward, 0.5).tolist() == expected


def test_the_baseline_of_a_step_is_the_mean_of_the_last_rounds():
    baseline = StepBaseline(3, 3)
    for value in (100.0, 3.0, 4.0, 8.0):  # the first is forgotten
        baseline.add(np.array([0, 2]), np.array([[value, value + 2], [10 * value, 10 * value]]))
    assert baseline.at(np.arange(3)).tolist() == [6.0, 0.0, 50.0]
    baseline.add(np.array([1]), np.array([[7.0, 9.0]]))
    assert baseline.at(np.arange(3)).tolist() == [6.0, 8.0, 50.0]


def episode_update(update, advantage, weight=0.0, rate=1.0, parts=(slice(0, 1), slice(1, 4))):
    """Update a table from steps whose old probabilities are `OLD`; give the change of the logits."""
    table = Table()
    chosen = ACTIONS[:, :1]  # [steps, episodes]: one episode, all steps in stage 0
    before = np.log(OLD[0][chosen])
    steps = EpisodeSteps.of(chosen, before, np.array(advantage)[:, None], torch.device("cpu"))

    def score(part):
        return torch.log_softmax(table.logits[0], dim=-1).expand(4, 1, 3)[part]

    optimizer = torch.optim.SGD(table.parameters(), rate)
    figures = update.apply(optimizer, score, parts, steps, weight)
    return (table.logits.detach()[0] - torch.from_numpy(np.log(PROBABILITIES[0]))).numpy(), figures


def test_one_pass_over_episodes_is_reinforce():
    advantage = np.array([1.0, -2.0, 0.5, 0.25])
    step, figures = episode_update(PolicyUpdate(), advantage, 0.3)
    p, chosen = PROBABILITIES[0], ACTIONS[:, 0]
    expected = (advantage[:, None] * (np.eye(3)[chosen] - p)).mean(axis=0)
    expected += 0.3 * slope_of_entropy(p[None])[0]
    entropy = float(entropy_of(p)[0])
    assert step == pytest.approx(expected, rel=1e-5)
    assert figures["norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-5)
    assert figures["entropy"] == pytest.approx(entropy)
    gain = (advantage * np.log(p[chosen])).mean()
    assert figures["loss"] == pytest.approx(-(gain + 0.3 * entropy))
    ratio = p[chosen] / OLD[0][chosen]
    assert figures["kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-5)


def test_several_passes_clip_the_ratio_where_it_would_gain():
    # Ratios are 1.25, 1.25, 1.25 and 0.625.
    _, figures = episode_update(PolicyUpdate(passes=2), [1.0, -2.0, 0.5, 0.25], rate=0.0)
    assert figures["loss"] == pytest.approx(-(1.2 - 2 * 1.25 + 0.5 * 1.2 + 0.25 * 0.625) / 4)
    _, figures = episode_update(PolicyUpdate(passes=2), [-1.0, 2.0, -0.5, -0.25], rate=0.0)
    assert figures["loss"] == pytest.approx(-(-1.25 + 2 * 1.2 - 0.5 * 1.25 - 0.25 * 0.8) / 4)


def test_a_step_over_episodes_is_no_longer_than_its_norm():
    step, figures = episode_update(PolicyUpdate(), [100.0, -200.0, 50.0, 25.0])
    assert figures["norm"] > 1.25
    assert np.linalg.norm(step) == pytest.approx(1.25, rel=1e-4)


def test_a_broken_loss_makes_no_step():
    step, figures = episode_update(PolicyUpdate(), [np.inf, -2.0, 0.5, 0.25])
    assert not np.isfinite(figures["norm"])
    assert not step.any()


def test_no_pass_changes_nothing():
    step, figures = episode_update(PolicyUpdate(passes=0), [1.0, -2.0, 0.5, 0.25])
    assert not step.any()
    assert figures == {"loss": 0.0, "entropy": 0.0, "kl": 0.0, "norm": 0.0}


def test_a_divergence_as_large_as_it_may_be_is_no_reason_to_stop():
    logits = torch.nn.Parameter(torch.zeros(2))
    logs = np.full((1, 1), torch.log_softmax(logits, dim=-1)[0].item())
    steps = EpisodeSteps.of(np.zeros((1, 1), int), logs, np.ones((1, 1)), torch.device("cpu"))
    figures = PolicyUpdate(most_kl=0.0).apply(
        torch.optim.SGD([logits], 1.0),
        lambda part: torch.log_softmax(logits, dim=-1).expand(1, 1, 2),
        [slice(0, 1)],
        steps,
        0.0,
    )
    assert figures["kl"] == 0.0
    assert logits.tolist() == [0.5, -0.5]


# Recorded decisions


def decisions(table):
    """A policy over rows, which are the stages of a table."""

    def policy(rows):
        return torch.log_softmax(table.logits, dim=-1)

    return policy, torch.optim.SGD(table.parameters(), 1.0)


def test_imitation_climbs_the_log_probability_of_the_labels():
    table = Table()
    policy, optimizer = decisions(table)
    assert imitate(policy, optimizer, None, torch.tensor([-1, -1])) == 0.0
    loss = imitate(policy, optimizer, None, torch.tensor([-1, 0]))
    assert loss == pytest.approx(log(8))
    change = table.logits.detach().numpy() - np.log(PROBABILITIES)
    slope = np.array([[0, 0, 0], [0.875, -0.625, -0.25]])  # its norm is above 1
    assert change == pytest.approx(slope / np.linalg.norm(slope), rel=1e-5)
    both = imitate(*decisions(Table()), None, torch.tensor([1, 0]))
    assert both == pytest.approx((log(4) + log(8)) / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_recorded_decisions_climb_the_clipped_surrogate(sign):
    """Of two problems; autograd has the slope, and the loss is worked out by hand."""
    table = Table()
    policy, optimizer = decisions(table)
    rows = SimpleNamespace(choice=torch.tensor([0, 0]))  # p = 1/2, 1/8
    advantage = sign * torch.tensor([0.2, 0.4], dtype=torch.float64)
    first = torch.log(torch.tensor([0.25, 0.25], dtype=torch.float64))  # ratios 2 and 1/2
    second = torch.log(torch.tensor([0.5, 0.125], dtype=torch.float64))  # ratios 1 and 1
    batches = [(rows, first, advantage), (rows, second, advantage)]
    figures = clipped(policy, optimizer, batches, 0.1)
    clip = (0.2 * 1.25 + 0.4 * 0.5) if sign > 0 else -(0.2 * 2 + 0.4 * 0.8)
    entropy = float(entropy_of(PROBABILITIES).mean())
    gain = (clip / 2 + sign * 0.3) / 2
    assert figures["loss"] == pytest.approx(-(gain + 0.1 * entropy))
    assert figures["entropy"] == pytest.approx(entropy)
    assert figures["change"] == pytest.approx((1.5 / 2 + 0) / 2)  # |2 - 1| and |1/2 - 1|
    p = PROBABILITIES
    slope = np.eye(3)[[0, 0]] - p
    # Clipped: ratio 2 with a gain, ratio 1/2 with a loss.
    weight = [0.0, 0.4 * 0.5] if sign > 0 else [-0.2 * 2, 0.0]
    weight = np.array(weight) + sign * np.array([0.2, 0.4])
    expected = weight[:, None] * slope / 4 + 0.1 * slope_of_entropy(p)
    change = table.logits.detach().numpy() - np.log(p)
    assert change == pytest.approx(expected)
    assert figures["norm"] == pytest.approx(np.linalg.norm(expected))


def test_a_ratio_of_recorded_decisions_is_at_most_e_to_the_10():
    rows = SimpleNamespace(choice=torch.tensor([0, 0]))
    before = torch.log(torch.tensor([0.5 * e**-30, 0.125 * e**30], dtype=torch.float64))
    advantage = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    figures = clipped(*decisions(Table()), [(rows, before, advantage)], 0.0)
    assert figures["loss"] == pytest.approx(e**10 / 2)
    assert figures["change"] == pytest.approx((e**10 - 1 + 1 - e**-10) / 2)


def test_advantages_of_single_schedules_are_standardised_gains():
    cost = np.array([1.0, 2.0, 3.0, 6.0])
    assert advantages(cost, 1) == pytest.approx((3.0 - cost) / sqrt(3.5))
    assert not advantages(1.0 + 1e-10 * cost, 1).any()  # they count as equal


# Rewards


def test_a_placement_that_fails_costs_2_to_12_times_a_slow_one():
    step_time = np.array([3.0, 1.0, 12.0, np.nan, np.inf])
    excess = np.array([0.0, 0.1, 0.5, 0.0, 0.7])
    expected = [3.0, 10 * (2 + 10 * 0.1), 12 * (2 + 10 * 0.5), 10 * (2 + 10), 10 * (2 + 10)]
    assert penalised(step_time, excess, 10.0) == pytest.approx(expected)


def test_standardised_rewards_are_deviations_from_the_mean():
    rewards = np.array([1.0, 2.0, 3.0, 6.0])
    assert standardised(rewards) == pytest.approx((rewards - 3.0) / sqrt(3.5))
    assert standardised(rewards, most=0.5).tolist() == [-0.5, -0.5, 0.0, 0.5]
    far = np.zeros(20)
    far[0] = -1.0
    assert standardised(far).min() == -3.0


def test_rewards_whose_deviation_is_tiny_are_no_advantage():
    assert standardised(np.array([1.0, 3.0]), 0.99).tolist() == [-1.0, 1.0]
    assert standardised(np.array([1.0, 3.0]), 1.0).tolist() == [0.0, 0.0]  # not above it
    assert standardised(np.array([-1e6, -1e6 - 1e-7])).tolist() == [0.0, 0.0]
    assert standardised(np.array([1.0, 1.0 + 1e-8])) == pytest.approx([-1.0, 1.0], rel=1e-5)
    assert standardised(np.array([0.0, 1e-20])).tolist() == [-1.0, 1.0]
    assert standardised(np.zeros(2)).tolist() == [0.0, 0.0]


# Tables of softmaxes


def new_table():
    """The table above, with the third choice of stage 1 closed: there it is 1/6, 5/6, 0."""
    allowed = np.array([[True, True, True], [True, True, False]])
    return Softmaxes(np.log(PROBABILITIES), allowed)


def test_a_softmax_gives_the_closed_choices_nothing():
    expected = [[0.5, 0.25, 0.25], [1 / 6, 5 / 6, 0.0]]
    assert new_table().probabilities == pytest.approx(np.array(expected))
    entropy = (1.5 * log(2) + log(6) / 6 + 5 / 6 * log(1.2)) / 2
    assert new_table().entropy == pytest.approx(entropy)


def test_a_softmax_of_large_logits_is_finite():
    table = Softmaxes(np.array([[1000.0, 1000.0], [-1000.0, 1000.0]]), np.ones((2, 2), bool))
    assert table.probabilities.tolist() == [[0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize("clip", [0.02, 10.0])
def test_steps_of_a_table_follow_autograd(clip):
    table, actions = new_table(), np.array([[0, 1], [2, 0], [0, 0], [1, 1]])
    advantage = np.array([1.0, -2.0, 0.5, 0.25])
    old = table.probabilities
    logits = torch.tensor(table.logits, requires_grad=True)
    closed = torch.from_numpy(~table.allowed)
    picked = torch.from_numpy(actions).unsqueeze(-1)

    def now():
        return torch.log_softmax(logits.masked_fill(closed, -torch.inf), dim=-1)

    def chosen():
        return now().expand(4, -1, -1).gather(-1, picked).squeeze(-1)

    before = chosen().detach()
    gains = torch.from_numpy(advantage)[:, None]
    for _ in range(3):
        ratio = (chosen() - before).exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        surrogate = torch.minimum(ratio * gains, bounded * gains).sum(dim=1).mean()
        (slope,) = torch.autograd.grad(surrogate, logits)
        logits.data += 0.1 * slope
    divergence = table.improve(actions, advantage, steps=3, rate=0.1, clip=clip)
    new = now().detach().exp().numpy()
    assert table.probabilities == pytest.approx(new)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.nan_to_num(old * np.log(old / new))
    assert divergence == pytest.approx(terms.sum(axis=1).mean())
    assert divergence > 0


def test_a_ratio_at_its_limit_is_not_clipped_yet():
    for advantage in (1.0, -1.0):
        table = Softmaxes(np.zeros((1, 2)), np.ones((1, 2), bool))
        table.improve(np.array([[0]]), np.array([advantage]), steps=1, rate=1.0, clip=0.0)
        assert table.logits.tolist() == [[advantage / 2, -advantage / 2]]


def test_a_refit_goes_a_part_of_the_way_to_the_frequencies():
    table = new_table()
    elite = np.array([[0, 0], [0, 1], [2, 0], [0, 0]])
    table.refit(elite, step=0.3, mix=0.1)
    frequency = np.array([[0.75, 0.0, 0.25], [0.75, 0.25, 0.0]])
    before = np.array([[0.5, 0.25, 0.25], [1 / 6, 5 / 6, 0.0]])
    equal = np.array([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    expected = 0.9 * (0.7 * before + 0.3 * frequency) + 0.1 * equal
    assert table.probabilities == pytest.approx(expected)


# What they share


def test_the_mean_entropy_and_its_slope():
    logits = torch.tensor(np.log(PROBABILITIES), requires_grad=True)
    entropy = mean_entropy(torch.log_softmax(logits, dim=-1))
    assert entropy.item() == pytest.approx(entropy_of(PROBABILITIES).mean())
    entropy.backward()
    assert logits.grad.numpy() == pytest.approx(slope_of_entropy(PROBABILITIES))


def test_a_closed_choice_adds_no_entropy():
    assert mean_entropy(torch.tensor([[log(0.5), log(0.5), -1e9]])).item() == pytest.approx(log(2))


def test_log_probabilities_of_actions():
    logs = torch.from_numpy(PROBABILITIES)
    assert log_probs_of(torch.tensor([2, 1]), logs).tolist() == [0.25, 0.625]


def test_gradients_are_clipped_to_their_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    weight.grad = torch.full((2,), 9.0)  # of an earlier step
    assert clipped_gradients(optimizer, 3 * weight[0] + 4 * weight[1], 1.0) == pytest.approx(5.0)
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-4)
    assert clip_norm(optimizer, 10.0) == pytest.approx(1.0, rel=1e-4)
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-4)
