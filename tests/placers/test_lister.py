"""The learned list scheduler: kernel and PyTorch agree, it learns, keeps to memory, and goes on as
if never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layered import machine, model, nastier, timed

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers._lister.device_features import DEVICE_FEATURES
from roost.placers._lister.network_scheduler import (
    ORDERS,
    NetworkScheduler,
    NetworkSchedules,
    first_alike,
    network_schedulers,
    units_of,
)
from roost.placers._lister.portable_rules import COLUMNS
from roost.placers._lister.rule_search import first_rules, rule_schedulers
from roost.placers._lister.rule_training import best_together
from roost.placers._lister.sampling import choices_in, cost_of, decisions_of, exploring
from roost.placers._lister.training import ListerTraining
from roost.placers._lister.training_plan import TrainingSettings
from roost.placers._lister.weights import NUM_FEATURES, network_of, new_tensors
from roost.placers._listing.list_scheduler import ListScheduler
from roost.placers._shared.checkpoints import restore
from roost.placers._shared.groups import groups_of
from roost.placers.lister import Lister
from roost.policies.lister_network import ListerPolicy
from roost.policies.weights import save_weights
from roost.search.solve import search
from roost.simulator.compiled import simulate

QUICK = TrainingSettings(graphs=2, schedules=4, kept=8, starts=2)


def wide(count: int = 4, memory: int = 10_000, devices: int = 3) -> Problem:
    return timed(
        model([f"m{number % 3}.{number}" for number in range(count)]), machine(*[memory] * devices)
    )


def loud(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights in which all layers speak."""
    tensors = new_tensors(np.random.default_rng(seed))
    tensors["out"] = (
        np.random.default_rng(seed).normal(0, 0.5, tensors["out"].shape).astype(np.float32)
    )
    return tensors


def training(problems: list[Problem], notes: list[dict[str, float]]) -> ListerTraining:
    return ListerTraining(problems, 0.02, 5, 50, QUICK, lambda figures: notes.append(dict(figures)))


@pytest.mark.parametrize("problem", [wide(6), wide(6, devices=1), nastier(3), nastier(8)])
def test_the_network_says_the_same_in_the_kernel_and_in_pytorch(problem: Problem) -> None:
    tensors = loud()
    for scheduler in network_schedulers(problem, 100, ORDERS):
        sampling = exploring(np.random.default_rng(1), scheduler, 6)
        schedules = scheduler.schedule(
            network_of(tensors, scheduler), sampling, np.ones(1), record=True
        )
        picked = choices_in(schedules)
        if not picked.any():
            continue
        rows = decisions_of(scheduler, schedules, sampling, picked)
        policy = ListerPolicy(
            {name: value for name, value in tensors.items() if name not in ("ways", "rules")}
        )
        said = policy(rows).gather(1, rows.choice.unsqueeze(1)).squeeze(1).detach().numpy()
        assert np.abs(said - schedules.record.log_prob[picked]).max() < 1e-5
        assert said.min() < -0.01


@pytest.mark.parametrize("seed", range(4))
def test_what_a_schedule_costs_is_what_the_simulator_says(seed: int) -> None:
    problem = nastier(seed)
    for scheduler in network_schedulers(problem, 100, ORDERS):
        schedules = scheduler.schedule(
            network_of(loud(seed), scheduler), exploring(np.random.default_rng(seed), scheduler, 4)
        )
        for row in range(4):
            timeline = simulate(problem, scheduler.placement(schedules.unit_device[row]))
            over = np.maximum(timeline.peak_memory - timeline.capacity, 0).sum()
            assert (timeline.step_time, float(over)) == (
                schedules.step_time[row],
                schedules.excess[row],
            )


def test_every_feature_has_a_name() -> None:
    assert len(set(DEVICE_FEATURES)) == NUM_FEATURES == len(DEVICE_FEATURES)


def test_devices_that_are_just_alike_are_known_as_such() -> None:
    problem = timed(model(["a", "b"]), machine(100, 100, 50, 100), speed=[1.0, 1.0, 1.0, 2.0])
    assert first_alike(problem).tolist() == [0, 0, 2, 3]


def test_of_several_empty_devices_that_are_alike_only_the_first_is_taken() -> None:
    scheduler = network_schedulers(wide(3, devices=4), 100, ("program",))[0]
    sampling = exploring(np.random.default_rng(0), scheduler, 8)
    schedules = scheduler.schedule(network_of(loud(), scheduler), sampling, np.ones(1), record=True)
    assert (schedules.record.mask[:, 0] == 1).all()
    for devices in schedules.unit_device:
        used = devices[np.argsort(scheduler.constants.first_op)]
        seen = list(dict.fromkeys(used.tolist()))
        assert seen == sorted(seen)


