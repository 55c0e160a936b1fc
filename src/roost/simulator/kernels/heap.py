"""A heap of (time, tag) in two flat arrays; tags are distinct, so the order is total and the same
everywhere.

Four children to a node: half the levels of a binary heap, and the children share a cache line.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import compiled


@compiled
def heap_push(times, tags, size, time, tag):
    """Add an entry to a heap of so many; the caller counts."""
    hole = np.uintp(size)
    one = np.uintp(1)
    two = np.uintp(2)
    while hole > np.uintp(0):
        above = (hole - one) >> two
        if times[above] < time or (times[above] == time and tags[above] < tag):
            break
        times[hole] = times[above]
        tags[hole] = tags[above]
        hole = above
    times[hole] = time
    tags[hole] = tag


@compiled
def heap_pop(times, tags, size):
    """Remove the first entry from a heap of so many, by moving the last into its place; the caller
    counts."""
    count = np.uintp(size) - np.uintp(1)
    time = times[count]
    tag = tags[count]
    hole = np.uintp(0)
    one = np.uintp(1)
    two = np.uintp(2)
    four = np.uintp(4)
    while True:
        child = (hole << two) + one
        if child >= count:
            break
        beyond = child + four
        beyond = beyond if beyond < count else count
        best = child
        best_time = times[child]
        best_tag = tags[child]
        child += one
        while child < beyond:
            if times[child] < best_time or (times[child] == best_time and tags[child] < best_tag):
                best = child
                best_time = times[child]
                best_tag = tags[child]
            child += one
        if time < best_time or (time == best_time and tag < best_tag):
            break
        times[hole] = best_time
        tags[hole] = best_tag
        hole = best
    times[hole] = time
    tags[hole] = tag
