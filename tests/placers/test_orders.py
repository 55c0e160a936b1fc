"""Orders of ops: whatever the priorities, inputs come first, and no update before what reads what
it rewrites."""

from __future__ import annotations

import numpy as np
import pytest
from layered import machine, model, nastier, timed

from roost.core.arrays import Array
from roost.core.graph import UPDATE, Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._genetic.any_order import order_of
from roost.placers._shared.orders import all_orders, early_updates, list_schedule
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator, simulate
from roost.simulator.order import by_priority, dispatch_order, placed_rank, upward_rank
from roost.testing.problems import training_like
from support.nasty import nasty

SEEDS = range(150)


def updates(graph: Graph) -> Array:
    return np.equal(graph.phase, UPDATE)


def check_order(graph: Graph, order: Array) -> None:
    """Every op once; inputs first; an update after all that read its parameters earlier in the
    program."""
    assert sorted(order.tolist()) == sorted(set(order.tolist()))
    position = np.full(graph.num_ops, -1)
    position[order] = np.arange(len(order))
    ops = ~graph.is_parameter
    assert (position[ops] >= 0).all()
    for op in np.flatnonzero(ops).tolist():
        for source in graph.inputs_of(op).tolist():
            if ops[source]:
                assert position[source] < position[op]
            elif graph.phase[op] == UPDATE:
                for reader in graph.consumers_of(source).tolist():
                    if reader < op and graph.phase[reader] != UPDATE:
                        assert position[reader] < position[op], (
                            f"op {reader} reads what {op} has rewritten"
                        )


def test_any_priorities_give_an_order_that_keeps_to_the_program() -> None:
    seen = 0
    for seed in SEEDS:
        problem, _ = nasty(seed)
        graph, rng = problem.graph, np.random.default_rng(seed)
        seen += int(updates(graph).sum())
        for priority in (
            rng.random(graph.num_ops),
            rng.integers(0, 3, graph.num_ops),
            np.arange(graph.num_ops),
        ):
            check_order(graph, by_priority(graph, priority.astype(float)))
    assert seen > 100  # or the rule was not tried


def test_the_check_of_orders_sees_an_update_too_early() -> None:
    problem = training_with_update()
    check_order(problem.graph, np.array([1, 2, 3]))
    for wrong in ([1, 3, 2], [2, 1, 3]):
        with pytest.raises(AssertionError):
            check_order(problem.graph, np.array(wrong))


def training_with_update() -> Problem:
    builder = GraphBuilder("updated")
    builder.parameter("w", 4)
    builder.add("gradient", output_bytes=4)
    builder.add("late", inputs=["w", "gradient"], output_bytes=4)
    builder.add("update", inputs=["w", "gradient"], phase="update")
    cluster = nasty(0)[0].cluster
    return Problem(builder.freeze(), cluster, np.zeros((4, cluster.num_devices)))  # type: ignore[arg-type]


def test_an_urgent_update_makes_the_readers_of_its_parameters_urgent() -> None:
    graph = training_with_update().graph
    assert by_priority(graph, np.array([0.0, 5.0, 0.0, 9.0])).tolist()[-3:] == [1, 2, 3]


def test_every_order_that_placers_try_keeps_to_the_program() -> None:
    for seed in SEEDS:
        problem = nastier(seed)
        units, rng = Units.of(problem, "nothing"), np.random.default_rng(seed)
        device = units.devices((units.allowed * rng.random(units.allowed.shape)).argmax(axis=1))
        for placement in all_orders(problem, device):
            problem.check(placement)
            check_order(problem.graph, dispatch_order(problem, placement))
        check_order(problem.graph, by_priority(problem.graph, upward_rank(problem)))
        check_order(problem.graph, by_priority(problem.graph, placed_rank(problem, device)))


def test_early_updates_come_as_soon_as_they_may_and_nothing_else_moves() -> None:
    moved = 0
    for seed in SEEDS:
        problem, _ = nasty(seed)
        graph = problem.graph
        order = by_priority(graph, early_updates(problem))
        order = order[~graph.is_parameter[order]]
        check_order(graph, order)
        assert (np.diff(order[~updates(graph)[order]]) > 0).all()
        moved += int((np.diff(order) < 0).any())
    assert moved > 20


def test_early_updates_hold_less_where_gradients_wait_for_the_end() -> None:
    problem = timed(model([f"layers.{n}" for n in range(6)]), machine(10_000))
    graph = problem.graph
    late = [op for op in range(graph.num_ops) if not updates(graph)[op]]
    priority = np.zeros(graph.num_ops)
    priority[late] = 1.0
    device = np.zeros(graph.num_ops, np.int32)
    at_the_end = simulate(problem, problem.placement(device, "priority", priority)).peak_memory[0]
    early = simulate(
        problem, problem.placement(device, "priority", early_updates(problem))
    ).peak_memory[0]
    assert early < at_the_end


def test_a_listed_order_lists_every_op_after_its_inputs() -> None:
    for seed in SEEDS:
        problem, placement = nasty(seed)
        graph, rng = problem.graph, np.random.default_rng(seed)
        for urgency in (None, rng.random(graph.num_ops), np.zeros(graph.num_ops)):
            priority = list_schedule(problem, placement.device, urgency).priority
            listed = np.argsort(-priority[~graph.is_parameter], kind="stable")
            order = np.flatnonzero(~graph.is_parameter)[listed]
            assert len(set(priority[order].tolist())) == len(order)
            position = np.full(graph.num_ops, -1)
            position[order] = np.arange(len(order))
            assert (position[graph.input_op] < position[graph.edge_target]).all()


def test_a_listed_order_is_kept_by_the_simulator_where_nothing_is_rewritten() -> None:
    problem = training_like(200, 3)
    device = np.random.default_rng(0).integers(0, 3, problem.graph.num_ops)
    priority = list_schedule(problem, device).priority
    order = dispatch_order(problem, problem.placement(device, "priority", priority))
    assert (np.diff(priority[order]) < 0).all()


def test_the_compiled_order_is_that_of_the_simulator() -> None:
    for seed in SEEDS:
        problem, _ = nasty(seed)
        graph, rng = problem.graph, np.random.default_rng(seed)
        layout = Simulator.of(problem).layout(Placement(np.zeros(graph.num_ops, np.int32)))
        for priority in (
            rng.random(graph.num_ops),
            rng.integers(0, 3, graph.num_ops).astype(float),
        ):
            order = np.zeros(len(layout.op), np.int64)
            order_of(layout, priority[layout.op], order)
            expected = dispatch_order(
                problem, Placement(np.zeros(graph.num_ops, np.int32), "priority", priority)
            )
            assert layout.op[order].tolist() == expected.tolist()
