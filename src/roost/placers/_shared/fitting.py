"""Placements made to fit: units are moved away from devices that overflow."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD, Graph
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.placers import Evaluate
from roost.placers._shared.layers import Layers
from roost.placers._shared.orders import common_orders, own_orders
from roost.placers._shared.units import Units

_ATTEMPTS = 8  # most repairs take two or three
_MARGIN = 0.005  # of the memory of a device, at first


def best_reordered(problem: Problem, evaluate: Evaluate, trial: Trial) -> Trial:
    """The trial, or its devices in an order made for them, whichever is better."""
    return best_of([trial, *evaluate(own_orders(problem, trial.placement.device))])


def lasting(graph: Graph) -> Array:  # [ops] bool
    """Ops whose output is held for long: parameters, and activations for the backward pass.

    Not the gradients of parameters: where memory is short, updates run as soon as they can.
    """
    source = graph.phase[graph.input_op]
    target = graph.phase[graph.edge_target]
    found = graph.is_parameter.copy()
    found[graph.input_op[(source <= FORWARD) & (target > FORWARD)]] = True
    return found


def lasting_bytes(units: Units) -> Array:  # [units] i8
    """Bytes that each unit holds for long."""
    graph = units.problem.graph
    lasts = lasting(graph)
    return np.bincount(
        units.unit[lasts], graph.output_bytes[lasts], minlength=units.num_units
    ).astype(np.int64)


def fastest_allowed(units: Units, wish: Array) -> Array:  # [units] i4
    """The wished device of each unit where it may run there, else the fastest on which it may."""
    wish = np.asarray(wish, dtype=np.int32)
    may = units.allowed[np.arange(units.num_units), wish]
    fastest = np.where(units.allowed, units.time, np.inf).argmin(axis=1)
    return np.where(may, wish, fastest).astype(np.int32)


def fitted(
    units: Units, evaluate: Evaluate, unit_device: Array, layers: Layers | None = None
) -> Trial:
    """The best trial of these devices [units] in any order, after moves that make them fit."""
    problem = units.problem
    unit_device = fastest_allowed(units, unit_device)
    trials = [best_of(evaluate(common_orders(problem, units.devices(unit_device))))]
    chain: Array | None = None
    for attempt in range(_ATTEMPTS):
        if trials[-1].feasible:
            break
        if chain is None:
            chain = (layers or Layers.of(problem.graph)).chain(units)
        moved = _relieved(
            units, chain, unit_device, trials[-1].peak_memory - problem.cluster.memory, attempt
        )
        if (moved == unit_device).all():
            break
        unit_device = moved
        trials.append(best_of(evaluate(common_orders(problem, units.devices(unit_device)))))
    return best_reordered(problem, evaluate, best_of(trials))


# [units] i4.
def _relieved(units: Units, chain: Array, unit_device: Array, excess: Array, attempt: int) -> Array:
    """Devices [units] after a run of units has left each device with `excess` bytes too many.

    What a move frees is an estimate, and copies need room as well: with each attempt the margin is
    doubled.
    """
    unit_device = unit_device.copy()
    size = lasting_bytes(units)
    margin = _MARGIN * 2.0**attempt * units.problem.cluster.memory
    need = excess + margin
    room = -excess - margin
    quickest = np.argsort(
        np.where(units.allowed, units.time, 0.0).sum(axis=0), kind="stable"
    ).tolist()
    for crowded in np.flatnonzero(excess > 0).tolist():
        for target in quickest:
            if need[crowded] > 0 and room[target] > 0:
                here = chain[(unit_device[chain] == crowded) & units.allowed[chain, target]]
                run = _cheapest_run(
                    units,
                    here,
                    crowded,
                    target,
                    size[here],
                    need[crowded],
                    room[target],
                    unit_device,
                )
                unit_device[run] = target
                freed = float(size[run].sum())
                need[crowded] -= freed
                room[target] -= freed
    return unit_device


def _cheapest_run(
    units: Units,
    here: Array,
    crowded: int,
    target: int,
    size: Array,
    need: float,
    room: float,
    unit_device: Array,
) -> Array:
    """Consecutive units of `here` that free enough bytes in the fewest seconds."""
    held = np.concatenate([[0.0], np.cumsum(size)])  # [here + 1]
    start = np.arange(len(here))
    end = np.minimum(np.searchsorted(held, held[start] + need), len(here))
    most = np.searchsorted(held, held[start] + room, side="right") - 1
    end = np.minimum(end, most)
    freed = held[end] - held[start]
    if not (freed > 0).any():
        return here[:0]
    slower = units.time[here, target] - units.time[here, crowded]
    crossing, joined = _ties(units, here, target, unit_device)
    rate = units.problem.cluster.seconds_per_byte[crowded, target]
    cost = np.concatenate([[0.0], np.cumsum(slower - joined * rate)])
    seconds = cost[end] - cost[start] + (crossing[start] + crossing[end]) * rate
    ratio = np.where(freed > 0, seconds / np.maximum(freed, 1), np.inf)
    best = int(ratio.argmin())
    return here[start[best] : end[best]]


def _ties(units: Units, here: Array, target: int, unit_device: Array) -> tuple[Array, Array]:
    """Bytes across each gap in a row of units, and between each unit and the target device."""
    source, sink, size = units.edges
    place = np.full(units.num_units, -1)
    place[here] = np.arange(len(here))
    first = np.minimum(place[source], place[sink])
    last = np.maximum(place[source], place[sink])
    inside = first >= 0
    opened = np.bincount(first[inside] + 1, size[inside], minlength=len(here) + 1)
    closed = np.bincount(last[inside] + 1, size[inside], minlength=len(here) + 1)
    out = ~inside & (last >= 0) & ((unit_device[source] == target) | (unit_device[sink] == target))
    joined = np.bincount(last[out], size[out], minlength=len(here))
    return np.cumsum(opened - closed)[: len(here) + 1], joined
