"""Devices that can be exchanged without a change: exact searches look at one order of them only."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem


def alike(problem: Problem) -> list[list[int]]:
    """Sets of two or more devices, any two of which can change places."""
    sets: list[list[int]] = []
    for d in range(problem.cluster.num_devices):
        for members in sets:
            if _exchangeable(problem, members[0], d):
                members.append(d)
                break
        else:
            sets.append([d])
    return [members for members in sets if len(members) > 1]


def _exchangeable(problem: Problem, one: int, other: int) -> bool:
    cluster = problem.cluster
    swap = np.arange(cluster.num_devices)
    swap[[one, other]] = other, one
    columns = (problem.op_time, problem.allowed, cluster.memory[None], cluster.device_gap[None])
    if not all(np.array_equal(rows[:, one], rows[:, other]) for rows in columns):
        return False
    rates = (cluster.seconds_per_byte, cluster.sent_seconds_per_byte)
    busy = (cluster.sender_busy, cluster.receiver_busy)
    tables = (cluster.latency, cluster.sent_latency, *rates, *busy, _bus_gaps(problem))
    if not all(np.array_equal(table, table[np.ix_(swap, swap)]) for table in tables):
        return False
    renamed: dict[int, int] = {}  # each bus must become one bus
    apart = ~np.eye(len(swap), dtype=bool)
    before = cluster.bus[apart].tolist()
    after = cluster.bus[np.ix_(swap, swap)][apart].tolist()
    consistent = all(
        renamed.setdefault(bus, new) == new for bus, new in zip(before, after, strict=True)
    )
    return consistent and len(set(renamed.values())) == len(renamed)


def _bus_gaps(problem: Problem) -> Array:  # [devices, devices] seconds
    cluster = problem.cluster
    return np.where(np.eye(cluster.num_devices, dtype=bool), 0.0, cluster.bus_gap[cluster.bus])
