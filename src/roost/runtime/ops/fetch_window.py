"""Offsets of fetched parameters in the window of a device, computed before the step.

`residents.py` makes the window. Copies that exist at the same time never share a byte. A copy may
lie on bytes of earlier copies: the device gave them up before it asked for this copy. So a fetch
only has to wait until the device has done the work it was given before it asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roost.core.arrays import Array
from roost.simulator.reference import Copy

# The alignment of PyTorch: it chooses kernels by it, and with them the last bits of a sum.
ALIGNMENT = 512


def lifetimes(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """Give for each copy its number, and the number of the copy that replaces it, or their count.

    Copies are in the order in which they are asked for.
    """
    number = {id(copy): place for place, copy in enumerate(copies)}
    ends = [len(copies)] * len(copies)
    for place, copy in enumerate(copies):
        for old in copy.replaces:
            ends[number[id(old)]] = place
    return list(enumerate(ends))


def packed(sizes: Sequence[int], lifetimes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Give the offset of each copy and the bytes of the whole window.

    Tries the copies in their order, and the largest first; takes the smaller window.
    """
    if not sizes:
        return [], 0
    room = -(-np.asarray(sizes, dtype=np.int64) // ALIGNMENT) * ALIGNMENT
    begin, end = np.asarray(lifetimes, dtype=np.int64).T
    orders = (np.arange(len(room)), np.argsort(-room, kind="stable"))
    windows = [_placed(order, room, begin, end) for order in orders]
    offsets, total = min(windows, key=lambda window: window[1])
    return offsets.tolist(), total


def _placed(order: Array, room: Array, begin: Array, end: Array) -> tuple[Array, int]:
    """Place each copy at the lowest offset that no copy of the same time covers."""
    offsets = np.zeros(len(room), dtype=np.int64)
    done = np.zeros(len(room), dtype=bool)
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
