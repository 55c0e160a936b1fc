"""Passes from the end of the graph to its start: an op inherits urgency from those that wait for
it."""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import compiled


@compiled
def inherit(start, source, is_parameter, is_update, urgency):
    """Make each op as urgent as the most urgent that must come after it. `urgency` [ops] is
    overwritten.

    That is what takes its output, and what rewrites a parameter that it reads.
    """
    # Of a parameter: the most urgent of the updates seen so far.
    rewritten = np.full(len(urgency), -np.inf)
    for op in range(len(urgency) - 1, -1, -1):
        if not is_update[op]:
            for edge in range(start[op], start[op + 1]):
                if rewritten[source[edge]] > urgency[op]:
                    urgency[op] = rewritten[source[edge]]
        for edge in range(start[op], start[op + 1]):
            before = source[edge]
            if urgency[before] < urgency[op]:
                urgency[before] = urgency[op]
            if is_update[op] and is_parameter[before] and rewritten[before] < urgency[op]:
                rewritten[before] = urgency[op]


@compiled
def longest(start, source, is_parameter, own, transfer, rank):
    """The longest way from each op to the end. `own` and `transfer` [ops] are seconds; `rank` [ops]
    must be zero."""
    for op in range(len(rank) - 1, -1, -1):
        rank[op] += own[op]
        for edge in range(start[op], start[op + 1]):
            before = source[edge]
            if not is_parameter[before]:
                way = transfer[before] + rank[op]
                if way > rank[before]:
                    rank[before] = way


@compiled
def longest_placed(start, source, is_parameter, device, own, size, latency, seconds_per_byte, rank):
    """The same for a placement: `own` [ops] where each op is placed; what stays on a device is not
    transferred."""
    for op in range(len(rank) - 1, -1, -1):
        rank[op] += own[op]
        there = device[op]
        for edge in range(start[op], start[op + 1]):
            before = source[edge]
            if not is_parameter[before]:
                here = device[before]
                way = rank[op]
                if here != there:
                    way += latency[here, there] + size[before] * seconds_per_byte[here, there]
                if way > rank[before]:
                    rank[before] = way
