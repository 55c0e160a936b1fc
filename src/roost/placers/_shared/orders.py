"""Orders for given devices: each placement is devices and an order, and both decide the step time.

Every placer that only chooses devices tries these orders and keeps the best trial.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._shared.dispatch import dispatch
from roost.simulator.compiled import Simulator
from roost.simulator.order import placed_rank


class ListSchedule(NamedTuple):
    """An order for given devices, and its step time."""

    priority: Array  # [ops] for order "priority": the op with the highest begins first
    seconds: float  # exact unless devices fetch, have gaps, or share a bus


def list_schedule(problem: Problem, device: Array, urgency: Array | None = None) -> ListSchedule:
    """Order the ops of given devices [ops]: a free device begins the most urgent op that is ready.

    `urgency` [ops] defaults to the length of the remaining path, in seconds.
    """
    layout = Simulator.of(problem).layout(problem.placement(device))
    rank = placed_rank(problem, device) if urgency is None else urgency
    begun = np.empty(len(layout.op), dtype=np.uint32)
    device_of_position = np.asarray(device, dtype=np.uint32)[layout.op]
    seconds = dispatch(layout, device_of_position, rank[layout.op], begun)
    priority = np.zeros(problem.graph.num_ops)
    priority[layout.op[begun]] = -np.arange(len(begun), dtype=np.float64)
    return ListSchedule(priority, float(seconds))


def list_scheduled(problem: Problem, device: Array) -> Placement:
    """The devices [ops] in the order that list scheduling makes for them."""
    return problem.placement(device, "priority", list_schedule(problem, device).priority)


def common_orders(problem: Problem, device: Array) -> list[Placement]:
    """The devices [ops] in the orders that suit any devices: program, rank, and early updates."""
    placements = [problem.placement(device, order) for order in ("program", "rank")]
    if (problem.graph.phase == UPDATE).any():
        placements.append(problem.placement(device, "priority", early_updates(problem)))
    return placements


def own_orders(problem: Problem, device: Array) -> list[Placement]:
    """The devices [ops] in two orders made for them: list scheduling, and longest path first."""
    longest_path = problem.placement(device, "priority", placed_rank(problem, device))
    return [list_scheduled(problem, device), longest_path]


def all_orders(problem: Problem, device: Array) -> list[Placement]:
    """The devices [ops] in every order that Roost knows: four, or five with updates."""
    return [*common_orders(problem, device), *own_orders(problem, device)]


def early_updates(problem: Problem) -> Array:  # [ops]
    """Priorities for program order with early updates: gradients are not kept to the end.

    An update waits for its gradient, and for every op that reads what it rewrites.
    """
    kept = vars(problem).get("_early_updates")
    if kept is None:
        update = problem.graph.phase == UPDATE
        position = np.arange(problem.graph.num_ops, dtype=np.float64)
        earliest = last_before(problem, position) + 0.5
        position[update] = np.minimum(position, earliest)[update]
        kept = vars(problem)["_early_updates"] = -position
    return np.asarray(kept)


def last_before(problem: Problem, position: Array) -> Array:  # [ops]
    """The last position of the ops that must come before each update.

    These are its inputs, and all readers of the parameter that it rewrites. The simulator would let
    an update pass a reader of its parameter; a real step would then be wrong.
    """
    graph = problem.graph
    source = graph.input_op
    target = graph.edge_target
    update = graph.phase == UPDATE
    # Of a parameter: the position of its last reader that is no update.
    last = np.where(graph.is_parameter, -1.0, position)
    readers = graph.is_parameter[source] & ~update[target]
    np.maximum.at(last, source[readers], position[target[readers]])
    before = np.full(graph.num_ops, -1.0)
    np.maximum.at(before, target, last[source])
    return before
