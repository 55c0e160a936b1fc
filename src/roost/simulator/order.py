"""The dispatch order: the one sequence of ops that every device follows, each for its own ops."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import UPDATE, Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.simulator.kernels import ranks


def dispatch_order(problem: Problem, placement: Placement) -> Array:
    """Ops in the order they are dispatched, inputs before consumers, parameters left out.

    With `fifo` the devices choose by themselves as ops become ready; program order then decides
    ties, and the order in which parameters are fetched.
    """
    graph = problem.graph
    if placement.order == "priority":
        assert placement.priority is not None
        order = by_priority(graph, placement.priority)
    elif placement.order == "rank":
        order = by_priority(graph, upward_rank(problem))
    else:
        order = np.arange(graph.num_ops)
    return order[~graph.is_parameter[order]]


def by_priority(graph: Graph, priority: Array) -> Array:
    """Ops by priority, highest first, then program order.

    An op is as urgent as the most urgent that must come after it: what waits for its output, and an
    update of a parameter that it reads, if it comes before that in program order. It would read the
    new value otherwise.
    """
    urgency = np.array(priority, dtype=np.float64)
    ranks.inherit(
        graph.input_start,
        graph.input_op,
        graph.is_parameter,
        np.equal(graph.phase, UPDATE),
        urgency,
    )
    return np.argsort(-urgency, kind="stable")


def upward_rank(problem: Problem) -> Array:  # [ops] seconds
    """The longest path from each op to the end of the step, with times and transfers averaged over
    the devices.

    The rank of HEFT (Topcuoglu, Hariri, Wu 2002). Parameters wait for nothing and have rank 0.
    """
    graph = problem.graph
    cluster = problem.cluster
    time = np.where(problem.allowed, problem.op_time, 0).sum(axis=1) / problem.allowed.sum(axis=1)
    apart = ~np.eye(cluster.num_devices, dtype=bool)
    transfer = np.zeros(graph.num_ops)
    if cluster.num_devices > 1:
        transfer += (
            cluster.latency[apart].mean()
            + graph.output_bytes * cluster.seconds_per_byte[apart].mean()
        )
    rank = np.zeros(graph.num_ops)
    ranks.longest(graph.input_start, graph.input_op, graph.is_parameter, time, transfer, rank)
    return rank


def placed_rank(problem: Problem, device: Array) -> Array:  # [ops] seconds
    """The longest path from each op to the end of the step, under a placement."""
    graph = problem.graph
    cluster = problem.cluster
    own = problem.op_time[np.arange(graph.num_ops), device]
    rank = np.zeros(graph.num_ops)
    ranks.longest_placed(
        graph.input_start,
        graph.input_op,
        graph.is_parameter,
        np.asarray(device, dtype=np.int32),
        own,
        graph.output_bytes.astype(np.float64),
        cluster.latency,
        cluster.seconds_per_byte,
        rank,
    )
    return rank