def test_a_placement_in_canonical_names_costs_the_same() -> None:
    problem = wide(5, devices=4)
    scheduler = network_schedulers(problem, 100, ("program",))[0]
    devices = np.random.default_rng(2).integers(0, 4, scheduler.units.num_units).astype(np.int32)
    named = scheduler.canonical(devices)
    first, again = (
        simulate(problem, scheduler.placement(each)).step_time for each in (devices, named)
    )
    assert first == again
    assert (scheduler.canonical(named) == named).all()


def test_units_are_no_more_than_asked_for_and_split_no_group() -> None:
    problem = wide(12)
    units = units_of(problem, 8)
    assert units.num_units <= 8
    problem.check(
        NetworkScheduler.of(ListScheduler.of(units, "program")).placement(
            np.zeros(units.num_units, np.int32)
        )
    )


def test_memory_is_kept_to_where_there_is_a_way() -> None:
    problem = timed(model(["a", "b", "c", "d"]), machine(560, 560, 560))
    result = search(problem, Lister(tune=False), trials=400, prove=False)
    assert result.best.feasible


def test_an_infeasible_start_still_teaches() -> None:
    problem = timed(model(["a", "b", "c"]), machine(150, 150))
    notes: list[dict[str, float]] = []
    result = search(
        problem,
        Lister(batch=4, varied=0),
        trials=1000,
        prove=False,
        on_note=lambda f: notes.append(dict(f)),
    )
    assert not result.best.feasible
    assert notes
    assert all(np.isfinite(list(note.values())).all() for note in notes)


def test_what_does_not_fit_costs_more_the_more_is_missing() -> None:
    record = network_schedulers(wide(2), 10, ("program",))[0].schedule
    schedules = NetworkSchedules(
        np.zeros((4, 1)),
        np.array([1.0, 1.0, 1.0, np.nan]),
        np.array([0.0, 10.0, 200.0, 0.0]),
        4,
        record,
    )  # type: ignore[arg-type]
    cost = cost_of(schedules, wide(2))
    assert cost[0] < cost[1] < cost[2] < cost[3]
    broken = replace(schedules, step_time=np.full(4, np.inf))
    assert (cost_of(broken, wide(2)) == 0).all()


def test_learning_by_trial_and_error_gets_better() -> None:
    problem = timed(
        model([f"m{n}" for n in range(6)]), machine(*[10_000] * 3), speed=[1.0, 1.0, 3.0]
    )
    costs: list[float] = []
    search(
        problem,
        Lister(rate=0.01),
        trials=1500,
        prove=False,
        on_note=lambda f: costs.append(f["mean_cost"]),
    )
    assert np.mean(costs[-10:]) < np.mean(costs[:10]) - 0.02


def test_equal_seeds_give_equal_results() -> None:
    results = [
        search(wide(6), Lister(batch=4), trials=150, seed=seed, prove=False) for seed in (3, 3)
    ]
    assert results[0].best.placement == results[1].best.placement
    assert results[0].num_trials == results[1].num_trials > 140


def test_a_search_that_goes_on_from_its_journal_ends_as_if_never_stopped(tmp_path: Path) -> None:
    notes: list[dict[str, float]] = []

    def run(trials: int, name: str) -> list[dict[str, float]]:
        notes.clear()
        placer = Lister(batch=4)
        search(
            wide(6),
            placer,
            trials=trials,
            seed=3,
            prove=False,
            journal=tmp_path / name,
            on_note=_kept(notes),
        )
        return list(notes)

    whole = run(200, "whole")
    run(120, "broken")
    assert run(200, "broken") == whole


def _kept(notes: list[dict[str, float]]):  # type: ignore[no-untyped-def]
    return lambda figures: notes.append(
        {name: value for name, value in figures.items() if name != "seconds"}
    )


@pytest.mark.parametrize(
    ("seconds", "trials", "lasts"),
    [(9.0, np.inf, True), (np.inf, 99.0, True), (np.inf, np.inf, False), (9.0, 5.0, False)],
)
@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_it_learns_on_where_there_is_a_budget_for_it(
    seconds: float, trials: float, lasts: bool, refine: float
) -> None:
    left = SimpleNamespace(seconds_left=seconds, trials_left=trials)
    until = Lister(refine=refine)._budget_check(left)  # type: ignore[arg-type]
    assert until(left) is lasts  # type: ignore[arg-type]
    assert not until(SimpleNamespace(seconds_left=min(seconds, 0.0), trials_left=trials))  # type: ignore[arg-type]


