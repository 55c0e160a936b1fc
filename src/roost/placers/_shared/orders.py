"""Devices without an order are half an answer: try the orders there are, and take the best."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate
from roost.placers._shared.dispatch import dispatch
from roost.simulator.compiled import Simulator
from roost.simulator.order import placed_rank


def placement_of(
    problem: Problem, device: Array, order: str = "program", priority: Array | None = None
) -> Placement:
    """A placement that says which graph and which devices it is for."""
    return Placement(
        device,
        order,
        priority=priority,
        devices=problem.cluster.device_names,
        graph=problem.graph.digest,
    )


def best_of(trials: Iterable[Trial]) -> Trial:
    """The best of some trials, the first of equals."""
    found: Trial | None = None
    for trial in trials:
        if trial.better_than(found):
            found = trial
    assert found is not None
    return found


def best_order(
    problem: Problem, evaluate: Evaluate, device: Array, extra: Iterable[Placement] = ()
) -> Placement:
    """The devices in each order there is for any devices, or one of the others given: whichever is
    best."""
    return best_of(evaluate([*in_orders(problem, device), *extra])).placement


def in_orders(problem: Problem, device: Array) -> list[Placement]:
    """The devices in program and rank order, and with early updates where there are any."""
    found = [placement_of(problem, device, order) for order in ("program", "rank")]
    if (problem.graph.phase == UPDATE).any():
        found.append(placement_of(problem, device, "priority", early_updates(problem)))
    return found


def early_updates(problem: Problem) -> Array:  # [ops]
    """Priorities for program order with each update as soon as it can be: gradients are then not
    kept to the end.

    An update waits for its gradient, and for every op that reads what it rewrites.
    """
    kept = vars(problem).get("_early_updates")
    if kept is None:
        graph = problem.graph
        source, target, update = graph.input_op, graph.edge_target, graph.phase == UPDATE
        position = np.arange(graph.num_ops, dtype=np.float64)
        # Of a parameter: of its last reader that is no update.
        last = np.where(graph.is_parameter, -1.0, position)
        readers = graph.is_parameter[source] & ~update[target]
        np.maximum.at(last, source[readers], position[target[readers]])
        before = np.full(graph.num_ops, -1.0)
        np.maximum.at(before, target, last[source])
        position[update] = np.minimum(position[update], before[update] + 0.5)
        kept = vars(problem)["_early_updates"] = -position
    return np.asarray(kept)


def listed_order(problem: Problem, device: Array, urgency: Array | None = None) -> Array:  # [ops]
    """Priorities by list scheduling on these devices: longest remaining path first, or most urgent
    first."""
    return listed(problem, device, urgency)[0]


def listed(problem: Problem, device: Array, urgency: Array | None = None) -> tuple[Array, float]:
    """The same, and the step time in that order: exact unless devices share a bus to send, fetch or
    have gaps."""
    simulator = Simulator.of(problem)
    layout = simulator.layout(placement_of(problem, device))
    rank = placed_rank(problem, device) if urgency is None else urgency
    begun = np.empty(len(layout.op), dtype=np.uint32)
    seconds = dispatch(
        layout, np.asarray(device, dtype=np.uint32)[layout.op], rank[layout.op], begun
    )
    priority = np.zeros(problem.graph.num_ops)
    priority[layout.op[begun]] = -np.arange(len(begun), dtype=np.float64)
    return priority, float(seconds)


def in_listed_order(problem: Problem, device: Array) -> Placement:
    """The devices in the order that list scheduling makes for them."""
    return placement_of(problem, device, "priority", listed_order(problem, device))


def reordered(problem: Problem, device: Array) -> list[Placement]:
    """The devices in orders made for them."""
    return [
        in_listed_order(problem, device),
        placement_of(problem, device, "priority", placed_rank(problem, device)),
    ]
