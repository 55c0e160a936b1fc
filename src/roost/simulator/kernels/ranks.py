"""Passes over the graph from its end to its start: who is urgent because of what waits for it."""

from __future__ import annotations

from roost.simulator.kernels.base import compiled


@compiled
def inherit(start, source, urgency):
    """Make each op as urgent as the most urgent that waits for it. `urgency` [ops] is overwritten."""
    for op in range(len(urgency) - 1, -1, -1):
        for edge in range(start[op], start[op + 1]):
            if urgency[source[edge]] < urgency[op]:
                urgency[source[edge]] = urgency[op]


@compiled
def longest(start, source, is_parameter, own, transfer, rank):
    """The longest way from each op to the end. `own` and `transfer` [ops] are seconds; `rank` [ops] must be zero."""
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
    """The same for a placement: `own` [ops] where each op is placed; what stays on a device is not transferred."""
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
