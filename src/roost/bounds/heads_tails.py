"""Heads and tails: the earliest start of each op on each device, and the least time after it.

Carlier, Pinson 1989 for one machine; with transfers as in Fernandez, Bussell 1973 and its
successors. Differs in: one head for each op *and device*, since devices are unlike and links too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.bounds._longest import heads as _heads
from roost.bounds._relaxed import Relaxed
from roost.core.arrays import Array
from roost.core.graph import UPDATE


@dataclass(frozen=True, eq=False)
class Ends:
    """The earliest start of each op, and the least time from its finish to the end of the step."""

    head: Array  # [ops, devices] seconds, infinite where the op may not run
    tail: Array  # [ops, devices] seconds

    @staticmethod
    def of(relaxed: Relaxed) -> Ends:
        graph = relaxed.problem.graph
        cluster = relaxed.problem.cluster
        closed = np.where(np.isfinite(relaxed.time), 0.0, np.inf)
        head = closed.copy()
        tail = closed + _ways_home(relaxed)
        # A parameter takes no time and is there from the start: it is fetched, or is at home where
        # its reader runs.
        _walk(
            relaxed,
            graph.edge_target,
            graph.input_op,
            False,
            cluster.latency,
            cluster.seconds_per_byte,
            head,
        )
        # What reads a parameter does not come after it.
        follows = ~graph.is_parameter[graph.input_op]
        source = graph.input_op[follows]
        target = graph.edge_target[follows]
        _walk(
            relaxed,
            source,
            target,
            True,
            cluster.sent_latency.T,
            cluster.sent_seconds_per_byte.T,
            tail,
        )
        return Ends(head, tail)


def _walk(
    relaxed: Relaxed,
    later: Array,
    earlier: Array,
    backwards: bool,
    latency: Array,
    per_byte: Array,
    found: Array,
) -> None:
    """Heads along the edges from `earlier` to `later`; backwards these are the tails. Copies, for
    one type of array."""
    graph = relaxed.problem.graph
    by_op = np.argsort(later, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(later, minlength=graph.num_ops))]).astype(
        np.int64
    )
    producer = later if backwards else earlier
    _heads(
        np.arange(graph.num_ops)[:: -1 if backwards else 1].copy(),
        starts,
        earlier[by_op].astype(np.int64),
        graph.output_bytes[producer[by_op]].astype(float),
        relaxed.unit.copy(),
        relaxed.time.copy(),
        np.array(latency, order="C"),
        np.array(per_byte, order="C"),
        relaxed.problem.cluster.device_gap.copy(),
        backwards,
        found,
    )


def _ways_home(relaxed: Relaxed) -> Array:  # [ops, devices] seconds
    """Seconds to send new values home after an update, to the nearest home of its parameters."""
    graph = relaxed.problem.graph
    cluster = relaxed.problem.cluster
    found = np.zeros(relaxed.time.shape)
    source = graph.input_op
    target = graph.edge_target
    homes = np.isfinite(relaxed.time)
    for edge in np.flatnonzero(
        graph.is_parameter[source] & (graph.phase[target] == UPDATE)
    ).tolist():
        parameter = source[edge]
        op = target[edge]
        if homes[parameter].all():
            continue
        # 0 on the diagonal.
        takes = cluster.latency + graph.output_bytes[parameter] * cluster.sent_seconds_per_byte
        nearest = np.where(homes[parameter], takes, np.inf).min(axis=1)
        found[op] = np.maximum(found[op], np.where(homes[op], nearest, 0.0))
    return found


def through(relaxed: Relaxed, ends: Ends) -> Array:  # [ops, devices] seconds
    """The least step time with each op on each device."""
    return np.asarray(ends.head + relaxed.time + ends.tail)


def heads_tails(relaxed: Relaxed) -> float:
    """The longest way through any op, on the device that suits it best."""
    return float(through(relaxed, Ends.of(relaxed)).min(axis=1).max())
