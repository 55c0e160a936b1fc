"""The vector environment equals as many plain ones, and simulates together what can be."""

import gymnasium
import numpy as np
import pytest
from games import diamond, lone
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

import roost
import roost.environments
from roost.environments.vector import VectorEnvironment
from roost.simulator.compiled import Simulator
from roost.testing.problems import training_like
from support.nasty import nasty

IDENT = "roost/Placement-v0"
MODES = ("group_by_group", "move_by_move")


def unlike():
    return [diamond(), lone(), training_like(40, 5), nasty(3)[0], diamond(memory=300, width=7)]


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert data_equivalence(one[key], other[key], exact=True), key


@pytest.mark.parametrize("autoreset", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_plain_environments_step_for_step(mode, autoreset):
    settings = {"problems": unlike(), "mode": mode, "groups": 12}
    count = 6
    native = gymnasium.make_vec(IDENT, num_envs=count, autoreset_mode=autoreset, **settings)
    plain = gymnasium.make_vec(
        IDENT,
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": autoreset},
        **settings,
    )
    assert isinstance(native, VectorEnvironment)
    assert native.observation_space == plain.observation_space
    assert native.action_space == plain.action_space
    assert native.metadata["autoreset_mode"] == plain.metadata["autoreset_mode"]
    rng = np.random.default_rng(0)
    for options in (None, {"problem": 2}):
        (seen, infos), (wanted, wanted_infos) = (
            env.reset(seed=11, options=options) for env in (native, plain)
        )
        same(seen, wanted)
        same(infos, wanted_infos)
        ended = 0
        for _ in range(60):
            actions = rng.integers(0, native.single_action_space.n, count)
            found, expected = native.step(actions), plain.step(actions)
            same(found[0], expected[0])
            assert found[0] in native.observation_space
            for mine, theirs in zip(found[1:4], expected[1:4], strict=True):
                assert mine.dtype == theirs.dtype
                assert mine.tolist() == theirs.tolist()
            same(found[4], expected[4])
            ended += found[2].sum()
        assert ended >= count


def test_what_was_given_out_does_not_change():
    env = VectorEnvironment(3, diamond(), mode="move_by_move")
    first, infos = env.reset(seed=0)
    before = {key: array.copy() for key, array in first.items()}
    mask = infos["action_mask"].copy()
    assert not np.shares_memory(infos["action_mask"], first["action_mask"])
    for _ in range(4):
        env.step(np.array([0, 1, 2]))
    same(first, before)
    assert (infos["action_mask"] == mask).all()


def test_placements_of_one_problem_are_simulated_in_one_call(monkeypatch):
    sizes = []
    evaluate = Simulator.evaluate

    def counted(self, devices, *rest, **more):
        sizes.append(len(devices))
        return evaluate(self, devices, *rest, **more)

    env = VectorEnvironment(32, training_like(40, 4), mode="move_by_move", groups=10)
    env.reset(seed=0)
    monkeypatch.setattr(Simulator, "evaluate", counted)
    env.step(np.arange(32) % 4)
    assert len(sizes) == 1
    assert 16 <= sizes[0] < 32  # what stays where it is need not be simulated


def test_the_end_of_an_episode_is_told():
    env = VectorEnvironment(2, diamond(), autoreset_mode="SameStep", render_mode="ansi")
    env.reset(seed=[5, None])
    ended = False
    while not ended:
        _, rewards, terminations, _, infos = env.step([0, 0])
        ended = terminations.all()
    final = infos["final_info"]
    assert final["feasible"].all()
    placement = final["placement"][1]
    assert roost.simulate(diamond(), placement).step_time == final["step_time"][1]
    assert rewards[1] < 0
    assert [text.split(":")[0] for text in env.render()] == ["diamond on 3 devices"] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"num_envs": True}, "num_envs is True"),
        ({"num_envs": 10**9}, "1,000,000,000 episodes, take about .* or num_envs smaller"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "known are NextStep and SameStep"),
        ({"autoreset_mode": "never"}, "autoreset_mode is 'never'"),
        ({"render_mode": "human"}, "render_mode 'human'"),
        ({"group": 4}, "did you mean 'groups'"),
    ],
)
def test_bad_settings_of_many_are_named(given, message):
    with pytest.raises(roost.InputError, match=message):
        VectorEnvironment(problem=diamond(), **given)


def test_bad_calls_of_many_are_named():
    env = VectorEnvironment(2, diamond())
    with pytest.raises(roost.InputError, match="was not reset"):
        env.step([0, 0])
    for seed, message in [
        (-3, "seed is -3"),
        (0.5, r"seed is 0\.5"),
        ([1], "1 entries for 2"),
        ([1, -1], "seed is -1"),
    ]:
        with pytest.raises(roost.InputError, match=message):
            env.reset(seed=seed)
    with pytest.raises(roost.InputError, match="no option 'seed'"):
        env.reset(seed=0, options={"seed": 3})
    with pytest.raises(roost.InputError, match="was not reset"):
        env.step([0, 0])
    env.reset()
    for actions, message in [
        ([0], "must be 2 devices"),
        ([0.0, 1.0], "whole numbers, not float64"),
        ([0, 3], "action 1 is device 3; devices are 0 to 2"),
        ([-1, 0], "action 0 is device -1"),
        ([[0], 1], "must be 2 devices"),
    ]:
        with pytest.raises(roost.InputError, match=message):
            env.step(actions)
