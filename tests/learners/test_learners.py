"""The update rules: they learn what pays, keep what they promise, and go on exactly where they
were."""

import itertools

import numpy as np
import pytest
import torch

from roost.learners.ppo import Ppo, guarantee
from roost.learners.reinforce import Reinforce
from roost.learners.rewards import penalised, standardised
from roost.learners.softmaxes import Softmaxes
from roost.policies.seq2seq import Seq2Seq

STAGES, CHOICES = 3, 2


def new_policy(seed=0, spread=1.0):
    torch.manual_seed(seed)
    allowed = torch.ones(STAGES, CHOICES, dtype=torch.bool)
    return Seq2Seq(
        torch.rand(STAGES, 4),
        allowed,
        torch.zeros(STAGES, CHOICES),
        [-1] * CHOICES,
        8,
        spread=spread,
    )


ALL = torch.tensor(list(itertools.product(range(CHOICES), repeat=STAGES)))


def chosen(log_probs):
    return log_probs.gather(-1, ALL.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("seed", range(30))
def test_no_update_loses_more_than_the_guarantee_says(seed):
    """Every placement of three groups on two devices, so that all expectations are exact."""
    policy = new_policy(seed, spread=2.0)
    rng = np.random.default_rng(seed)
    reward = torch.from_numpy(rng.normal(size=len(ALL))).float()
    with torch.no_grad():
        old = policy.log_probs(ALL)
        for weights in policy.parameters():
            weights.add_(torch.randn_like(weights) * float(rng.choice([0.001, 0.01, 0.1, 0.5])))
        new = policy.log_probs(ALL)
    before, after = (chosen(some).sum(dim=1).exp() for some in (old, new))
    expected, becomes = float(before @ reward), float(after @ reward)
    ratio = (chosen(new) - chosen(old)).exp()
    surrogate = float((before.unsqueeze(1) * ratio * (reward - expected).unsqueeze(1)).sum())
    largest = float((old.exp() * (old - new)).sum(dim=-1).max())
    spread = float(reward.max() - reward.min())  # no stage's advantage is larger
    assert becomes - expected >= guarantee(surrogate, largest, spread, STAGES) - 1e-6
    assert becomes - expected <= surrogate + spread * STAGES * (STAGES - 1) * largest + 1e-6


def test_small_steps_along_the_surrogate_are_guaranteed_to_gain():
    policy = new_policy(3)
    reward = torch.from_numpy(np.random.default_rng(0).normal(size=len(ALL))).float()
    with torch.no_grad():
        old = policy.log_probs(ALL)
    before = chosen(old).sum(dim=1).exp()
    expected = before @ reward
    ratio = (chosen(policy.log_probs(ALL)) - chosen(old)).exp()
    (before.unsqueeze(1) * ratio * (reward - expected).unsqueeze(1)).sum().backward()
    with torch.no_grad():
        for weights in policy.parameters():
            weights.add_(1e-3 * weights.grad)
        new = policy.log_probs(ALL)
    ratio = (chosen(new) - chosen(old)).exp()
    surrogate = float((before.unsqueeze(1) * ratio * (reward - expected).unsqueeze(1)).sum())
    largest = float((old.exp() * (old - new)).sum(dim=-1).max())
    assert guarantee(surrogate, largest, float(reward.max() - reward.min()), STAGES) > 0


def expected_cost(policy):
    with torch.no_grad():
        return float(chosen(policy.log_probs(ALL)).sum(dim=1).exp() @ cost(ALL))


def cost(actions):
    return 1.0 + (actions != torch.tensor([1, 0, 1])).float().sum(dim=1)


def test_ppo_learns_what_pays_and_keeps_near_its_target():
    policy, generator = new_policy(spread=0.0), torch.Generator().manual_seed(0)
    learner = Ppo(policy, target_kl=0.01)
    begin, moved = expected_cost(policy), []
    for _ in range(120):
        actions, old = policy.sample(32, generator)
        advantage = torch.from_numpy(standardised(-cost(actions).numpy())).float()
        figures = learner.update(actions, old, advantage, 0.01)
        moved.append(figures["kl"])
        assert figures["surrogate_less_penalty"] <= figures["surrogate"] + 1e-6
        assert figures["guaranteed"] <= figures["surrogate"] * STAGES + 1e-6
        assert figures["kl_of_worst_stage"] >= figures["kl"] - 1e-9
    assert begin > 2.4
    assert expected_cost(policy) < 1.1
    assert 0.001 < np.mean(moved[:20]) < 0.05


def test_ppo_weighs_the_penalty_by_how_far_it_went():
    policy, generator = new_policy(spread=0.0), torch.Generator().manual_seed(0)
    for target, grows in ((1e-7, True), (10.0, False)):
        learner = Ppo(policy, target_kl=target)
        actions, old = policy.sample(32, generator)
        advantage = torch.from_numpy(standardised(-cost(actions).numpy())).float()
        learner.update(actions, old, advantage, 0.01)
        assert learner.penalty == (2.0 if grows else 0.5)


@pytest.mark.parametrize("standardise", [True, False])
def test_reinforce_learns_what_pays(standardise):
    policy, generator = new_policy(spread=0.0), torch.Generator().manual_seed(0)
    rate = 3e-3 if standardise else 3e-2
    learner = Reinforce(policy, 10.0, rate, standardise=standardise)
    begin = expected_cost(policy)
    for _ in range(300):
        actions, _ = policy.sample(16, generator)
        learner.update(actions, cost(actions).numpy().astype(float), np.zeros(16, dtype=bool), 0.0)
    assert begin > 2.4
    assert expected_cost(policy) < 1.2
    assert learner.baseline < 2.0  # it began at the failing signal


def test_reinforce_drops_what_fails_only_after_some_updates():
    policy, generator = new_policy(spread=0.0), torch.Generator().manual_seed(0)
    learner = Reinforce(policy, 10.0, drop_failures_after=2)
    actions, _ = policy.sample(8, generator)
    failed = np.ones(8, dtype=bool)
    for turn in range(4):
        before = [weights.detach().clone() for weights in policy.parameters()]
        learner.update(actions, np.linspace(1, 2, 8), failed, 0.0)
        same = all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
        assert same == (turn >= 2)


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_a_learner_goes_on_where_it_was(kind):
    def begin(policy):
        return Ppo(policy) if kind == "ppo" else Reinforce(policy, 10.0)

    def teach(learner, policy, generator):
        actions, old = policy.sample(16, generator)
        if kind == "ppo":
            advantage = torch.from_numpy(standardised(-cost(actions).numpy())).float()
            return learner.update(actions, old, advantage, 0.01)
        signal = cost(actions).numpy().astype(float)
        return learner.update(actions, signal, np.zeros(16, dtype=bool), 0.0)

    policy, generator = new_policy(), torch.Generator().manual_seed(1)
    learner = begin(policy)
    for _ in range(3):
        teach(learner, policy, generator)
    state = {name: np.array(value) for name, value in learner.state().items()}
    other, again = new_policy(), torch.Generator()
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(1.0)  # to be taken back
    again.set_state(generator.get_state())
    taken = begin(other)
    taken.restore(state)
    for _ in range(3):
        assert teach(learner, policy, generator) == teach(taken, other, again)


def test_what_does_not_fit_costs_more_than_all_that_does_and_the_more_the_more_is_missing():
    seconds = penalised(
        np.array([1.0, 9.0, 1.0, 1.0, np.nan]), np.array([0.0, 0.0, 0.1, 0.5, 0.0]), worst=10.0
    )
    assert seconds[:2].tolist() == [1.0, 9.0]
    assert 10.0 < seconds[2] < seconds[3] < seconds[4]


def test_equal_rewards_are_no_advantage():
    assert not standardised(np.full(5, 3.0)).any()
    assert standardised(np.array([0.0, 0.0, 0.0, 0.0, 100.0] * 30)).max() <= 3.0


def test_softmaxes_draw_what_they_say_and_only_what_is_allowed():
    allowed = np.array([[True, True, True], [True, False, True]])
    table = Softmaxes(np.log([[0.2, 0.3, 0.5], [0.25, 1.0, 0.75]]), allowed)
    drawn = table.sample(np.random.default_rng(0), 40_000)
    assert np.bincount(drawn[:, 0]) / 40_000 == pytest.approx([0.2, 0.3, 0.5], abs=0.01)
    assert np.bincount(drawn[:, 1], minlength=3) / 40_000 == pytest.approx(
        [0.25, 0.0, 0.75], abs=0.01
    )


def test_softmaxes_learn_by_steps_and_by_refits():
    for way in ("steps", "refits"):
        rng = np.random.default_rng(1)
        table = Softmaxes(np.zeros((3, 2)), np.ones((3, 2), dtype=bool))
        for _ in range(25):
            actions = table.sample(rng, 40)
            seconds = cost(torch.from_numpy(actions)).numpy()
            if way == "steps":
                assert (
                    table.improve(actions, standardised(-seconds), steps=10, rate=1.0, clip=0.2)
                    >= 0
                )
            else:
                table.refit(actions[np.argsort(seconds)[:8]], step=0.5, mix=0.01)
        assert (table.probabilities[[0, 1, 2], [1, 0, 1]] > 0.9).all()
        assert table.entropy < 0.4


def test_the_ratio_is_clipped():
    table = Softmaxes(np.zeros((1, 2)), np.ones((1, 2), dtype=bool))
    table.improve(np.array([[1]]), np.array([1.0]), steps=1000, rate=0.1, clip=0.2)
    assert table.probabilities[0, 1] == pytest.approx(0.6, abs=0.03)


def test_a_refit_mixes_with_equal_ones():
    table = Softmaxes(np.zeros((1, 3)), np.array([[True, True, False]]))
    table.refit(np.array([[0]] * 5), step=1.0, mix=0.2)
    assert table.probabilities[0] == pytest.approx([0.9, 0.1, 0.0], abs=1e-6)
