"""Rules that mean the same on every problem: what they make, how they vary, and which are kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layered import machine, model, timed

from roost.core.problem import Problem
from roost.placers._lister.portable_rules import (
    COLUMNS,
    SETTINGS,
    are_valid,
    drawn_rules,
    varied_rules,
)
from roost.placers._lister.rule_scheduler import Anchors, RuleScheduler, usable_by
from roost.placers._lister.rule_training import RuleTraining, added, best_together
from roost.placers._lister.sampling import cost_of
from roost.placers._lister.visiting_orders import ORDERS, scheduler_in
from roost.placers._listing.linear_rules import FEATURES
from roost.placers._shared.units import Units
from roost.placers.lister import Lister
from roost.search.solve import search
from roost.simulator.compiled import simulate
from roost.simulator.order import dispatch_order


def wide(count: int = 6, memory: int = 10_000, devices: int = 3) -> Problem:
    return timed(
        model([f"m{number % 3}.{number}" for number in range(count)]), machine(*[memory] * devices)
    )


def row(**settings: float) -> np.ndarray:
    """The rule of earliest finish, otherwise with these settings."""
    found = {"finish": 1.0, "share": 1.0, "fair": 1.0, "part": 1.0, **settings}
    return np.array([[found.get(name, 0.0) for name in COLUMNS]])


@pytest.mark.parametrize("memory", [10_000, 600])
def test_what_a_rule_costs_is_what_the_simulator_says(memory: int) -> None:
    problem = wide(memory=memory)
    scheduler = RuleScheduler(problem)
    assert scheduler.is_tight == (memory < 10_000)
    tried = scheduler.schedule(drawn_rules(np.random.default_rng(0), 32))
    for number in range(32):
        timeline = simulate(problem, tried.placement(number))
        over = np.maximum(timeline.peak_memory - timeline.capacity, 0).sum()
        assert (timeline.step_time, over) == (tried.step_time[number], tried.excess[number])


def test_a_rule_whose_devices_run_in_an_order_of_their_own_has_the_same_devices() -> None:
    scheduler, rows = RuleScheduler(wide()), drawn_rules(np.random.default_rng(0), 32)
    listed, own = rows.copy(), rows.copy()
    listed[:, COLUMNS.index("listed")], own[:, COLUMNS.index("listed")] = 1.0, 0.0
    tried = [scheduler.schedule(each) for each in (listed, own)]
    assert (tried[0].unit_device == tried[1].unit_device).all()
    assert not any(tried[0].schedulers)
    assert all(tried[1].schedulers)
    assert tried[0].simulations == tried[1].simulations == 32
    assert tried[0].placement(0).order == "priority"


def test_where_memory_is_tight_an_order_of_its_own_is_taken_only_where_it_is_better() -> None:
    scheduler, rows = RuleScheduler(wide(memory=600)), drawn_rules(np.random.default_rng(0), 64)
    rows[:, COLUMNS.index("listed")] = 0.0
    own = scheduler.schedule(rows)
    rows[:, COLUMNS.index("listed")] = 1.0
    both = scheduler.schedule(rows)
    assert both.simulations == own.simulations + 64
    assert all(
        (both.excess[n], both.step_time[n]) <= (own.excess[n], own.step_time[n]) for n in range(64)
    )


def test_a_rule_means_the_same_where_everything_takes_four_times_as_long() -> None:
    rows, graph = (
        drawn_rules(np.random.default_rng(0), 64),
        model([f"m{number}" for number in range(6)]),
    )
    devices = [
        RuleScheduler(
            timed(graph, machine(*[10_000] * 3, bandwidth=100.0 / times), times, [1.0, 1.0, 2.0])
        ).schedule(rows)
        for times in (1.0, 4.0)
    ]
    assert (devices[0].unit_device == devices[1].unit_device).all()
    assert len(np.unique(devices[0].unit_device, axis=0)) > 4


def test_rules_name_devices_by_how_fast_they_are() -> None:
    total = np.array([3.0, 1.0, 9.0, 1.1])
    choices = np.array([[True] * 4, [True, True, False, True], [False, True, False, True]])

    def taken(**settings: float) -> list[int]:
        return np.flatnonzero(usable_by(row(**settings), choices, total)[0]).tolist()

    assert taken() == [0, 1, 2, 3]
    assert taken(fast=0.01) == [0, 1, 3]
    assert taken(fast=1.0) == [1, 3]
    assert taken(part=0.5) == [1, 3]
    assert taken(part=0.01) == [1]


def test_children_are_rules_and_keep_to_the_orders_of_their_parents() -> None:
    rng = np.random.default_rng(1)
    parents = drawn_rules(rng, 200, [2, 5])
    assert are_valid(parents)
    children = varied_rules(rng, parents, parents)
    assert are_valid(children)
    assert set(children[:, COLUMNS.index("order")]) == {2.0, 5.0}
    same = (children == parents).mean()
    assert 0.3 < same < 0.95


@pytest.mark.parametrize(
    ("name", "value"), [("order", 1.5), ("order", 99.0), ("part", 0.0), ("finish", np.nan)]
)
def test_what_cannot_be_a_rule_is_known(name: str, value: float) -> None:
    assert are_valid(row())
    assert not are_valid(row(**{name: value}))


def test_columns_have_names() -> None:
    assert (*FEATURES, *SETTINGS) == COLUMNS
    assert len(set(COLUMNS)) == len(COLUMNS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [False, True])
def test_an_order_never_puts_an_op_before_its_inputs(order: str, eager: bool) -> None:
    problem = wide()
    found = dispatch_order(problem, scheduler_in(Units.of(problem), order, eager).example)
    position = np.full(problem.graph.num_ops, -1)
    position[found] = np.arange(len(found))
    graph = problem.graph
    assert (position[graph.input_op] < position[graph.edge_target])[
        ~graph.is_parameter[graph.input_op]
    ].all()


def test_what_may_fail_is_chosen_twice() -> None:
    cost = np.array([[1.0, 5.0], [1.1, 5.0], [5.0, 4.9], [5.0, 4.95]])
    assert best_together(cost, 2).tolist() == [0, 2]
    assert best_together(cost, 2, 0.3).tolist() == [0, 1]


def test_what_a_rule_adds_is_what_the_best_together_would_gain() -> None:
    rng = np.random.default_rng(4)
    cost, new = rng.random((9, 5)), rng.random((4, 5))
    merit = added(cost, new, 0.3)
    for number, row in enumerate(new):
        weight, before = 0.3 * 0.7 ** np.arange(6), np.sort(cost, axis=0)[:6]
        after = np.sort(np.concatenate([cost, row[None]]), axis=0)[:6]
        assert merit[number] == pytest.approx((weight @ (before - after)).mean())
    assert added(cost, np.full((1, 5), 2.0), 0.3) == pytest.approx(0.0)


def test_learned_rules_are_better_than_those_drawn_first() -> None:
    problems = [
        timed(model([f"m{n}" for n in range(5)]), machine(*[9_000] * 3), speed=[1.0, 1.0, s])
        for s in (2, 3)
    ]
    training = RuleTraining(problems, np.random.default_rng(3))
    for done in range(len(ORDERS)):
        training.step(done)
    first = training.cost[::6][:64].min(axis=0).mean()
    for done in range(len(ORDERS), len(ORDERS) + 4):
        training.step(done)
    assert training.cost[:64].min(axis=0).mean() <= first
    again = [
        cost_of(RuleScheduler(problem).schedule(training.rules), problem) for problem in problems
    ]
    assert np.array_equal(np.stack(again, axis=1), training.cost[:64])
    assert len(set(training.rules[:, COLUMNS.index("order")].tolist())) <= 4


def test_varying_the_rules_ends_with_the_trials() -> None:
    for trials, memory in itertools.product((1, 2, 3, 70, 100), (10_000, 600)):
        result = search(wide(memory=memory), Lister(tune=False), trials=trials, prove=False)
        assert 1 <= result.num_trials <= trials


def test_what_is_held_firmly_stays_and_what_is_not_held_goes_where_the_rule_says() -> None:
    scheduler, rows = RuleScheduler(wide(12)), drawn_rules(np.random.default_rng(0), 24)
    # Any device may be taken.
    rows[:, COLUMNS.index("fast")], rows[:, COLUMNS.index("part")] = 0.0, 1.0
    free = scheduler.schedule(rows)
    elsewhere = (free.unit_device + 1) % 3
    held = scheduler.schedule(rows, anchors=Anchors(elsewhere, np.full(24, 1e9)))
    assert (held.unit_device == elsewhere)[:, scheduler.units.time.sum(axis=1) > 0].all()
    loose = scheduler.schedule(rows, anchors=Anchors(elsewhere, np.zeros(24)))
    assert (loose.unit_device == free.unit_device).all()
    some = elsewhere.copy()
    some[:, ::2] = -1  # may go anywhere
    part = scheduler.schedule(rows, anchors=Anchors(some, np.full(24, 1e9)))
    assert (part.unit_device == some)[:, 1::2].all()
    assert (part.unit_device != elsewhere)[:, ::2].any()


def test_rules_that_keep_near_mean_the_same_in_any_order_of_rows() -> None:
    scheduler, rows = RuleScheduler(wide(12)), drawn_rules(np.random.default_rng(2), 24)
    anchors = Anchors(
        np.resize(np.arange(3, dtype=np.int32), (24, scheduler.units.num_units)),
        np.linspace(0.0, 30.0, 24),
    )
    tried = scheduler.schedule(rows, anchors=anchors)
    for number in range(24):
        alone = scheduler.schedule(rows[[number]], anchors=anchors.rows([number]))
        assert (alone.unit_device[0] == tried.unit_device[number]).all()
        assert (
            simulate(scheduler.problem, tried.placement(number)).step_time
            == tried.step_time[number]
        )
