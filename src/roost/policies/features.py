"""Features of a group that a policy sees: its kinds of ops, its sizes, and its neighbours.

They follow Mirhoseini et al. 2017. Differs in: a graph here has bytes in place of shapes. Sizes are
logarithms between 0 and 1, as policies learn nothing without that. Position and time are added.
"""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD
from roost.core.problem import Problem

_OUTPUTS = 5  # the largest outputs of a group are features of their own


def group_features(problem: Problem, unit: Array) -> Array:  # [groups, features] f4
    """Features of the groups of ops, for the group number of each op, `unit` [ops]."""
    count = int(unit.max()) + 1
    parts = [
        _kinds(problem, unit, count),
        _sizes(problem, unit, count),
        _largest_outputs(problem, unit, count),
        np.linspace(0.0, 1.0, count)[:, None],
        _neighbours(problem, unit, count),
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def speed_prior(problem: Problem, unit: Array) -> Array:  # [groups, devices] f4
    """Minus the logarithm of how much longer each group takes on a device than on its fastest.

    A group that takes no time, such as parameters, counts like all groups together.
    """
    time = np.zeros((int(unit.max()) + 1, problem.cluster.num_devices))
    np.add.at(time, unit, problem.op_time)
    total = time.sum(axis=0)
    time = np.where(time.max(axis=1, keepdims=True) > 0, time, total) + 1e-12
    return np.asarray(-np.log(time / time.min(axis=1, keepdims=True)), dtype=np.float32)


def _kinds(problem: Problem, unit: Array, count: int) -> Array:  # [groups, kinds]
    """Share of each kind among the ops of a group."""
    _, kind = np.unique(problem.graph.kinds, return_inverse=True)
    num_ops = np.zeros((count, int(kind.max()) + 1))
    np.add.at(num_ops, (unit, kind), 1.0)
    return np.asarray(num_ops / num_ops.sum(axis=1, keepdims=True))


def _sizes(problem: Problem, unit: Array, count: int) -> Array:
    """Time, bytes, number of ops and traffic of each group, scaled."""
    graph = problem.graph
    time = problem.op_time
    of_ops = [
        time.min(axis=1),
        time.mean(axis=1),
        np.where(graph.is_parameter, graph.output_bytes, 0),
        np.where(graph.is_parameter, 0, graph.output_bytes),
        graph.workspace_bytes,
        np.ones(graph.num_ops),
        graph.phase == FORWARD,
        graph.phase == BACKWARD,
    ]
    source = unit[graph.input_op]
    target = unit[graph.edge_target]
    apart = source != target
    traffic = graph.output_bytes[graph.input_op[apart]]
    columns = [np.bincount(unit, column, count) for column in of_ops]
    columns += [np.bincount(ends[apart], traffic, count) for ends in (source, target)]
    return _scaled(np.stack(columns, axis=1))


def _scaled(values: Array) -> Array:
    """Each column over its largest, and the logarithm of that over six powers of ten.

    Both are between 0 and 1.
    """
    share = values / np.maximum(values.max(axis=0), 1e-30)
    log_share = 1.0 + np.log10(np.maximum(share, 1e-30)) / 6.0
    return np.concatenate([share, np.maximum(0.0, log_share)], axis=1)


def _largest_outputs(problem: Problem, unit: Array, count: int) -> Array:  # [groups, _OUTPUTS]
    """Logarithms of the sizes of the largest outputs of each group, the largest first, scaled."""
    size = problem.graph.output_bytes
    op = np.lexsort((-size, unit))
    rank = np.arange(len(op)) - np.searchsorted(unit[op], unit[op])  # within its group
    op = op[rank < _OUTPUTS]
    rank = rank[rank < _OUTPUTS]
    largest = np.zeros((count, _OUTPUTS))
    largest[unit[op], rank] = size[op]
    logs = np.log1p(largest)
    return np.asarray(logs / max(1.0, float(logs.max())))


def _neighbours(problem: Problem, unit: Array, count: int) -> Array:  # [groups, 2 groups]
    """1 for the groups that a group reads from, then 1 for the groups that read from it."""
    source = unit[problem.graph.input_op]
    target = unit[problem.graph.edge_target]
    apart = source != target
    source = source[apart]
    target = target[apart]
    adjacency = np.zeros((count, 2 * count))
    adjacency[target, source] = 1.0
    adjacency[source, count + target] = 1.0
    return adjacency
