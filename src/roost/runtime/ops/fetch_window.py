"""Where in a device's window each fetched parameter lies, worked out before the step.

Copies that are there at the same time never share a byte. A copy may lie on bytes of others that
are gone by then: all of them were given up by it or by copies asked for before it, so it is enough
that a fetch waits until the device has run what it was told before it asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roost.core.arrays import Array
from roost.simulator.reference import Copy

# As PyTorch aligns what it allocates: kernels are chosen by it, and so are the last bits of a sum.
ALIGNMENT = 512


def lifetimes(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """For each copy, in the order asked for: its own number, and that of the copy it makes room
    for, or their count."""
    number = {id(copy): place for place, copy in enumerate(copies)}
    ends = [len(copies)] * len(copies)
    for place, copy in enumerate(copies):
        for old in copy.replaces:
            ends[number[id(old)]] = place
    return list(enumerate(ends))


def packed(sizes: Sequence[int], lifetimes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """The offset of each copy, and the bytes of the whole: the better of first come and largest
    first."""
    if not sizes:
        return [], 0
    room = -(-np.asarray(sizes, dtype=np.int64) // ALIGNMENT) * ALIGNMENT
    begin, end = np.asarray(lifetimes, dtype=np.int64).T
    tries = [
        _placed(order, room, begin, end)
        for order in (np.arange(len(room)), np.argsort(-room, kind="stable"))
    ]
    offsets, total = min(tries, key=lambda found: found[1])
    return offsets.tolist(), total


def _placed(order: Array, room: Array, begin: Array, end: Array) -> tuple[Array, int]:
    """Each in turn at the lowest offset where nothing lies that is there at the same time."""
    offsets, done = np.zeros(len(room), dtype=np.int64), np.zeros(len(room), dtype=bool)
    for copy in order.tolist():
        beside = np.flatnonzero(done & (begin < end[copy]) & (begin[copy] < end))
        if len(beside):
            beside = beside[np.argsort(offsets[beside], kind="stable")]
            ends = np.maximum.accumulate(offsets[beside] + room[beside])
            free_from = np.concatenate([[0], ends])  # before each of them, and after the last
            fits = np.flatnonzero(offsets[beside] - free_from[:-1] >= room[copy])
            offsets[copy] = free_from[fits[0] if len(fits) else -1]
        done[copy] = True
    return offsets, int((offsets + room).max())
