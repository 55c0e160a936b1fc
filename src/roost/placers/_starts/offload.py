"""Placements with parameters that live away from the ops that read them, for lack of memory.

As ZeRO-Offload (Ren et al. 2021) keeps optimizer states and updates on the host, and weights too if
that is not enough. If even that makes no room, ops with large activations move there as well, with
the parameters that they read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY, Cluster
from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.placers import Evaluate
from roost.placers._shared.orders import early_updates
from roost.placers._shared.units import Units

_ATTEMPTS = 12
_RELIEFS = 24  # units whose activations are moved away, at most
_WINDOW_SHARE = (0.05, 0.2)  # of a device's memory, for fetched parameters


class _Movable(NamedTuple):
    """Ops that move together."""

    ops: Array
    nbytes: int


def offloaded(problem: Problem, evaluate: Evaluate, placement: Placement) -> list[Trial]:
    """A placement with some parameters moved to where there is room, the nearest to fitting first.

    With small and large windows, with the updates of these parameters and without.
    """
    trials = [
        _offload(problem, evaluate, placement, share, with_updates)
        for share in _WINDOW_SHARE
        for with_updates in (True, False)
    ]
    return sorted(trials, key=lambda trial: (trial.missing_bytes, trial.step_time))


def needs_offload(problem: Problem) -> bool:
    """True if the parameters are more than the accelerators hold: some must live with a host."""
    graph = problem.graph
    memory = problem.cluster.memory
    is_accelerator = ~_hosts(problem.cluster)
    resident = int(graph.output_bytes[graph.is_parameter].sum())
    return bool(is_accelerator.any()) and resident > 0.5 * int(memory[is_accelerator].max())


def _offload(
    problem: Problem, evaluate: Evaluate, start: Placement, share: float, with_updates: bool
) -> Trial:
    """Move parameters away from devices that overflow, and then ops, until all fits."""
    units = Units.of(problem, "updates")
    device = np.array(problem.check(start).device)
    window = _windows(problem, device, share)
    movables = _movables(problem, units, with_updates)
    for attempt in range(_ATTEMPTS + _RELIEFS):
        early = problem.placement(device, "priority", early_updates(problem))
        both = (replace(start, device=device), early)
        best = best_of(evaluate([replace(placement, prefetch_bytes=window) for placement in both]))
        if best.feasible:
            break
        excess = best.peak_memory - problem.cluster.memory  # [devices]
        left = movables
        for crowded in np.flatnonzero(excess > 0).tolist() if attempt < _ATTEMPTS else ():
            left = _move_away(problem, device, excess, crowded, left)
        if len(left) == len(movables) and not _relieve(problem, units, device, excess):
            break
        movables = left
    return best


def _move_away(
    problem: Problem, device: Array, excess: Array, crowded: int, movables: list[_Movable]
) -> list[_Movable]:
    """Move parameters from a crowded device until it fits; changes `device` and `excess`.

    Returns the movables that have not moved.
    """
    need = float(excess[crowded]) * 1.05 + 1.0
    left = []
    for movable in movables:
        target = None
        if need > 0 and device[movable.ops[0]] == crowded:
            target = _nearest(problem, excess, movable, crowded)
        if target is None:
            left.append(movable)
            continue
        device[movable.ops] = target
        excess[target] += movable.nbytes
        need -= movable.nbytes
    return left


def _nearest(problem: Problem, excess: Array, movable: _Movable, crowded: int) -> int | None:
    """The device with room: hosts first, then the nearest, then the one with most room."""
    cluster = problem.cluster
    hosts = _hosts(problem.cluster)
    is_possible = problem.allowed[movable.ops].all(axis=0) & (-excess > movable.nbytes)
    is_possible[crowded] = False
    return min(
        np.flatnonzero(is_possible).tolist(),
        key=lambda d: (not hosts[d], cluster.seconds_per_byte[d, crowded], excess[d]),
        default=None,
    )


def _relieve(problem: Problem, units: Units, device: Array, excess: Array) -> bool:
    """Move a unit away from the device with the greatest excess; true if one could be moved.

    It is the unit with the op that holds most while it runs. It goes to the fastest device with
    room.
    """
    graph = problem.graph
    crowded = int(excess.argmax())
    size = np.where(graph.is_parameter, 0, graph.output_bytes)
    held = size + graph.workspace_bytes
    np.add.at(held, graph.edge_target, size[graph.input_op])
    here = np.flatnonzero((device == crowded) & ~graph.is_parameter)
    for op in here[np.argsort(-held[here], kind="stable")].tolist():
        ops = _ops_of(units, int(units.unit[op]))
        may = problem.allowed[ops].all(axis=0) & (-excess > graph.output_bytes[ops].sum())
        may[crowded] = False
        if may.any():
            device[ops] = int(np.where(may, problem.op_time[ops].sum(axis=0), np.inf).argmin())
            _follow(problem, device, ops)
            return True
    return False


def _follow(problem: Problem, device: Array, ops: Array) -> None:
    """Move parameters to the ops that have just moved, if no other device reads them."""
    graph = problem.graph
    target = device[ops[0]]
    consumers = graph.consumer_lists()
    read = {int(tensor) for op in ops.tolist() for tensor in graph.inputs_of(op)}
    for tensor in sorted(read):
        is_free = graph.is_parameter[tensor] and graph.group[tensor] < 0
        if not is_free or not problem.allowed[tensor, target]:
            continue
        if (device[consumers[tensor]] == target).all():
            device[tensor] = target


def _windows(problem: Problem, device: Array, share: float) -> Array:  # [devices] bytes
    """A window on each device that runs something; none on the others."""
    windows = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    runs = np.unique(device[~problem.graph.is_parameter])
    windows[runs] = problem.cluster.memory[runs] * share
    return windows


def _movables(problem: Problem, units: Units, with_updates: bool) -> list[_Movable]:
    """Parameters that updates rewrite, with these or without; those read least often first."""
    graph = problem.graph
    readers = np.diff(graph.consumer_start)
    rows: list[tuple[int, int, _Movable]] = []
    for unit in np.unique(units.unit[graph.is_parameter]).tolist():
        ops = _ops_of(units, unit)
        is_parameter = graph.is_parameter[ops]
        is_grouped = (graph.group[ops] >= 0).any()
        if (graph.phase[ops[~is_parameter]] != UPDATE).any() or (is_grouped and not with_updates):
            continue
        parameters = ops[is_parameter]
        moved = ops if with_updates else parameters
        movable = _Movable(moved, int(graph.output_bytes[moved].sum()))
        parameter_bytes = int(graph.output_bytes[parameters].sum())
        rows.append((int(readers[parameters].max()), -parameter_bytes, movable))
    return [movable for *_, movable in sorted(rows, key=lambda row: row[:2])]


def _ops_of(units: Units, unit: int) -> Array:
    return units.ops[units.start[unit] : units.start[unit + 1]]


def _hosts(cluster: Cluster) -> Array:  # [devices] bool
    """Devices that are a CPU or a store of weights."""
    return np.array([device.kind in ("cpu", MEMORY) for device in cluster.devices])
