"""The dispatch order: the one sequence of ops that every device follows, each for its own ops."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem


def dispatch_order(problem: Problem, placement: Placement) -> Array:
    """Ops in the order they are dispatched, inputs before consumers, parameters left out.

    With `fifo` the devices choose by themselves as ops become ready; program order then decides ties, and the
    order in which parameters are fetched.
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
    """Ops by priority, highest first, then program order; an op is as urgent as the most urgent that waits for it."""
    urgency = priority.tolist()
    starts, sources = graph.input_start.tolist(), graph.input_op.tolist()
    for op in range(graph.num_ops - 1, -1, -1):
        for source in sources[starts[op] : starts[op + 1]]:
            urgency[source] = max(urgency[source], urgency[op])
    return np.argsort(-np.array(urgency), kind="stable")


def upward_rank(problem: Problem) -> Array:  # [ops] seconds
    """The longest path from each op to the end of the step, with times and transfers averaged over the devices.

    The rank of HEFT (Topcuoglu, Hariri, Wu 2002). Parameters wait for nothing and have rank 0.
    """
    graph, cluster = problem.graph, problem.cluster
    time = np.where(problem.allowed, problem.op_time, 0).sum(axis=1) / problem.allowed.sum(axis=1)
    apart = ~np.eye(cluster.num_devices, dtype=bool)
    if cluster.num_devices > 1:
        transfer = (
            cluster.latency[apart].mean() + graph.output_bytes * cluster.seconds_per_byte[apart].mean()
        ).tolist()
    else:
        transfer = [0.0] * graph.num_ops
    parameter, own = graph.is_parameter.tolist(), time.tolist()
    starts, sources = graph.input_start.tolist(), graph.input_op.tolist()
    rank = [0.0] * graph.num_ops  # of consumers so far: the longest way on from here
    for op in range(graph.num_ops - 1, -1, -1):
        rank[op] += own[op]
        for source in sources[starts[op] : starts[op + 1]]:
            if not parameter[source]:
                rank[source] = max(rank[source], transfer[source] + rank[op])
    return np.array(rank)
