"""Placeto: episodes, settings, weights, and going on after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Result, Trial
from roost.errors import InputError
from roost.placers._placeto import training
from roost.placers._placeto.episodes import PlacetoEpisodes, anywhere
from roost.placers._placeto.features import DEVICE, ProblemFeatures, SimulatedPlacements
from roost.placers._placeto.learner import PlacetoLearner
from roost.placers._placeto.many_problems import simulated
from roost.placers._placeto.settings import SETTINGS, PlacetoSettings
from roost.placers._shared.units import Units
from roost.placers.placeto import Placeto
from roost.policies.weights import save_weights
from roost.search import evaluate
from roost.search.simulating import Simulating
from roost.search.solve import search
from roost.testing.problems import training_like
from roost.testing.tiny_problems import tiny_problem

SMALL_PAPER = replace(SETTINGS["paper"], episodes=3, rounds=2, most_groups=30)
SMALL = replace(SETTINGS["tuned"], episodes=8, most_groups=30)


def found(
    problem: Problem, setting: PlacetoSettings | str, trials: int = 300, seed: int = 0, **more: Any
) -> Result:
    return search(problem, Placeto(setting), trials=trials, seed=seed, prove=False, **more)


def begun(problem: Problem, settings: PlacetoSettings) -> PlacetoEpisodes:
    """Episodes before their first step."""
    episodes = PlacetoEpisodes(problem, settings, simulated(problem))
    training.begin(PlacetoLearner(settings, 0, 100), episodes, ())
    return episodes


@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
def test_a_fork_is_spread_and_a_slow_device_left_alone(setting: PlacetoSettings) -> None:
    # Of 20 seconds on one device.
    assert found(tiny_problem("fork_join"), setting).best.step_time < 12
    best = found(tiny_problem("unlike_devices"), setting).best
    assert best.feasible
    assert not (best.placement.device == 0).all()


@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
@pytest.mark.parametrize("name", ["one_device", "one_op", "only_parameters", "zeros"])
def test_where_there_is_little_to_choose_it_ends_with_an_answer(
    name: str, setting: PlacetoSettings
) -> None:
    assert found(tiny_problem(name), setting, trials=60).best.feasible


@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
def test_where_nothing_fits_it_comes_nearer(setting: PlacetoSettings) -> None:
    told: list[Mapping[str, float]] = []
    seen: list[Trial] = []
    result = found(
        tiny_problem("nothing_fits"),
        setting,
        on_note=told.append,
        on_trial=lambda p: seen.append(p.trial),
    )
    assert not result.best.feasible
    assert (
        result.best.missing_bytes
        == min(trial.missing_bytes for trial in seen)
        < seen[0].missing_bytes
    )
    assert all(np.isfinite(list(figures.values())).all() for figures in told)


class Broken(Simulating):
    """Devices that give no time for every third placement, or for all."""

    def __init__(self, problem: Problem, every: int) -> None:
        super().__init__(problem, 1)
        self.every, self.count = every, 0

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        done = super().trials(placements)
        for number, trial in enumerate(done):
            self.count += 1
            if self.count % self.every == 0:
                wrong = (np.nan, np.inf)[self.count % 2]
                done[number] = replace(trial, step_time=wrong, feasible=False, missing_bytes=1)
        return done


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
def test_trials_without_a_step_time_spoil_nothing(setting: PlacetoSettings, every: int) -> None:
    problem = training_like(60, 3)
    told: list[Mapping[str, float]] = []
    result = found(problem, setting, trials=200, source=Broken(problem, every), on_note=told.append)
    assert told
    assert all(np.isfinite(list(figures.values())).all() for figures in told)
    assert result.best.feasible == (every > 1)


@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
def test_equal_seeds_give_equal_curves_and_others_do_not(setting: PlacetoSettings) -> None:
    problem = training_like(60, 3)

    def curve(seed: int) -> list[float]:
        steps: list[float] = []
        found(problem, setting, 150, seed, on_trial=lambda p: steps.append(p.trial.step_time))
        return steps

    assert curve(1) == curve(1) != curve(2)


@pytest.mark.parametrize("setting", [SMALL, SMALL_PAPER])
def test_killed_and_resumed_it_comes_to_the_same_end(
    setting: PlacetoSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_SAVE_SECONDS", 0.0)
    problem, trials = training_like(60, 3), 240

    def run(path: Path, stop: int | None = None) -> Result:
        return found(
            problem, setting, trials, 5, journal=path, on_trial=lambda p: p.num_trials == stop
        )

    def tried(path: Path) -> list[str]:
        return [json.loads(line)["digest"] for line in path.read_text().splitlines()[1:]]

    unbroken = run(tmp_path / "unbroken.jsonl")
    for stop in (97, 171):
        run(tmp_path / "killed.jsonl", stop)
    assert list(tmp_path.glob("killed.jsonl.placeto.npz"))
    resumed = run(tmp_path / "killed.jsonl")
    assert tried(tmp_path / "killed.jsonl") == tried(tmp_path / "unbroken.jsonl")
    assert (resumed.best.step_time, resumed.num_trials) == (
        unbroken.best.step_time,
        unbroken.num_trials,
    )


def test_every_step_is_a_trial_and_improvements_add_up() -> None:
    problem = training_like(60, 3)
    episodes = begun(problem, SMALL_PAPER)
    before = episodes.cost(episodes.outcome)
    uniform = np.log(np.full((3, problem.cluster.num_devices), 1 / problem.cluster.num_devices))
    steps, trials = episodes.run(lambda _: uniform, np.random.default_rng(0), episodes.num_steps)
    assert len(trials) == episodes.num_steps
    assert [trial.num_new for trial in trials] == [3] * episodes.num_steps
    improvement = before - episodes.cost(episodes.outcome)
    np.testing.assert_allclose(sum(trial.reward for trial in trials), improvement)
    assert [step.input.group for step in steps] == episodes.features.visits.tolist()


def test_what_is_undone_leaves_the_better_placement() -> None:
    problem = training_like(60, 3)
    settings = SMALL.refine
    assert settings is not None
    settings = replace(settings, most_groups=30)
    episodes = PlacetoEpisodes(problem, settings, simulated(problem))
    rng = np.random.default_rng(0)
    episodes.begin(anywhere(episodes.units, rng, 4), rng)
    uniform = np.log(np.full((4, problem.cluster.num_devices), 1 / problem.cluster.num_devices))
    _, trials = episodes.run(lambda _: uniform, rng, 20)
    assert all((trial.lasting >= 0).all() for trial in trials)
    assert any((trial.reward < 0).any() for trial in trials)


def test_more_bytes_over_are_worse_and_all_values_finite() -> None:
    problem = tiny_problem("tight")
    episodes = PlacetoEpisodes(problem, SMALL, simulated(problem))
    peaks = [0.0] * problem.cluster.num_devices
    cost = episodes.cost(
        np.array([[0, 1, *peaks], [10, 1, *peaks], [20, 1, *peaks], [0, 0, *peaks]], dtype=float)
    )
    assert cost[0] < cost[1] < cost[2]
    assert np.isfinite(cost).all()


def test_features_of_devices_do_not_depend_on_their_numbers() -> None:
    problem = tiny_problem("unlike_devices")
    order = np.array([2, 0, 1])  # old numbers, in their new order
    cluster = replace(problem.cluster, devices=tuple(problem.cluster.devices[d] for d in order))
    turned = Problem(
        problem.graph, cluster, replace(problem.costs, op_time=problem.op_time[:, order])
    )
    new = np.argsort(order)
    rng = np.random.default_rng(0)
    plain, again = ProblemFeatures(Units.of(problem)), ProblemFeatures(Units.of(turned))
    groups = plain.num_groups
    place, times = anywhere(plain.units, rng, 4), rng.random((2, 4, groups))
    peak = rng.random((4, 3)) * 50
    one = SimulatedPlacements(place, times[0], times[0] + times[1], peak)
    other = SimulatedPlacements(new[place], times[0], times[0] + times[1], peak[:, order])
    for at in range(groups):
        features = plain.devices(one, at, place[:, 0])
        turned_features = again.devices(other, at, new[place[:, 0]])
        np.testing.assert_allclose(turned_features, features[..., order], rtol=1e-5, atol=1e-6)
        assert features.shape == (len(DEVICE), 4, 3)


class Kept:
    """A checkpoint in memory, that lets learning go so far only."""

    def __init__(self, most: int = 10**9) -> None:
        self.state: dict[str, Array] | None = None
        self.left = most

    def load(self) -> dict[str, Array] | None:
        return self.state

    def save(self, state: dict[str, Array]) -> None:
        self.state = {name: array.copy() for name, array in state.items()}
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_learning_over_problems_is_resumed_exactly_and_runs_on_other_machines(
    tmp_path: Path,
) -> None:
    problems = [training_like(60, 3), training_like(40, 2)]
    placer, told = Placeto(SMALL), []
    whole, card = placer.learn(problems, 1.0, 0, told.append, Kept())
    assert len(told) == card["rounds"] > 4
    checkpoint = Kept(3)
    with pytest.raises(KeyboardInterrupt):
        placer.learn(problems, 1.0, 0, told.append, checkpoint)
    again, _ = placer.learn(problems, 1.0, 0, told.append, checkpoint)
    assert all(np.array_equal(whole[name], again[name]) for name in whole)
    path = tmp_path / "policy.safetensors"
    save_weights(path, "placeto", whole, card)
    for problem in (training_like(50, 5), tiny_problem("one_device"), tiny_problem("kinds")):
        assert search(problem, Placeto(SMALL, str(path)), trials=40, prove=False).best.feasible


@pytest.mark.parametrize(
    "name", ["weight.score.weight", "adam.0.exp_avg", "baseline.1", "reached.{}", "done", "learned"]
)
def test_a_state_of_another_course_is_refused_by_name(name: str) -> None:
    problems = [training_like(60, 3), training_like(40, 2)]
    checkpoint = Kept(3)
    with pytest.raises(KeyboardInterrupt):
        Placeto(SMALL).learn(problems, 1.0, 0, lambda _: None, checkpoint)
    assert checkpoint.state is not None
    if name == "reached.{}":
        name = next(each for each in checkpoint.state if each.startswith("reached."))
    checkpoint.state[name] = checkpoint.state[name][None]
    with pytest.raises(InputError, match=f"the checkpoint: tensor '{name}' .*shape"):
        Placeto(SMALL).learn(problems, 1.0, 0, lambda _: None, checkpoint)


def test_weights_change_what_is_tried_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    problem, path = training_like(60, 3), tmp_path / "policy.safetensors"
    learner = PlacetoLearner(SMALL, 3, 100)
    tensors = {name: array + 0.1 for name, array in learner.weights.items()}
    save_weights(path, "placeto", tensors, {})
    taught = search(problem, Placeto(SMALL, str(path)), trials=60, prove=False)
    assert taught.best.placement != found(problem, SMALL, 60).best.placement
    del tensors["score.weight"]
    save_weights(path, "placeto", tensors, {})
    with pytest.raises(InputError, match=r"score\.weight"):
        search(problem, Placeto(SMALL, str(path)), trials=60, prove=False)


def test_weights_are_used_without_learning_where_that_is_wished_for(tmp_path: Path) -> None:
    problem, path = training_like(60, 3), tmp_path / "policy.safetensors"
    weights = PlacetoLearner(SMALL, 3, 100).weights
    save_weights(path, "placeto", {name: array + 0.1 for name, array in weights.items()}, {})
    told: list[Mapping[str, float]] = []
    placer = Placeto(SMALL, str(path), samples=20, tune=False)
    result = search(problem, placer, trials=500, prove=False, on_note=told.append)
    assert set(result.baselines) == {"single", "expert"}
    assert result.num_trials <= 21 + sum(
        search(problem, n, trials=99, prove=False).num_trials for n in result.baselines
    )
    assert result.best.step_time <= min(trial.step_time for trial in result.baselines.values())
    assert not told
    search(problem, replace(placer, tune=True), trials=100, prove=False, on_note=told.append)
    assert told


@pytest.mark.parametrize("order", ["topological", "reversed", "random"])
def test_an_episode_visits_every_group_once_in_its_order(order: str) -> None:
    problem = training_like(60, 3)
    episodes = begun(problem, replace(SMALL, order=order))
    uniform = np.log(np.full((8, problem.cluster.num_devices), 1 / problem.cluster.num_devices))
    steps, _ = episodes.run(lambda _: uniform, np.random.default_rng(0), episodes.num_steps)
    visited, usual = [step.input.group for step in steps], episodes.features.visits.tolist()
    assert sorted(visited) == sorted(usual)
    assert (visited == usual, visited == usual[::-1]) == (
        order == "topological",
        order == "reversed",
    )


def test_only_the_tuned_policy_is_shown_features_of_devices() -> None:
    problem = training_like(60, 3)
    for setting, shown in ((SMALL_PAPER, False), (SMALL, True)):
        episodes = begun(problem, setting)
        uniform = np.log(np.full((setting.episodes, problem.cluster.num_devices), 0.2))
        steps, _ = episodes.run(lambda _, logs=uniform: logs, np.random.default_rng(0), 2)
        assert steps[1].input.devices.any() == shown


@pytest.mark.parametrize("wrong", [{"order": "upside down"}, {"episodes": 0}, {"rewards": "none"}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(SETTINGS["tuned"], **wrong)
    with pytest.raises(InputError, match="paper"):
        Placeto("best")
    with pytest.raises(InputError, match="train_on"):
        found(tiny_problem("one_op"), replace(SMALL, train_on="abacus"))


def test_the_best_of_other_placers_is_where_it_begins() -> None:
    problem = training_like(60, 3)
    result = found(problem, replace(SMALL, start="best", starts=("single", "expert")), 200)
    assert set(result.baselines) == {"single", "expert"}
    assert result.best.step_time <= min(trial.step_time for trial in result.baselines.values())
