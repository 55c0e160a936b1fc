"""The plain environment: it is what Gymnasium expects, and plays by the rules."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from games import diamond, lone, play
from gymnasium.utils.env_checker import check_env

import roost
import roost.environments
from roost.environments._grouped_problem import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    GROUP_FEATURES,
    LINK_FEATURES,
)
from roost.environments._observation import Sizes
from roost.environments.placement import PlacementEnvironment
from roost.errors import InputError, UnknownName
from roost.placers.toolkit import fastest_allowed, groups_of
from roost.testing.problems import training_like
from support.nasty import nasty

MODES = ("group_by_group", "move_by_move")
PROBLEMS = {
    "alike": [training_like(60, 4)],
    "forbidden": [diamond()],
    "lone": [lone()],
    "unlike": [diamond(), lone(), training_like(40, 5), nasty(3)[0]],
}


def make(*problems, **settings):
    return gymnasium.make("roost/Placement-v0", problems=problems, **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gymnasium_finds_nothing_wrong(name, mode):
    env = make(*PROBLEMS[name], mode=mode, groups=20, max_groups=80, render_mode="ansi")
    check_env(env.unwrapped)  # a warning is an error here


@pytest.mark.parametrize("mode", MODES)
def test_observations_lie_in_their_space_whatever_the_problem(mode):
    problems = [nasty(seed)[0] for seed in range(12)]
    env = make(*problems, mode=mode, groups=12, memory_penalty=1e6).unwrapped
    for number in range(len(problems)):
        seen, rewards, info = play(env, number, options={"problem": number})
        assert info["problem"] == number
        alone = make(problems[number], groups=12).unwrapped.reset()[0]
        for key in (
            "groups",
            "time",
            "edges",
            "edge_features",
            "links",
            "group_mask",
            "edge_mask",
            "device_mask",
        ):
            part = alone[key]
            assert (seen[-1][key][tuple(slice(0, size) for size in part.shape)] == part).all()
            assert seen[-1][key].sum() == pytest.approx(part.sum(), rel=1e-5)
        assert np.isfinite(rewards).all()
        for observation in seen:
            assert observation in env.observation_space
            assert all(np.isfinite(part).all() for part in observation.values())


def test_features_have_the_sizes_that_their_names_say():
    env = make(training_like(40, 3), groups=10)
    shapes = {key: space.shape for key, space in env.observation_space.items()}
    assert shapes["groups"][1] == len(GROUP_FEATURES)
    assert shapes["edge_features"][1] == len(EDGE_FEATURES)
    assert shapes["devices"] == (3, len(DEVICE_FEATURES))
    assert shapes["links"] == (3, 3, len(LINK_FEATURES))


def test_features_tell_groups_and_devices_apart():
    env = make(diamond()).unwrapped
    observation, _ = env.reset(seed=0)
    units = groups_of(diamond(), 100)
    heavy = units.resident_bytes > 0
    assert heavy.any()
    assert not heavy.all()
    parameters = observation["groups"][:, GROUP_FEATURES.index("parameters")]
    assert (parameters[heavy] > 0.5).all()
    assert (parameters[~heavy] == 0).all()
    speed, memory = (
        observation["devices"][:, DEVICE_FEATURES.index(what)] for what in ("speed", "memory")
    )
    assert speed[0] < speed[1] == speed[2] == 1.0
    assert memory[0] == 1.0 > memory[1]
    assert (observation["time"][:, 0] > observation["time"][:, 1]).all()
    source, target, _ = units.edges
    assert observation["edges"].tolist() == np.stack([source, target], axis=1).tolist()


def test_groups_that_are_not_placed_yet_are_absent():
    problem = training_like(40, 3)
    units = groups_of(problem, 10)
    count, room = units.num_units, units.num_units + 4
    env = make(problem, groups=10, max_groups=room).unwrapped
    seen, rewards, info = play(env, 1)
    assert len(rewards) == count
    for step, observation in enumerate(seen):
        assert observation["placement"].sum(axis=1).tolist() == [1] * step + [0] * (room - step)
        assert observation["visited"].tolist() == [1] * step + [0] * (room - step)
        assert observation["group_mask"].tolist() == [1] * count + [0] * 4
        assert observation["current_group"] == min(step, count - 1)
        assert observation["progress"] == pytest.approx(step / count)
    assert rewards[:-1] == [0.0] * (count - 1)
    assert (
        units.devices(seen[-1]["placement"].argmax(axis=1)[:count]) == info["placement"].device
    ).all()


def test_devices_show_what_is_on_them():
    env = make(training_like(40, 3), groups=10, mode="move_by_move", sweeps=3).unwrapped
    busy, held = DEVICE_FEATURES.index("busy"), DEVICE_FEATURES.index("held")
    # All to device 0.
    seen, _, _ = play(env, 4, policy=lambda observation: (observation["current_group"] * 2) % 2)
    assert (seen[0]["devices"][:, busy] > 0).all()
    # As the reference, which is one device too.
    assert seen[-1]["devices"][0, busy] == pytest.approx(0.5)
    assert seen[-1]["devices"][1:, [busy, held]] == pytest.approx(0.0, abs=1e-12)
    need = seen[-1]["devices"][0, DEVICE_FEATURES.index("need")]
    assert seen[-1]["devices"][0, held] == pytest.approx(need)


def best_single(problem, groups, order):
    """The shortest step of all groups on one device, as the simulator has it."""
    units = groups_of(problem, groups)
    found = []
    for device in range(problem.cluster.num_devices):
        wish = fastest_allowed(units, np.full(units.num_units, device))
        found.append(roost.simulate(problem, roost.Placement(units.devices(wish), order)))
    return min(step.step_time for step in found if step.feasible)


@pytest.mark.parametrize("order", ["program", "rank", "fifo"])
def test_the_reward_is_minus_the_root_of_the_step_time_over_that_of_the_best_device(order):
    problem = training_like(60, 4)
    env = make(problem, groups=10, order=order).unwrapped
    _, rewards, info = play(env, 5)
    step = roost.simulate(problem, info["placement"])
    assert info["placement"].order == order
    assert info["step_time"] == step.step_time
    assert info["feasible"]
    assert rewards[-1] == pytest.approx(-np.sqrt(step.step_time / best_single(problem, 10, order)))


def test_the_best_device_is_one_that_fits():
    problem = diamond(memory=300, width=6)  # on a GPU alone: faster, and too large
    units = groups_of(problem, 100)
    on_gpu = units.devices(fastest_allowed(units, np.full(units.num_units, 1)))
    assert not roost.simulate(problem, roost.Placement(on_gpu, "rank")).feasible
    env = make(problem, mode="move_by_move", start="single").unwrapped
    _, info = env.reset()
    assert info["feasible"]
    assert info["step_time"] == best_single(problem, 100, "rank")


def test_moves_are_rewarded_by_what_they_take_off_the_cost():
    problem = training_like(60, 4)
    env = make(problem, groups=10, mode="move_by_move", sweeps=2).unwrapped
    reference = best_single(problem, 10, "rank")
    _, info = env.reset(seed=3)
    assert roost.simulate(problem, env.placement).step_time == info["step_time"]
    before, seen = info["step_time"], set()
    count = groups_of(problem, 10).num_units
    for step in range(2 * count):
        observation, reward, done, _, info = env.step((step * 7) % 4)
        after = info["step_time"]
        assert after == roost.simulate(problem, env.placement).step_time
        assert reward == pytest.approx(np.sqrt(before / reference) - np.sqrt(after / reference))
        before = after
        seen.add(reward > 0)
        assert done == (step == 2 * count - 1)
    assert seen == {True, False}
    assert observation["placement"].sum() == count


def test_a_placement_that_does_not_fit_costs_more_the_less_of_it_fits():
    problem = diamond(memory=500, width=6)  # a GPU holds one or two branches
    env = make(problem, memory_penalty=2.0).unwrapped
    mask = env.reset()[0]["group_mask"].sum()

    def crowded(count):
        """So many groups on the first GPU, where they may go there; the others on the CPU."""
        return play(
            env,
            0,
            policy=lambda seen: int(seen["current_group"] < count and seen["action_mask"][1]),
        )

    by_count = [crowded(count) for count in range(mask + 1)]
    missing = [info["missing_bytes"] for _, _, info in by_count]
    assert missing[0] == 0 < missing[3] < missing[5]
    for _, rewards, info in by_count:
        step = roost.simulate(problem, info["placement"])
        assert info["missing_bytes"] == step.missing.sum()
        assert info["feasible"] == step.feasible == (info["missing_bytes"] == 0)
        over = -rewards[-1] - np.sqrt(step.step_time / env._episodes.problems[0].reference)
        share = step.missing.sum() / step.peak_memory.sum()
        assert over == pytest.approx(0 if step.feasible else 2.0 + 2.0 * share)


def test_a_group_goes_to_its_fastest_device_where_it_may_not_go_at_a_penalty():
    env = make(diamond(), forbidden_penalty=0.25).unwrapped
    seen, rewards, info = play(env, 0, policy=lambda _: 1)
    forbidden = [observation["action_mask"][1] == 0 for observation in seen[:-1]]
    assert sum(forbidden) == 1
    assert rewards[:-1] == [-0.25 if no else 0.0 for no in forbidden[:-1]]
    assert info["placement"].device[-1] == 0
    assert rewards[-1] == pytest.approx(
        -np.sqrt(info["step_time"] / env._episodes.problems[0].reference) - 0.25
    )


def test_a_padded_device_may_not_be_chosen():
    env = make(diamond(), max_devices=8).unwrapped
    observation, info = env.reset()
    assert observation["action_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert info["action_mask"].tolist() == observation["action_mask"].tolist()
    assert not np.shares_memory(info["action_mask"], observation["action_mask"])
    assert env.action_masks().tolist() == [bool(one) for one in info["action_mask"]]
    observation, reward, *_ = env.step(7)
    assert observation["placement"][0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert reward == -0.1


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_episodes(mode):
    problems = [training_like(40, 4, seed) for seed in range(4)]

    def episodes(seed):
        env = make(*problems, mode=mode, groups=8)
        found = [env.reset(seed=seed), *(env.reset() for _ in range(5))]
        return [
            (info["problem"], observation["placement"].tobytes()) for observation, info in found
        ]

    assert episodes(7) == episodes(7)
    assert episodes(7) != episodes(8)
    assert len({number for number, _ in episodes(7)}) > 1


def test_moves_start_where_they_are_told():
    problem = training_like(60, 4)
    env = make(problem, groups=10, mode="move_by_move", start="single").unwrapped
    _, info = env.reset()
    assert info["step_time"] == best_single(problem, 10, "rank")
    better = roost.solve(problem, "heft", trials=8, seed=0).best.placement
    env.reset(options={"placement": better})
    assert len(set(env.placement.device.tolist())) > 1
    units = groups_of(problem, 10)
    assert (env.placement.device == units.devices(better.device[units.leader])).all()


def test_a_placement_is_there_once_it_is_complete():
    env = make(diamond()).unwrapped
    env.reset()
    assert env.placement is None
    env.step(1)
    assert env.placement is None
    _, _, info = play(env, 0)
    assert env.placement == info["placement"]
    assert info["placement"].graph == env.problem.graph.digest


def test_graphs_and_clusters_may_be_names_and_paths(tmp_path):
    problem = roost.estimate(diamond().graph, "k80x2")
    problem.graph.save(tmp_path / "graph.json")
    problem.cluster.save(tmp_path / "cluster.toml")
    problem.save(tmp_path / "problem.json")
    ident = "roost/Placement-v0"
    by_paths = gymnasium.make(
        ident, graph=tmp_path / "graph.json", cluster=str(tmp_path / "cluster.toml")
    ).unwrapped
    by_noun = gymnasium.make(ident, graph=problem.graph, cluster=problem.cluster).unwrapped
    assert by_paths.problem.digest == by_noun.problem.digest == problem.digest
    assert (
        gymnasium.make(ident, problem=str(tmp_path / "problem.json")).unwrapped.problem.digest
        == problem.digest
    )
    named = gymnasium.make(ident, graph="cifar10_cnn", cluster="k80x2").unwrapped.problem
    assert named.cluster.name == "k80x2"
    assert named.graph.name == "cifar10_cnn"


def test_an_environment_draws_itself():
    env = make(diamond(memory=300, width=6), render_mode="ansi").unwrapped
    assert "not reset" in env.render()
    env.reset(seed=0)
    assert "step 0 of" in env.render()
    play(env, 0, policy=lambda seen: int(seen["action_mask"][1]))
    first, header, *rows = env.render().splitlines()
    assert first.startswith("diamond on 3 devices: ")
    assert "do not fit" in first
    assert header.split() == ["device", "groups", "busy", "held", "memory"]
    assert [row.split()[0] for row in rows] == ["cpu:0", "cuda:0", "cuda:1"]
    moves = make(diamond(), mode="move_by_move", render_mode="ansi").unwrapped
    moves.reset(seed=0)
    assert "a step, fits" in moves.render()
    assert make(diamond()).unwrapped.render() is None


SOME = diamond()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "found none of them"),
        (
            {"problem": SOME, "graph": SOME.graph, "cluster": SOME.cluster},
            "found problem and graph",
        ),
        ({"graph": SOME.graph}, "go together"),
        ({"problem": SOME, "cluster": "k80x2"}, "go together"),
        ({"problem": SOME.graph}, "problem is a Graph; it must be a roost.Problem"),
        ({"problem": "no_such.json"}, "no_such.json"),
        ({"problems": []}, "at least one"),
        ({"problems": SOME}, "must be a list of problems"),
        ({"problems": [SOME, 3]}, r"problems\[1\] is a int"),
        ({"graph": 3, "cluster": "k80x2"}, "graph is a int"),
        ({"graph": "resnet5", "cluster": "k80x2"}, "did you mean 'resnet50'"),
        ({"graph": SOME.graph, "cluster": 3}, "cluster is a int"),
        ({"graph": SOME.graph, "cluster": "k80"}, "no preset called 'k80'"),
        (
            {"problem": SOME, "mode": "moves"},
            "mode is 'moves'; it must be one of group_by_group, move_by_move",
        ),
        ({"problem": SOME, "order": "priority"}, "order is 'priority'; it must be one of"),
        ({"problem": SOME, "start": "best"}, "start is 'best'; it must be one of"),
        ({"problem": SOME, "groups": 0}, "groups is 0"),
        ({"problem": SOME, "groups": None}, "groups is None"),
        ({"problem": SOME, "sweeps": 1.5}, "sweeps is 1.5"),
        ({"problem": SOME, "max_groups": True}, "max_groups is True"),
        ({"problem": SOME, "max_groups": 2}, "max_groups is 2: leave it out, or make it at least"),
        (
            {"problem": SOME, "max_groups": 10**9},
            "max_groups is 1000000000; it must be at most 10,000,000",
        ),
        ({"problem": SOME, "max_edges": 10**30}, "it must be at most 10,000,000"),
        ({"problem": SOME, "sweeps": 10**30}, "it must be at most 10,000,000"),
        (
            {"problem": SOME, "max_groups": 10**7, "max_devices": 10**7},
            "at most 8.0 GiB are allowed: make max_groups",
        ),
        ({"problem": SOME, "max_edges": 2}, "edges; max_edges is 2"),
        ({"problem": SOME, "max_devices": 2}, "has 3 devices; max_devices is 2"),
        ({"problem": SOME, "memory_penalty": float("nan")}, "memory_penalty is nan"),
        ({"problem": SOME, "memory_penalty": 10**400}, "memory_penalty is 10"),
        ({"problem": SOME, "memory_penalty": 1e308}, "memory_penalty is 1e.308"),
        ({"problem": SOME, "forbidden_penalty": True}, "forbidden_penalty is True"),
        ({"problem": SOME, "forbidden_penalty": -1}, "forbidden_penalty is -1"),
        ({"problem": SOME, "max_group": 3}, "did you mean 'max_groups'"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(roost.InputError, match=message):
        gymnasium.make("roost/Placement-v0", **given)


def test_a_setting_that_does_not_exist_is_an_unknown_name():
    with pytest.raises(UnknownName):
        PlacementEnvironment(SOME, ordr="rank")


def test_bad_calls_are_named():
    env = make(diamond()).unwrapped
    with pytest.raises(roost.InputError, match="was not reset"):
        env.step(0)
    with pytest.raises(roost.InputError, match="seed is -1"):
        env.reset(seed=-1)
    with pytest.raises(roost.InputError, match=r"seed is 1\.5"):
        env.reset(seed=1.5)
    for options, message in [
        (3, "options is a int"),
        ([], "options is a list"),
        ({"problme": 0}, "no option 'problme'"),
        ({"problem": 1}, "problems are 0 to 0"),
        ({"problem": "0"}, "option problem is '0'"),
        ({"placement": roost.Placement(np.zeros(10))}, "for mode 'move_by_move'"),
    ]:
        with pytest.raises(roost.InputError, match=message):
            env.reset(options=options)
    with pytest.raises(roost.InputError, match="was not reset"):
        env.step(0)
    env.reset(seed=0)
    for action, message in [
        (3, "devices are 0 to 2"),
        (-1, "device -1"),
        (0.5, r"0\.5"),
        ("cpu", "'cpu'"),
    ]:
        with pytest.raises(roost.InputError, match=message):
            env.step(action)
    play(env, 0)
    with pytest.raises(roost.InputError, match="has ended"):
        env.step(0)
    moving = make(diamond(), mode="move_by_move").unwrapped
    with pytest.raises(roost.InputError, match="the placement has 3 entries"):
        moving.reset(options={"placement": roost.Placement(np.zeros(3))})
    with pytest.raises(roost.InputError, match="render_mode 'human'"):
        PlacementEnvironment(SOME, render_mode="human")


def test_roost_alone_does_not_import_gymnasium():
    code = "import roost, roost.search.solve, sys; print('gymnasium' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_without_gymnasium_the_error_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None\nimport roost.environments"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert "MissingExtra: this needs gymnasium: pip install 'roost[gym]'" in found.stderr


def test_naming_the_module_registers_it():
    code = (
        "import gymnasium\nfrom roost.testing.problems import training_like\n"
        "print(gymnasium.make('roost.environments:roost/Placement-v0', problem=training_like(20, 2)).action_space)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "Discrete(2)"


def test_edges_count_in_the_size_of_an_observation():
    many = Sizes(groups=1, edges=10**7, devices=1)
    with pytest.raises(InputError, match=r"10,000,000 edges .* take about 8.2 GiB"):
        many._check_bytes(1, 10)
    many._check_bytes(1, 9)
