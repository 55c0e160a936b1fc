"""What a policy sees of each group: what it does, how large it is, and which groups it is next to.

As Mirhoseini et al. 2017: kinds of ops, sizes of outputs, neighbours. Differs in: a graph here has
bytes instead of shapes; sizes are logarithms between 0 and 1, without which nothing is learned;
position and time are told too.
"""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD
from roost.core.problem import Problem

_OUTPUTS = 5  # of a group, the largest, are told one by one


def group_features(problem: Problem, unit: Array) -> Array:  # [groups, features] f4
    """Features of the groups that ops are in, for `unit` [ops] numbered from 0."""
    count = int(unit.max()) + 1
    parts = [
        _kinds(problem, unit, count),
        _sizes(problem, unit, count),
        _largest_outputs(problem, unit, count),
        np.linspace(0.0, 1.0, count)[:, None],
        _adjacency(problem, unit, count),
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def speed_prior(problem: Problem, unit: Array) -> Array:  # [groups, devices] f4
    """Minus the logarithm of how much longer each group takes on a device than on its fastest.

    Groups that take no time, such as parameters, are like all the others together.
    """
    count = int(unit.max()) + 1
    time = np.zeros((count, problem.cluster.num_devices))
    np.add.at(time, unit, np.where(np.isfinite(problem.op_time), problem.op_time, 0.0))
    total = time.sum(axis=0)
    time = np.where(time.max(axis=1, keepdims=True) > 0, time, total) + 1e-12
    return np.asarray(-np.log(time / time.min(axis=1, keepdims=True)), dtype=np.float32)


def _kinds(problem: Problem, unit: Array, count: int) -> Array:
    """The share of each kind among the ops of a group: with a weight for each kind this is their
    mean vector."""
    _, kind = np.unique(problem.graph.kinds, return_inverse=True)
    found = np.zeros((count, int(kind.max()) + 1))
    np.add.at(found, (unit, kind), 1.0)
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def _sizes(problem: Problem, unit: Array, count: int) -> Array:
    graph = problem.graph
    time = np.where(np.isfinite(problem.op_time), problem.op_time, 0.0)
    columns = [
        time.min(axis=1),
        time.mean(axis=1),
        np.where(graph.is_parameter, graph.output_bytes, 0),
        np.where(graph.is_parameter, 0, graph.output_bytes),
        graph.workspace_bytes,
        np.ones(graph.num_ops),
        graph.phase == FORWARD,
        graph.phase == BACKWARD,
    ]
    apart = unit[graph.input_op] != unit[graph.edge_target]
    found = np.stack([np.bincount(unit, column, count) for column in columns], axis=1)
    sent = np.bincount(
        unit[graph.input_op[apart]], graph.output_bytes[graph.input_op[apart]], count
    )
    read = np.bincount(
        unit[graph.edge_target[apart]], graph.output_bytes[graph.input_op[apart]], count
    )
    return _scaled(np.concatenate([found, sent[:, None], read[:, None]], axis=1))


def _largest_outputs(problem: Problem, unit: Array, count: int) -> Array:
    found = np.zeros((count, _OUTPUTS))
    size = problem.graph.output_bytes
    rank = np.lexsort((-size, unit))
    place = np.arange(len(rank)) - np.searchsorted(unit[rank], unit[rank])
    kept = place < _OUTPUTS
    found[unit[rank[kept]], place[kept]] = size[rank[kept]]
    return np.asarray(np.log1p(found) / max(1.0, float(np.log1p(found).max())))


def _scaled(values: Array) -> Array:
    """Each column by its largest, and its logarithm over six powers of ten: both between 0 and
    1."""
    share = values / np.maximum(values.max(axis=0), 1e-30)
    return np.concatenate(
        [share, np.maximum(0.0, 1.0 + np.log10(np.maximum(share, 1e-30)) / 6.0)], axis=1
    )


def _adjacency(problem: Problem, unit: Array, count: int) -> Array:  # [groups, 2 groups]
    """Which groups it reads from, and which read from it."""
    found = np.zeros((count, 2 * count))
    source, target = unit[problem.graph.input_op], unit[problem.graph.edge_target]
    apart = source != target
    found[target[apart], source[apart]] = 1.0
    found[source[apart], count + target[apart]] = 1.0
    return found
