"""Annealing and descent: chains that tell the truth, what fits is kept, and the best of an order is
found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from layered import machine, model, nastier, timed

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import FETCH
from roost.core.trial import Result
from roost.placers._annealing.annealer import Annealer
from roost.placers._annealing.critical_units import critical_units
from roost.placers._annealing.population import Heat
from roost.placers._genetic.any_order import order_of, push_in_order
from roost.placers._shared.units import Units
from roost.placers.annealing import Annealing
from roost.placers.descent import Descent
from roost.search.solve import search
from roost.simulator.compiled import Simulator, simulate
from roost.simulator.kernels.batch import run_batch
from roost.testing.problems import training_like
from support.exhaustive import all_devices, tiny
from support.nasty import nasty

TIES = ("readers", "updates", "nothing")


def anywhere(units: Units, rng: np.random.Generator) -> Array:  # [units]
    """An allowed device for each unit."""
    return np.asarray((units.allowed * rng.random(units.allowed.shape)).argmax(axis=1))


def best_in_its_order(problem: Problem, example: Placement, devices: Array) -> float:
    """The shortest step of any of these devices that fit, in the order and with the windows of a
    placement."""
    cluster, count = problem.cluster, len(devices)
    step, moves = np.zeros(count), np.zeros(count, np.int64)
    peak = np.zeros((count, cluster.num_devices), np.int64)
    window = np.array(np.broadcast_to(example.prefetch_bytes, cluster.num_devices), dtype=np.int64)
    layout = Simulator.of(problem).layout(example)
    run_batch(
        layout,
        devices,
        window,
        example.order == "fifo",
        cluster.has_shared_buses,
        True,
        step,
        peak,
        moves,
    )
    fits = (peak <= cluster.memory).all(axis=1)
    return float(step[fits].min()) if fits.any() else np.inf


def share_found(problems: Iterator[Problem]) -> float:
    """How often annealing finds the best of the order that it reports, of the placements that fetch
    nothing."""
    found = []
    for number, problem in enumerate(problems):
        best = search(problem, "annealing", trials=2000, seed=number, prove=False).best
        units, devices = Units.of(problem), all_devices(problem)
        together = (devices[:, units.leader][:, units.unit] == devices).all(axis=1)
        expected = best_in_its_order(problem, best.placement, devices[together])
        found.append(best.step_time <= expected if best.feasible else np.isinf(expected))
    return float(np.mean(found))


def test_it_finds_the_best_of_its_own_order() -> None:
    assert share_found(tiny(seed, most_ops=7, plain=True) for seed in range(130)) >= 0.99


def test_it_finds_the_best_of_its_own_order_with_all_that_may_go_wrong() -> None:
    assert share_found(tiny(seed, most_ops=7) for seed in range(70)) >= 0.99


def plain_problems(count: int) -> Iterator[tuple[int, Problem, Array]]:
    """Nasty problems and devices without shared buses, where nothing is fetched."""
    for seed in range(count):
        problem, _ = nasty(seed)
        if not problem.cluster.has_shared_buses:
            units = Units.of(problem)
            yield seed, problem, units.devices(anywhere(units, np.random.default_rng(seed)))


def test_one_placement_in_any_order_costs_what_the_simulator_says() -> None:
    seen = 0
    for seed, problem, device in plain_problems(200):
        graph, cluster, rng = problem.graph, problem.cluster, np.random.default_rng(seed)
        layout = Simulator.of(problem).layout(problem.placement(device))
        priority = (
            rng.integers(0, 5, graph.num_ops).astype(float)
            if seed % 2
            else rng.random(graph.num_ops)
        )
        count = len(layout.op)
        order, turn_of = np.zeros(count, np.int64), np.zeros(count, np.int64)
        order_of(layout, priority[layout.op], order)
        turn_of[order] = np.arange(count)
        held, peak = np.zeros(64, np.int64), np.zeros(64, np.int64)
        np.add.at(held, device[graph.is_parameter], graph.output_bytes[graph.is_parameter])
        ready, dying = np.zeros(count), np.zeros(count, np.int64)
        step = push_in_order(
            layout, order, turn_of, device.astype(np.uint32)[layout.op], ready, dying, held, peak
        )
        timeline = simulate(problem, problem.placement(device, "priority", priority))
        assert step == timeline.step_time
        assert peak[: cluster.num_devices].tolist() == timeline.peak_memory.tolist()
        assert not ready.any()
        assert not dying.any()
        seen += 1
    assert seen > 60


@pytest.mark.parametrize("tie", TIES)
def test_a_chain_says_of_its_best_what_the_simulator_says(tie: str) -> None:
    for seed in range(40):
        problem, placement = nastier(seed), nasty(seed)[1]
        order = placement.order if placement.order != "fifo" else "rank"
        units, rng = Units.of(problem, tie), np.random.default_rng(seed)
        example = replace(placement, device=np.zeros(problem.graph.num_ops, np.int32), order=order)
        annealer = Annealer(problem, units, example)
        chain = annealer.chain(anywhere(units, rng), seed + 1)
        first = (chain.best_excess[0], chain.best_step[0])
        for _ in range(2):
            spent = annealer.run(chain, 20, 0.05, 0.001)
            assert 0 < spent <= 20 * annealer.batch + 1
            found = (chain.best_excess[0], chain.best_step[0])
            excess, step = annealer.cost(chain.best)
            # Sums are rounded.
            assert (found[1], found[0]) == (step, pytest.approx(excess, rel=1e-12))
            assert annealer.cost(chain.placed).step_time == chain.step[0]
            problem.check(annealer.placement(chain.placed))
            assert found <= first
            first = found


def test_what_the_step_waits_for_is_found_on_any_graph() -> None:
    for seed in range(150):
        problem, placement = nasty(seed)
        units, graph = Units.of(problem), problem.graph
        layout = Simulator.of(problem).layout(problem.placement(placement.device))
        unit_of = units.unit[layout.op].astype(np.int32)
        critical, mark = np.full(units.num_units, -1, np.int32), np.zeros(units.num_units, np.bool_)
        device = placement.device.astype(np.uint32)[layout.op]
        count = critical_units(layout, device, unit_of, critical, mark)
        assert not mark.any()
        assert len(set(critical[:count].tolist())) == count
        assert (count > 0) == (not graph.is_parameter.all())


def test_what_the_step_waits_for_is_a_path_to_its_end() -> None:
    problem = timed(
        model([f"layers.{n}" for n in range(5)], updates=False), machine(10_000, 10_000)
    )
    device = np.resize([0, 1], problem.graph.num_ops).astype(np.int32)
    units = Units.of(problem, "nothing")
    layout = Simulator.of(problem).layout(problem.placement(device))
    unit_of = units.unit[layout.op].astype(np.int32)
    critical, mark = np.zeros(units.num_units, np.int32), np.zeros(units.num_units, np.bool_)
    count = critical_units(layout, device.astype(np.uint32)[layout.op], unit_of, critical, mark)
    assert set(critical[:count].tolist()) == set(unit_of.tolist())  # a chain waits for every op


def shrunk(problem: Problem, peak: Array) -> Problem:
    """The problem with no more memory than a placement needs."""
    devices = tuple(
        replace(device, memory=int(most))
        for device, most in zip(problem.cluster.devices, peak, strict=True)
    )
    return Problem(problem.graph, replace(problem.cluster, devices=devices), problem.costs)


@pytest.mark.parametrize("tie", TIES)
def test_a_chain_that_began_with_what_fits_ends_with_what_fits(tie: str) -> None:
    moved = 0
    for seed in range(40):
        problem, _ = nasty(seed)
        units, rng = Units.of(problem, tie), np.random.default_rng(seed)
        start = anywhere(units, rng)
        tight = shrunk(
            problem, simulate(problem, problem.placement(units.devices(start))).peak_memory
        )
        annealer = Annealer(tight, Units.of(tight, tie), tight.placement(units.devices(start)))
        chain = annealer.chain(start, seed + 1)
        annealer.run(chain, 50, 0.05, 0.001)
        assert chain.best_excess[0] == 0
        assert simulate(tight, annealer.placement(chain.best)).feasible
        moved += int((chain.best != start).any())
    assert moved > 5


def test_a_search_that_knows_what_fits_returns_what_fits() -> None:
    for seed in range(12):
        problem = training_like(40, 3, seed)
        device = Units.of(problem).devices(anywhere(Units.of(problem), np.random.default_rng(seed)))
        tight = shrunk(problem, simulate(problem, problem.placement(device)).peak_memory)
        known = tight.placement(device)

        class Known(Annealing):
            def place(self, problem: Problem, evaluate):  # type: ignore[no-untyped-def]
                if problem is tight:  # noqa: B023
                    evaluate([known])  # noqa: B023
                return super().place(problem, evaluate)

        result = search(tight, Known(), trials=3000, prove=False)
        assert result.best.feasible
        assert result.best.step_time < simulate(tight, known).step_time


def offloading(memory: int) -> Problem:
    """A training step for one GPU and a host, whose updates alone may run there."""
    graph = model([f"layers.{n}" for n in range(6)], size=20, weight=100)
    allowed = tuple(
        () if graph.is_parameter[op] or name.endswith("update") else ("cuda",)
        for op, name in enumerate(graph.op_names)
    )
    cluster = machine(100_000, memory, kinds=("cpu", "cuda"), bandwidth=1000.0)
    return timed(replace(graph, allowed=allowed), cluster, speed=(1.0, 10.0))


def num_fetches(problem: Problem, placement: Placement) -> int:
    transfers = simulate(problem, placement, full=True).transfers
    assert transfers is not None
    return int((transfers.kind == FETCH).sum())


@pytest.mark.parametrize("placer", ["annealing", "descent", "auto"])
def test_parameters_that_do_not_fit_beside_their_readers_live_elsewhere(placer: str) -> None:
    problem = offloading(memory=550)
    graph = problem.graph
    assert graph.output_bytes[graph.is_parameter].sum() > 550
    best = search(problem, placer, trials=4000, prove=False).best
    assert best.feasible
    device = best.placement.device
    read = graph.is_parameter[graph.input_op]
    assert (device[graph.input_op[read]] != device[graph.edge_target[read]]).any()
    assert num_fetches(problem, best.placement) > 0


@pytest.mark.parametrize(
    "problem", [offloading(memory=550), training_like(40, 3)], ids=["fetched", "plain"]
)
def test_no_budget_is_exceeded(problem: Problem) -> None:
    for trials in (*range(300, 340), 700, 1401, 2003, 30_000):
        assert search(problem, "annealing", trials=trials, prove=False).num_trials <= trials


def test_what_fits_is_not_fetched() -> None:
    problem = offloading(memory=5000)
    best = search(problem, "annealing", trials=4000, prove=False).best
    assert best.feasible
    assert num_fetches(problem, best.placement) == 0


def found(problem: Problem, placer: Annealing | Descent, trials: int = 30_000) -> Result:
    return search(problem, placer, trials=trials, seed=1, prove=False)


@pytest.mark.parametrize(
    "placer", [Annealing(threads=1), Descent(threads=1)], ids=["annealing", "descent"]
)
def test_it_is_better_than_where_it_began_and_threads_change_nothing(
    placer: Annealing | Descent,
) -> None:
    problem = training_like(100, 2, seed=1)
    one, two = found(problem, placer), found(problem, replace(placer, threads=2))
    assert (one.best.placement, one.num_trials) == (two.best.placement, two.num_trials)
    assert one.best.step_time < 0.98 * min(trial.step_time for trial in one.baselines.values())


def test_descent_takes_nothing_worse() -> None:
    problem = training_like(100, 2, seed=1)
    units = Units.of(problem)
    start = anywhere(units, np.random.default_rng(0))
    annealer = Annealer(problem, units, problem.placement(units.devices(start)))
    chain = annealer.chain(start, 1)
    steps = [chain.step[0]]
    for _ in range(20):
        annealer.run(chain, 5, 1e-12, 1e-12)
        steps.append(chain.step[0])
        assert chain.step[0] == chain.best_step[0]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.9 * steps[0]


def test_warmth_takes_what_is_worse_and_keeps_the_best() -> None:
    problem = training_like(100, 2, seed=1)
    units = Units.of(problem)
    start = anywhere(units, np.random.default_rng(0))
    annealer = Annealer(problem, units, problem.placement(units.devices(start)))
    chain = annealer.chain(start, 1)
    worse = 0
    for _ in range(20):
        before = chain.step[0]
        annealer.run(chain, 1, 0.1, 0.1)
        worse += int(chain.step[0] > before)
    assert worse > 0
    assert chain.best_step[0] < chain.step[0]


def test_every_order_is_tried() -> None:
    problem = training_like(100, 2, seed=1)
    reordered = found(problem, Annealing(threads=1)).best
    fixed = found(problem, Annealing(threads=1, heat=Heat(reorder=False))).best
    assert reordered.placement.order == "priority"
    assert fixed.placement.order in ("program", "rank")
    assert reordered.step_time < fixed.step_time


def test_one_device_or_one_unit_leaves_nothing_to_move() -> None:
    graph = model(["a", "b"])
    alone = timed(graph, machine(10_000))
    glued = timed(
        replace(graph, group=np.zeros(graph.num_ops), group_names=("all",)), machine(10_000, 10_000)
    )
    for problem in (alone, glued):
        result = search(problem, "annealing", trials=500, prove=False)
        assert result.num_trials <= 500
        assert len(set(result.best.placement.device.tolist())) == 1


def test_a_cluster_of_sixty_four_devices_is_no_trouble() -> None:
    cluster: Cluster = machine(*[100_000] * 64)
    problem = timed(model([f"layers.{n}" for n in range(8)]), cluster)
    result = search(problem, "annealing", trials=2000, prove=False)
    assert (
        result.best.step_time
        <= simulate(problem, Placement(np.zeros(problem.graph.num_ops))).step_time
    )
