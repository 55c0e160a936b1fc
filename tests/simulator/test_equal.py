"""The compiled simulator equals the reference, bit for bit."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from roost.core.placement import Placement
from roost.presets import measurement_cache
from roost.simulator import compiled, reference
from roost.simulator.kernels import base
from roost.testing.problems import scattered, training_like
from support.nasty import nasty

CASES = 1500
CHUNK = 100


def assert_same(found, expected):
    assert found.step_time == expected.step_time
    assert found.peak_memory.tolist() == expected.peak_memory.tolist()
    assert found.num_transfers == expected.num_transfers
    assert found.feasible == expected.feasible
    assert found.missing.tolist() == expected.missing.tolist()


def assert_same_in_full(found, expected):
    assert_same(found, expected)
    for column in ("device", "start", "finish"):
        assert np.array_equal(getattr(found, column), getattr(expected, column)), column
    for column in ("tensor", "source", "target", "kind", "start", "finish"):
        assert np.array_equal(
            getattr(found.transfers, column), getattr(expected.transfers, column)
        ), column
    for column in ("device", "time", "held"):
        assert np.array_equal(getattr(found.memory, column), getattr(expected.memory, column)), (
            column
        )


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_one_placement(first):
    for seed in range(first, first + CHUNK):
        problem, placement = nasty(seed)
        expected = reference.simulate(problem, placement)
        try:
            assert_same(compiled.simulate(problem, placement), expected)
            assert_same_in_full(compiled.simulate(problem, placement, full=True), expected)
        except AssertionError as error:
            raise AssertionError(f"nasty({seed}): {error}") from error


@pytest.mark.parametrize("order", ["program", "rank", "fifo"])
def test_a_batch_of_unrelated_placements(order):
    for seed in range(60):
        problem, placement = nasty(seed)
        rng = np.random.default_rng(seed)
        devices = rng.integers(0, problem.cluster.num_devices, (5, problem.graph.num_ops))
        outcomes = compiled.Simulator(problem).evaluate(devices, order, placement.prefetch_bytes)
        for row, device in enumerate(devices):
            candidate = Placement(device, order, prefetch_bytes=placement.prefetch_bytes)
            expected = reference.simulate(problem, candidate)
            assert outcomes.step_time[row] == expected.step_time, seed
            assert outcomes.peak_memory[row].tolist() == expected.peak_memory.tolist(), seed
            assert outcomes.num_transfers[row] == expected.num_transfers, seed
            assert outcomes.feasible[row] == expected.feasible, seed


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_batch_of_neighbours(first):
    by_lanes = 0
    for seed in range(first, first + 100):
        problem, placement = nasty(seed)
        rng = np.random.default_rng(seed)
        if seed % 2:
            placement = at_home(problem, placement)
        count = int(rng.integers(0, 40))
        start = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))])
        move_op = rng.integers(0, problem.graph.num_ops, start[-1])
        move_device = rng.integers(0, problem.cluster.num_devices, start[-1])
        outcomes = compiled.Simulator(problem).neighbours(placement, start, move_op, move_device)
        assert len(outcomes) == count
        for number in range(count):
            changed = placement.device.copy()
            for move in range(start[number], start[number + 1]):
                changed[move_op[move]] = move_device[move]
            expected = reference.simulate(problem, replace(placement, device=changed))
            assert outcomes.step_time[number] == expected.step_time, (seed, number)
            assert outcomes.peak_memory[number].tolist() == expected.peak_memory.tolist(), (
                seed,
                number,
            )
            assert outcomes.num_transfers[number] == expected.num_transfers, (seed, number)
            by_lanes += placement.order != "fifo" and not problem.cluster.has_shared_buses
    assert by_lanes > 300, "the fast path was hardly tried"


def at_home(problem, placement):
    """The placement with each parameter, and every op that reads it, on one device: nothing is
    fetched."""
    device = placement.device.copy()
    for _ in range(problem.graph.num_ops):
        before = device.copy()
        for op in np.flatnonzero(problem.graph.is_parameter):
            device[problem.graph.consumers_of(op)] = device[op]
        if (before == device).all():
            break
        for op in np.flatnonzero(problem.graph.is_parameter):
            consumers = problem.graph.consumers_of(op)
            if len(consumers):
                device[op] = device[consumers].min()
    return replace(placement, device=device)


def test_neighbours_of_a_large_graph():
    problem = training_like(2000, 6)
    base = Placement(scattered(problem, run=16))
    rng = np.random.default_rng(0)
    groups = rng.integers(0, problem.graph.num_ops, (64, 8))
    start = np.arange(0, 64 * 8 + 1, 8)
    move_device = np.repeat(rng.integers(0, 6, 64), 8)
    simulator = compiled.Simulator(problem)
    outcomes = simulator.neighbours(base, start, groups.ravel(), move_device)
    devices = np.repeat(base.device[None], 64, axis=0)
    for number in range(64):
        devices[number, groups[number]] = move_device[8 * number]
    expected = simulator.evaluate(devices)
    assert np.array_equal(outcomes.step_time, expected.step_time)
    assert np.array_equal(outcomes.peak_memory, expected.peak_memory)
    assert np.array_equal(outcomes.num_transfers, expected.num_transfers)


def test_threads_change_nothing():
    problem = training_like(20_000, 4)
    devices = np.array([scattered(problem, seed, run=16) for seed in range(64)])
    simulator = compiled.Simulator(problem)
    one, two = simulator.evaluate(devices), simulator.evaluate(devices, threads=2)
    assert np.array_equal(one.step_time, two.step_time)
    assert np.array_equal(one.peak_memory, two.peak_memory)


def test_without_a_home_or_a_cache_it_still_compiles(tmp_path):
    code = "import os; os.environ.pop('HOME', None); from roost.simulator.kernels import base; print(base._cache_folder())"
    env = {
        "NUMBA_CACHE_DIR": "~nobody_at_all/x",
        "XDG_CACHE_HOME": "/proc/nothing",
        "TMPDIR": str(tmp_path),
    }
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_a_relative_cache_folder_counts_nowhere(tmp_path, monkeypatch):
    """Its standard says to ignore it: no folder appears in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    base._cache_folder.cache_clear()
    try:
        compiled_loops = base._cache_folder()
    finally:
        base._cache_folder.cache_clear()
    assert compiled_loops is not None
    assert compiled_loops.parents[1] == tmp_path / "home/.cache"
    assert measurement_cache.folder() == tmp_path / "home/.cache/roost"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
