"""The model of devices that are all alike: exact where transfers are free, and used only there."""

from __future__ import annotations

import numpy as np
import pytest

import roost
from roost.bounds import cumulative
from roost.bounds.exact import solve_exactly
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from support.exhaustive import exhaustive

pytest.importorskip("ortools")


def free(seed: int, ops: int, devices: int, whole: bool = True) -> Problem:
    """Random ops on equal devices between which tensors cross in no time."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder(f"free{seed}")
    for op in range(ops):
        before = [str(source) for source in range(op) if rng.random() < 0.3]
        builder.add(str(op), "task", before)
    times = rng.integers(0, 6, ops).astype(float) if whole else rng.random(ops)
    each = tuple(Device(f"cpu:{number}", "cpu", 100) for number in range(devices))
    cluster = Cluster("equal", each, (Link("*", "*", 1.0),))
    return Problem(builder.freeze(), cluster, np.repeat(times[:, None], devices, axis=1))


def test_it_proves_the_optimum_of_every_small_problem() -> None:
    for seed in range(20):
        problem = free(seed, ops=6, devices=2 + seed % 2)
        best = exhaustive(problem)
        answer = solve_exactly(problem, seconds=20.0)
        assert answer.optimal, seed
        assert answer.step_time == pytest.approx(best.step_time, rel=1e-9), seed
        assert answer.bound <= best.step_time * (1 + 1e-9), seed


def test_a_schedule_that_list_scheduling_misses_is_found_within_a_budget_of_trials() -> None:
    problem = free(3, ops=40, devices=3)
    results = [
        roost.solve(problem, "auto", seconds=None, trials=2000, seed=seed) for seed in (0, 1)
    ]
    assert all(result.bound.step_time >= result.best.step_time * (1 - 1e-9) for result in results)
    assert results[0].best.step_time == results[1].best.step_time


def changed(**device: object) -> Problem:
    """The free problem with another second device, or with a link that takes time."""
    problem = free(0, ops=4, devices=2)
    link = Link("*", "*", 1.0, latency=1.0) if "latency" in device else problem.cluster.links[0]
    memory = device.get("memory", 100)
    devices = (problem.cluster.devices[0], Device("cpu:1", "cpu", memory))
    return Problem(problem.graph, Cluster("other", devices, (link,)), problem.costs)


def test_it_is_only_used_where_devices_are_alike_and_transfers_free() -> None:
    assert cumulative.applies(free(0, ops=4, devices=2))
    assert not cumulative.applies(changed(memory=50))
    assert not cumulative.applies(changed(latency=True))
    assert not cumulative.applies(free(0, ops=4, devices=1))
    assert not cumulative.applies(free(0, ops=4, devices=2, whole=False))
    slower = free(0, ops=4, devices=2)
    times = slower.op_time * np.array([1.0, 2.0])
    assert not cumulative.applies(Problem(slower.graph, slower.cluster, times))
