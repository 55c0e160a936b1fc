"""Orders in which a list scheduler may visit the ops: program order, rank order, and some between
early and urgent.

An op is early where the longest way to it from the start is short, and urgent where the longest way
from it to the end is long. On unrolled recurrent models neither alone is good; the difference of
the two is the order in which a wave goes through layers and steps of time.
"""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.placers._lister.compiled_network import paths
from roost.placers._listing.list_scheduler import ListScheduler
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator

# Of an order between: how much the way to an op weighs, that from it to the end, and transfers on
# both.
_BETWEEN = {
    "early": (1.0, 0.0, 0.25),
    "rather_early": (3.0, 1.0, 0.5),
    "wave_early": (3.0, 1.0, 0.0),
    "wave": (1.0, 1.0, 0.0),
    "wave_sent": (1.0, 1.0, 1.0),
    "rather_urgent": (1.0, 3.0, 0.5),
}
ORDERS = ("program", "rank", *_BETWEEN)


def prepared(units: Units, order: str, eager: bool = False) -> ListScheduler:
    """A problem under one of these orders; if `eager`, with updates as early as can be."""
    if order not in _BETWEEN:
        return ListScheduler.of(units, order, eager)
    problem = units.problem
    nowhere = np.zeros(problem.graph.num_ops, np.int32)
    return ListScheduler.like(
        units, problem.placement(nowhere, "priority", _priority(units, order)), eager
    )


def _priority(units: Units, order: str) -> Array:  # [ops]
    to_it, from_it, sent = _BETWEEN[order]
    head, tail = _ways(units, sent)
    # Equals stay in program order: what differs by less than a rounding error is equal.
    late = np.round((to_it * head - from_it * tail) / max(1e-12, head.max() + tail.max()), 9)
    rank = np.empty(len(late))
    rank[np.lexsort((np.arange(len(late)), late))] = np.arange(len(late))
    return -rank


def _ways(units: Units, sent: float) -> tuple[Array, Array]:
    """The longest ways to each op and from it [ops] in seconds, with so large a part of each
    transfer."""
    problem = units.problem
    cluster, num_ops, num_devices = (
        problem.cluster,
        problem.graph.num_ops,
        problem.cluster.num_devices,
    )
    layout = Simulator.of(problem).layout(problem.placement(np.zeros(num_ops, np.int32)))
    apart = ~np.eye(num_devices, dtype=bool)
    fastest = np.asarray(layout.time).reshape(-1, num_devices).min(axis=1)
    transfer = np.zeros(len(fastest))
    if num_devices > 1:
        transfer = sent * (
            cluster.latency[apart].mean() + layout.output * cluster.seconds_per_byte[apart].mean()
        )
    own_head, own_tail = np.zeros(len(fastest)), np.zeros(len(fastest))
    paths(layout, fastest, transfer, own_head, own_tail)
    head, tail = np.zeros(num_ops), np.zeros(num_ops)
    head[layout.op], tail[layout.op] = own_head, own_tail
    return head, tail
