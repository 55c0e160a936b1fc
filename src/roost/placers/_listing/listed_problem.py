"""The arrays of a problem that the compiled list schedulers read: units, and related ops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.placers._listing.held_memory import MOMENTS, Listing
from roost.placers._listing.partial_schedule import KINDS
from roost.placers._shared.links import mean_link
from roost.placers._shared.units import Units
from roost.simulator.kernels.base import Layout
from roost.simulator.order import upward_rank

# How many ops ahead a list scheduler looks for a more urgent one.
_SOON = 8

# An output lives long where its last consumer is more than this share of the order away.
_LONG = 0.1


def listing_of(units: Units, layout: Layout) -> Listing:
    """The listing of a problem under the order of a layout."""
    problem = units.problem
    num_ops = len(layout.op)
    position = np.arange(num_ops)
    unit = units.unit[layout.op]
    by_unit = np.argsort(unit, kind="stable")
    bits = np.uint64(1) << np.arange(problem.cluster.num_devices, dtype=np.uint64)
    source = layout.previous.astype(np.int64)
    target = np.repeat(position, layout.num_inputs)
    last = position.copy()
    np.maximum.at(last, source, target)
    moments = _moments(layout, last)
    first = np.searchsorted(moments, position, "left")
    beyond = np.searchsorted(moments, position, "right")
    lasting = units.resident_bytes.copy()
    need = units.resident_bytes.copy()
    long = last - position > _LONG * num_ops
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
        before=_ops_before(problem, layout),
        partner=partner,
        partner_time=partner_time,
        rival=rival,
        rival_home=rival_home,
        copies_in_memory=problem.cluster.copies_in_memory,
    )


def _moments(layout: Layout, last: Array) -> Array:  # [moments] ascending
    """The op of each stretch of the order at which one device would hold most."""
    num_ops = len(layout.op)
    change = layout.output.copy()
    np.subtract.at(change, np.minimum(last + 1, num_ops - 1), layout.output)
    held = np.cumsum(change) + layout.workspace
    edges = np.linspace(0, num_ops, int(MOMENTS) + 1).astype(np.int64).tolist()
    most = [i + int(held[i:j].argmax()) for i, j in pairwise(edges) if i < j]
    return np.array(most, dtype=np.int64)


def _ops_before(problem: Problem, layout: Layout) -> Array:  # [ops * KINDS]
    """The op before of the same module, of its parent, and of the same role; -1 if none."""
    before = np.full((len(layout.op), int(KINDS)), -1, np.int32)
    for column, keys in enumerate(_belonging(problem)):
        key = keys[layout.op]
        order = np.argsort(key, kind="stable")
        earlier = order[:-1]
        later = order[1:]
        same = (key[later] == key[earlier]) & (key[later] >= 0)
        before[later[same], column] = earlier[same]
    return before.ravel()


def _belonging(problem: Problem) -> Array:  # [KINDS, ops]
    """A number for the module of each op, for its parent and for its role, -1 where it has none.

    It is the same under every order, and slow to make.
    """
    kept = vars(problem).get("_belonging")
    if kept is None:
        graph = problem.graph
        kept = np.full((int(KINDS), graph.num_ops), -1, np.int64)
        numbers: list[dict[object, int]] = [{} for _ in kept]
        for op, module in enumerate(graph.modules):
            plain = ".".join(part.partition("@")[0] for part in module.split("."))
            role = (plain, graph.kinds[op], int(graph.phase[op])) if module else ""
            for column, name in enumerate((module, module.rpartition(".")[0], role)):
                if name:
                    number_of = numbers[column]
                    kept[column, op] = number_of.setdefault(name, len(number_of))
        vars(problem)["_belonging"] = kept
    return np.asarray(kept)


def _partners(
    problem: Problem, layout: Layout, source: Array, target: Array
) -> tuple[Array, Array]:
    """[ops] the earlier op whose output meets an op's own in a consumer, and seconds to join them.

    Where there are several, the pair with the most bytes in the smaller of the two. Only neighbours
    in a consumer's inputs, from the smallest to the biggest, are compared.
    """
    num_ops = len(layout.op)
    partner = np.full(num_ops, -1, np.int32)
    nbytes = np.zeros(num_ops)
    order = np.lexsort((source, layout.output[source], target))
    first = source[order][:-1]
    second = source[order][1:]
    met = target[order][:-1] == target[order][1:]
    early = np.minimum(first, second)[met]
    late = np.maximum(first, second)[met]
    size = np.minimum(layout.output[early], layout.output[late])
    ascending = np.lexsort((early, size))  # the last write stays: the most bytes
    partner[late[ascending]] = early[ascending]
    nbytes[late[ascending]] = size[ascending]
    return partner, mean_link(problem.cluster).seconds(nbytes)


def _rivals(problem: Problem, layout: Layout, source: Array, target: Array) -> tuple[Array, Array]:
    """[ops] the first of the next ops with a higher upward rank, and the biggest input of that."""
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
