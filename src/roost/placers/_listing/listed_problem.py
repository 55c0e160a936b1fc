"""A problem as the compiled list schedulers read it: units by position in the order, and what
belongs together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.placers._listing.linear_rules import KINDS
from roost.placers._listing.memory_room import MOMENTS, Listing
from roost.placers._shared.units import Units
from roost.simulator.kernels.base import Layout
from roost.simulator.order import upward_rank

# How many ops ahead a list scheduler looks for a more urgent one.
_SOON = 8

# An output lives long where its last consumer is more than this share of the order away.
_LONG = 0.1


def listing_of(units: Units, layout: Layout) -> Listing:
    """What list schedulers read of a problem beside its layout, under the order of that layout."""
    problem = units.problem
    num_ops = len(layout.op)
    unit = units.unit[layout.op]
    by_unit = np.argsort(unit, kind="stable")
    bits = np.uint64(1) << np.arange(problem.cluster.num_devices, dtype=np.uint64)
    source = layout.previous.astype(np.int64)
    target = np.repeat(np.arange(num_ops), layout.num_inputs)
    last = np.arange(num_ops)
    np.maximum.at(last, source, target)
    moments = _moments(layout, last)
    first, beyond = (
        np.searchsorted(moments, np.arange(num_ops), side) for side in ("left", "right")
    )
    lasting, need = units.resident_bytes.copy(), units.resident_bytes.copy()
    long = last - np.arange(num_ops) > _LONG * num_ops
    np.add.at(lasting, unit[long], layout.output[long])
    kept = beyond[last] > first
    np.add.at(need, unit[kept], layout.output[kept])
    brought = beyond[target] > first[source]
    np.add.at(need, unit[target[brought]], layout.output[source[brought]])
    partner, partner_time = _partners(problem, layout, source, target)
    rival, rival_home = _rivals(problem, layout, source, target)
    return Listing(
        unit=unit.astype(np.uint32),
        unit_start=np.searchsorted(unit[by_unit], np.arange(units.num_units + 1)).astype(np.uint32),
        unit_op=by_unit.astype(np.uint32),
        unit_time=np.ascontiguousarray(units.time).ravel(),
        allowed=(units.allowed * bits).sum(axis=1, dtype=np.uint64),
        resident=units.resident_bytes,
        lasting=lasting,
        need=need,
        first=first.astype(np.uint8),
        beyond=beyond.astype(np.uint8),
        last_beyond=beyond[last].astype(np.uint8),
        before=_before(problem, layout),
        partner=partner,
        partner_time=partner_time,
        rival=rival,
        rival_home=rival_home,
        copies_in_memory=problem.cluster.copies_in_memory,
    )


def _moments(layout: Layout, last: Array) -> Array:
    """[moments] ascending: in each stretch of the order, the op at which one device would hold
    most."""
    num_ops = len(layout.op)
    change = layout.output.copy()
    np.subtract.at(change, np.minimum(last + 1, num_ops - 1), layout.output)
    held = np.cumsum(change) + layout.workspace
    edges = np.linspace(0, num_ops, int(MOMENTS) + 1).astype(np.int64).tolist()
    return np.array(
        [i + int(held[i:j].argmax()) for i, j in pairwise(edges) if i < j], dtype=np.int64
    )


def _before(problem: Problem, layout: Layout) -> Array:
    """[ops * KINDS] the op before of the same module, of its parent, and of the same role; -1 where
    there is none."""
    found = np.full((len(layout.op), int(KINDS)), -1, np.int32)
    for column, keys in enumerate(_belonging(problem)):
        key = keys[layout.op]
        order = np.argsort(key, kind="stable")
        same = (key[order][1:] == key[order][:-1]) & (key[order][1:] >= 0)
        found[order[1:][same], column] = order[:-1][same]
    return found.ravel()


def _belonging(problem: Problem) -> Array:  # [KINDS, ops]
    """A number for the module of each op, for its parent and for its role, -1 where it has none.

    It is the same under every order, and slow to make.
    """
    kept = vars(problem).get("_belonging")
    if kept is None:
        graph = problem.graph
        kept = np.full((int(KINDS), graph.num_ops), -1, np.int64)
        known: list[dict[object, int]] = [{} for _ in kept]
        for op, module in enumerate(graph.modules):
            plain = ".".join(part.partition("@")[0] for part in module.split("."))
            role = (plain, graph.kinds[op], int(graph.phase[op])) if module else ""
            for column, name in enumerate((module, module.rpartition(".")[0], role)):
                if name:
                    kept[column, op] = known[column].setdefault(name, len(known[column]))
        vars(problem)["_belonging"] = kept
    return np.asarray(kept)


def _partners(
    problem: Problem, layout: Layout, source: Array, target: Array
) -> tuple[Array, Array]:
    """[ops] the earlier op whose output an op's own meets in a consumer, and the seconds it takes
    to join them.

    Where there are several, the pair with the most bytes in the smaller of the two. Only neighbours
    in a consumer's inputs, from the smallest to the biggest, are compared.
    """
    num_ops, cluster = len(layout.op), problem.cluster
    partner, best = np.full(num_ops, -1, np.int32), np.zeros(num_ops)
    order = np.lexsort((source, layout.output[source], target))
    first, second = source[order][:-1], source[order][1:]
    met = target[order][:-1] == target[order][1:]
    early, late = np.minimum(first, second)[met], np.maximum(first, second)[met]
    size = np.minimum(layout.output[early], layout.output[late])
    picked = np.lexsort((early, size))
    partner[late[picked]] = early[picked]  # what is written last stays: the most bytes
    best[late[picked]] = size[picked]
    apart = ~np.eye(cluster.num_devices, dtype=bool)
    if cluster.num_devices < 2:
        return partner, best * 0
    return partner, cluster.latency[apart].mean() + best * cluster.seconds_per_byte[apart].mean()


def _rivals(problem: Problem, layout: Layout, source: Array, target: Array) -> tuple[Array, Array]:
    """[ops] the first of the next few ops that has a higher upward rank, and the biggest input of
    that op."""
    num_ops = len(layout.op)
    rank = upward_rank(problem)[layout.op]
    rival = np.full(num_ops, -1, np.int32)
    for ahead in range(min(_SOON, num_ops - 1), 0, -1):
        more = np.flatnonzero(rank[ahead:] > rank[: num_ops - ahead])
        rival[more] = more + ahead
    home = np.full(num_ops + 1, -1, np.int32)
    order = np.argsort(layout.output[source], kind="stable")
    home[target[order]] = source[order]
    rival_home = home[rival]
    rival_home[rival_home >= np.arange(num_ops)] = -1
    return rival, rival_home