def test_one_device_and_one_op_are_placed() -> None:
    for problem in (wide(1), wide(4, devices=1)):
        assert search(problem, Lister(), trials=100, prove=False).best.feasible


def test_annealing_may_have_the_end_of_the_budget() -> None:
    result = search(wide(6), Lister(batch=4, refine=0.5), trials=600, prove=False)
    assert 200 < result.num_trials <= 600


def test_with_weights_it_is_never_worse_than_single_and_expert(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_weights(path, "lister", loud(), {})
    problem = wide(6)
    result = search(
        problem, Lister(weights=str(path), samples=2, tune=False), trials=200, prove=False
    )
    assert {"single", "expert"} <= set(result.baselines)
    assert all(result.best.step_time <= trial.step_time for trial in result.baselines.values())


def test_samples_are_the_first_rules_learned_some_drawn_and_some_varied(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    tensors = loud()
    save_weights(path, "lister", tensors, {})
    placer = Lister(weights=str(path), varied=0, tune=False, baselines=())
    first, kind, rest = first_rules(tensors["rules"].astype(np.float64), 64, 0)
    assert len(first) == 32
    assert not kind.any()
    assert len(rest) == 0
    assert (first[:24] == tensors["rules"][:24]).all()
    order = COLUMNS.index("order")
    assert set(first[24:, order]) <= set(first[:24, order])
    more = first_rules(tensors["rules"], 64, 50)
    assert (more.rows[24:] == first[24:]).all()  # drawn alike whatever the seed
    assert (more.later == tensors["rules"][24:]).all()
    plenty = search(wide(6), placer, trials=1000, prove=False)
    assert 64 < plenty.num_trials <= 64 + 8  # and the best devices in other orders
    assert search(wide(6), placer, trials=40, prove=False).num_trials == 40
    assert (
        64 + 50
        < search(wide(6), replace(placer, varied=50), trials=1000, prove=False).num_trials
        <= 114 + 8
    )
    assert search(wide(6), replace(placer, samples=1), trials=10, prove=False).num_trials == 1


def unlike(slower: float) -> Problem:
    """Chains of ops, each chain a module, on a CPU and two accelerators of which one is slower."""
    builder = GraphBuilder("unlike")
    for layer in range(8):
        last = builder.parameter(f"b{layer}.w", 50)
        for op in range(5):
            last = builder.add(
                f"b{layer}.{op}", "matmul", [last], output_bytes=100, module=f"b{layer}"
            )
    graph = builder.freeze()
    devices = tuple(Device(name, name[:-2], 100_000) for name in ("cpu:0", "cuda:0", "cuda:1"))
    cluster = Cluster("unlike", devices, (Link("*", "*", 1000.0),))
    return Problem(
        graph, cluster, Costs(np.where(graph.is_parameter, 0.0, 1.0)[:, None] * [4.0, 1.0, slower])
    )


def test_for_unlike_accelerators_more_rules_are_drawn_and_place_whole_groups(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policy.safetensors"
    save_weights(path, "lister", loud(), {})
    placer = Lister(weights=str(path), varied=0, tune=False, baselines=())
    first, kind, _ = first_rules(loud()["rules"].astype(np.float64), 64, 0, are_unlike=True)
    assert (len(first), kind.sum()) == (40, 24)
    assert (kind == np.repeat([0, 1], [16, 24])).all()
    assert set(first[16:, COLUMNS.index("order")]) == set(range(8))
    assert [len(rule_schedulers(unlike(slower))) for slower in (1.0, 1.4, 1.6, 3.0)] == [1, 1, 2, 2]
    whole = rule_schedulers(unlike(3.0))[1]
    assert whole.units is groups_of(whole.problem)
    for trials in (3, 20, 50, 100_000):
        result = search(unlike(3.0), placer, trials=trials, prove=False)
        assert result.num_trials <= trials
        assert result.best.step_time == simulate(unlike(3.0), result.best.placement).step_time


def test_unlike_accelerators_without_groups_are_sampled_as_others_are() -> None:
    problem = wide(6)
    halves = replace(
        problem.costs, op_time=problem.op_time * ([1.0] + [3.0] * (problem.cluster.num_devices - 1))
    )
    assert len(rule_schedulers(Problem(problem.graph, problem.cluster, halves))) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("skip", np.zeros(3), "skip"),
        ("ways", np.full((64, NUM_FEATURES + 2), 7.0), "invalid order or temperature"),
        ("rules", np.full((64, len(COLUMNS)), -1.0), "'rules' has an invalid setting"),
        ("rules", np.zeros((64, 3)), "'rules' has shape"),
    ],
)
def test_weights_that_cannot_be_are_refused_at_once(
    tmp_path: Path, name: str, value: np.ndarray, said: str
) -> None:
    path = tmp_path / "policy.safetensors"
    save_weights(path, "lister", {**loud(), name: value}, {})
    with pytest.raises(InputError, match=said) as error:
        Lister(weights=str(path))
    assert str(path) in str(error.value)


def test_weights_from_before_there_were_rules_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_weights(
        path, "lister", {name: value for name, value in loud().items() if name != "rules"}, {}
    )
    with pytest.raises(InputError, match=r"policy\.safetensors: tensor 'rules' is missing"):
        Lister(weights=str(path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"varied": -1},
        {"batch": 1},
        {"refine": 2.0},
        {"rate": 0.0},
        {"most_units": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Lister(**wrong)  # type: ignore[arg-type]


def test_a_course_that_was_stopped_ends_with_the_same_weights() -> None:
    problems = [wide(4), wide(5, devices=2)]
    unbroken, notes = training(problems, []), []
    states: list[dict[str, np.ndarray]] = []
    unbroken.run(lambda state: states.append(dict(state)))
    for at in (0, 2, len(states) // 2, len(states) - 2):
        again = training(problems, notes)
        again.restore(states[at])
        again.run(lambda _: None)
        assert all((again.tensors[name] == value).all() for name, value in unbroken.tensors.items())
        assert (again.samplers == unbroken.samplers).all()
        assert (again.rules.rules == unbroken.rules.rules).all()


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("weights.out", lambda value: value[:-1], "has shape"),
        ("weights.out", lambda value: value * np.nan, "not finite"),
        ("weights.out", lambda value: value.astype(np.int64), "is int64"),
        ("weights.out", None, "is missing"),
        ("adam.0.exp_avg", lambda value: value[..., None], "has shape"),
        ("adam.0.exp_avg_sq", lambda value: value - 1.0, "below 0"),
        ("adam.0.step", None, "is missing"),
        ("adam.99.step", lambda _: np.ones(()), "belongs to no parameter"),
        ("target.0", lambda value: value[:, :-1], "has shape"),
        ("target.0", lambda value: value + 99, "names a device that is not there"),
        ("best", lambda value: value[:-1], "is not"),
        ("best", lambda value: value * np.nan, "is not"),
        ("ways", lambda value: value[:, :-1], "has shape"),
        ("ways", lambda value: value + 0.5, "invalid order"),
        ("rules.rows", lambda value: value + 99.0, "invalid setting"),
        ("rules.cost", lambda value: value[:, :-1], "has shape"),
        ("rng", lambda value: value[:-1], "has shape"),
        ("at", lambda value: value + 1, "another plan"),
    ],
)
def test_a_state_that_is_not_of_the_course_is_refused_by_name(
    name: str, changed: Any, said: str
) -> None:
    problems = [wide(4), wide(5, devices=2)]
    states: list[dict[str, np.ndarray]] = []
    training(problems, []).run(lambda state: states.append(dict(state)))
    state = states[-2]
    if changed is None:
        del state[name]
    else:
        state[name] = changed(state.get(name))

    class File:
        path = "here/checkpoint.npz"

    with pytest.raises(
        InputError, match=rf"here/checkpoint.npz: tensor '{name}'.* {said}.*; remove it"
    ) as error:
        restore(training(problems, []), state, File)
    assert error.value.__cause__ is None


def test_what_was_learned_is_better_than_what_it_began_with() -> None:
    problems = [
        timed(model([f"m{n}" for n in range(5)]), machine(*[9_000] * 3), speed=[1.0, 1.0, 3.0])
    ]
    learned = ListerTraining(
        problems, 1.0, 1, 50, TrainingSettings(graphs=2, schedules=8), lambda _: None
    )
    before, scheduler = dict(learned.tensors), learned.schedulers[0]
    learned.run(lambda _: None)
    sampling = exploring(np.random.default_rng(0), scheduler, 32)
    costs = [
        cost_of(scheduler.schedule(network_of(each, scheduler), sampling), problems[0]).mean()
        for each in (before, learned.tensors)
    ]
    assert costs[1] < costs[0]


def test_ways_are_chosen_for_what_they_add() -> None:
    cost = np.array([[1.0, 9.0, 9.0], [2.0, 2.0, 9.0], [9.0, 9.0, 1.0], [0.9, 9.0, 9.0]])
    assert best_together(cost, 2).tolist() in ([1, 2], [2, 1])
