"""Contradiction: suppose a shorter step, and follow the consequences until no device is left.

Destructive bounds: Klein, Scholl 1999. Differs in: what is forced is which device an op cannot be
on, since the longest way through it there is too long, and which ops share a device, since a
transfer between them would take too long.
"""

from __future__ import annotations

import time

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.bounds.heads_tails import Ends, through
from roost.bounds.interval import interval
from roost.bounds.work import work
from roost.core.arrays import Array

_ROUNDS = 12  # of consequences
_CLOSE = 2e-3  # of the bound, where halving on is not worth its time


def contradiction(relaxed: Relaxed, low: float, high: float, seconds: float) -> float:
    """The longest step time, between a bound and a known time, that is proved to be a bound."""
    stop = time.monotonic() + seconds
    if not np.isfinite(high):
        return low
    while high - low > _CLOSE * low and time.monotonic() < stop:
        middle = (low + high) / 2
        if impossible(relaxed, middle, stop):
            low = middle
        else:
            high = middle
    return low


def impossible(relaxed: Relaxed, limit: float, stop: float = np.inf) -> bool:
    """True where a step shorter than the limit is ruled out."""
    for _ in range(_ROUNDS):
        ends = Ends.of(relaxed)
        possible = through(relaxed, ends) < limit
        if not possible.any(axis=1).all():
            return True
        closed = bool((np.isfinite(relaxed.time) & ~possible).any())
        relaxed = relaxed.within(possible)
        one, other = _together(relaxed, ends, limit)
        if len(one):
            relaxed = relaxed.joined(one, other)
        if not relaxed.possible:
            return True
        if time.monotonic() > stop:
            return False
        if not closed and not len(one):
            return interval(relaxed, ends) >= limit
        if work(relaxed) >= limit:
            return True
    return interval(relaxed, Ends.of(relaxed)) >= limit


def _together(relaxed: Relaxed, ends: Ends, limit: float) -> tuple[Array, Array]:
    """Producers and consumers that must share a device for a step to be shorter than the limit."""
    graph = relaxed.problem.graph
    cluster = relaxed.problem.cluster
    apart = ~graph.is_parameter[graph.input_op] & (
        relaxed.unit[graph.input_op] != relaxed.unit[graph.edge_target]
    )
    source = graph.input_op[apart]
    target = graph.edge_target[apart]
    done = ends.head[source] + relaxed.time[source]
    left = relaxed.time[target] + ends.tail[target]
    size = graph.output_bytes[source].astype(float)
    best = np.full(len(source), np.inf)
    for d in range(cluster.num_devices):
        for e in range(cluster.num_devices):
            if d != e:
                takes = cluster.sent_latency[d, e] + size * cluster.sent_seconds_per_byte[d, e]
                best = np.minimum(best, done[:, d] + takes + left[:, e])
    forced = best >= limit
    return source[forced], target[forced]
