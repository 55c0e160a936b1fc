"""Orders in which a list scheduler may visit the ops: program, rank, and some between the two.

An op is early where the longest path from the start to it is short. It is urgent where the longest
path from it to the end is long. On unrolled recurrent models neither alone is good. The difference
of the two is the order in which a wave goes through layers and steps of time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._lister.compiled_network import longest_paths
from roost.placers._listing.list_scheduler import ListScheduler
from roost.placers._shared.links import mean_link
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.base import Layout


class _Weights(NamedTuple):
    """Weights of an order between program and rank."""

    head: float  # of the path to an op
    tail: float  # of the path from it to the end
    transfers: float  # on both paths


_BETWEEN = {
    "early": _Weights(1.0, 0.0, 0.25),
    "rather_early": _Weights(3.0, 1.0, 0.5),
    "wave_early": _Weights(3.0, 1.0, 0.0),
    "wave": _Weights(1.0, 1.0, 0.0),
    "wave_sent": _Weights(1.0, 1.0, 1.0),
    "rather_urgent": _Weights(1.0, 3.0, 0.5),
}
ORDERS = ("program", "rank", *_BETWEEN)


class PathTimes(NamedTuple):
    """Seconds on the fastest devices; ops are numbered by their position in the layout."""

    op_time: Array  # [ops]
    head: Array  # [ops] longest path from the start to the op
    tail: Array  # [ops] longest path from the op to the end, with the op


def path_times(units: Units, layout: Layout, transfer_weight: float = 1.0) -> PathTimes:
    """Longest paths with transfers times a weight."""
    cluster = units.problem.cluster
    num_ops = len(layout.op)
    op_time = np.asarray(layout.time).reshape(num_ops, cluster.num_devices)
    fastest = op_time.min(axis=1, initial=np.inf)
    transfer = transfer_weight * mean_link(cluster).seconds(layout.output)
    head = np.zeros(num_ops)
    tail = np.zeros(num_ops)
    longest_paths(layout, fastest, transfer, head, tail)
    return PathTimes(fastest, head, tail)


def scheduler_in(units: Units, order: str, eager: bool = False) -> ListScheduler:
    """The list scheduler under one of these orders; if `eager`, with early updates."""
    if order not in _BETWEEN:
        return ListScheduler.of(units, order, eager)
    problem = units.problem
    anywhere = np.zeros(problem.graph.num_ops, np.int32)
    priority = _priority(units, _BETWEEN[order])
    return ListScheduler.like(units, problem.placement(anywhere, "priority", priority), eager)


def _priority(units: Units, weights: _Weights) -> Array:  # [ops]
    problem = units.problem
    num_ops = problem.graph.num_ops
    layout = Simulator.of(problem).layout(problem.placement(np.zeros(num_ops, np.int32)))
    times = path_times(units, layout, weights.transfers)
    head = np.zeros(num_ops)
    tail = np.zeros(num_ops)
    head[layout.op] = times.head
    tail[layout.op] = times.tail
    # Equals stay in program order; differences below a rounding error count as equal.
    lateness = (weights.head * head - weights.tail * tail) / max(1e-12, head.max() + tail.max())
    rank = np.empty(num_ops)
    rank[np.lexsort((np.arange(num_ops), np.round(lateness, 9)))] = np.arange(num_ops)
    return -rank
