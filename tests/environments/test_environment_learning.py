"""An agent of Stable-Baselines3 learns to place."""

import gymnasium
import numpy as np
import pytest
from games import diamond, play

import roost.environments  # noqa: F401  registers the environment

MODES = ("group_by_group", "move_by_move")
EPISODES = 20
TRAIN_STEPS = 6_144


def step_times(env, policy=None):
    """Seconds of the placements that so many episodes end with."""
    return [play(env, seed, policy)[2]["step_time"] for seed in range(EPISODES)]


@pytest.fixture
def _one_thread():
    """The network is tiny: threads that wait for one another cost far more than they give."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("_one_thread")
def test_an_agent_ends_better_than_random_and_than_the_best_device(mode):
    from stable_baselines3 import PPO

    env, other = (
        gymnasium.make("roost/Placement-v0", problem=diamond(), mode=mode).unwrapped
        for _ in range(2)
    )
    agent = PPO(
        "MultiInputPolicy",
        env,
        n_steps=256,
        batch_size=64,
        gamma=1.0,
        ent_coef=0.01,
        seed=0,
        device="cpu",
    )
    agent.learn(TRAIN_STEPS)
    learned = step_times(other, lambda seen: agent.predict(seen, deterministic=True)[0])
    assert np.mean(learned) < 0.8 * np.mean(step_times(other))
    assert np.mean(learned) < other._episodes.problems[0].reference


@pytest.mark.slow
def test_stable_baselines_can_take_it():
    from stable_baselines3.common.env_checker import check_env

    for mode in MODES:
        env = gymnasium.make("roost/Placement-v0", problem=diamond(), mode=mode).unwrapped
        # It warns of every observation that is neither a vector nor an image.
        check_env(env, warn=False)
