"""Where parameters do not fit beside the ops that read them: let some live elsewhere, and be
fetched for each use.

As ZeRO-Offload (Ren et al. 2021) keeps optimizer states and updates on the host, and weights too
where that must be. Where not even that makes room, ops with large activations go there as well,
with what they read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
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


def offloaded(problem: Problem, evaluate: Evaluate, placement: Placement) -> list[Trial]:
    """A placement with some parameters, and the updates of these, moved to where there is room.

    Several ways of doing that, the nearest to fitting first.
    """
    found: list[Trial] = []
    units = Units.of(problem, "updates")
    for share in _WINDOW_SHARE:
        for with_updates in (True, False):
            found += _offload(problem, evaluate, units, placement, share, with_updates)
    return sorted(found, key=lambda trial: (trial.missing_bytes, trial.step_time))


def _offload(
    problem: Problem,
    evaluate: Evaluate,
    units: Units,
    start: Placement,
    share: float,
    with_updates: bool,
) -> Iterator[Trial]:
    device = np.array(problem.check(start).device)
    window = _windows(problem, device, share)
    candidates = _candidates(problem, units, with_updates)
    size = np.array([problem.graph.output_bytes[ops].sum() for ops in candidates], dtype=np.int64)
    moved = np.zeros(len(candidates), dtype=bool)
    for attempt in range(_ATTEMPTS + _RELIEFS):
        early = problem.placement(device, "priority", early_updates(problem))
        tried = (replace(start, device=device), early)
        best = best_of(evaluate([replace(placement, prefetch_bytes=window) for placement in tried]))
        if best.feasible:
            yield best
            return
        excess = best.peak_memory - problem.cluster.memory  # [devices]
        changed = False
        for crowded in np.flatnonzero(excess > 0).tolist():
            need = float(excess[crowded]) * 1.05 + 1.0
            for number in np.flatnonzero(~moved).tolist() if attempt < _ATTEMPTS else ():
                ops = candidates[number]
                if need <= 0:
                    break
                if device[ops[0]] != crowded:
                    continue
                target = _nearest(problem, excess, ops, crowded, int(size[number]))
                if target is None:
                    continue
                device[ops] = target
                excess[target] += size[number]
                need -= size[number]
                moved[number] = changed = True
        if not changed:
            crowded = int(excess.argmax())
            if not _relieved(problem, units, device, crowded, excess):
                break
    yield best


def _relieved(problem: Problem, units: Units, device: Array, crowded: int, excess: Array) -> bool:
    """Move the unit with the op that holds most while it runs away from a device, to the fastest
    with room for it."""
    graph = problem.graph
    size = np.where(graph.is_parameter, 0, graph.output_bytes)
    held = size + graph.workspace_bytes
    np.add.at(held, graph.edge_target, size[graph.input_op])
    here = np.flatnonzero((device == crowded) & ~graph.is_parameter)
    for op in here[np.argsort(-held[here], kind="stable")].tolist():
        unit = int(units.unit[op])
        ops = units.ops[units.start[unit] : units.start[unit + 1]]
        may = problem.allowed[ops].all(axis=0) & (-excess > graph.output_bytes[ops].sum())
        may[crowded] = False
        if may.any():
            device[ops] = int(np.where(may, problem.op_time[ops].sum(axis=0), np.inf).argmin())
            _follow(problem, device, ops)
            return True
    return False


def _follow(problem: Problem, device: Array, ops: Array) -> None:
    """Parameters that live elsewhere go with the ops that read them, if these are all there are."""
    graph, target = problem.graph, device[ops[0]]
    consumers = graph.consumer_lists()
    read = {int(tensor) for op in ops.tolist() for tensor in graph.inputs_of(op)}
    for parameter in (
        tensor for tensor in sorted(read) if graph.is_parameter[tensor] and graph.group[tensor] < 0
    ):
        if problem.allowed[parameter, target] and (device[consumers[parameter]] == target).all():
            device[parameter] = target


def _windows(problem: Problem, device: Array, share: float) -> Array:  # [devices] bytes
    """A window on each device that runs something; none on the others."""
    runs = (
        np.bincount(device[~problem.graph.is_parameter], minlength=problem.cluster.num_devices) > 0
    )
    return np.where(runs, problem.cluster.memory * share, 0).astype(np.int64)


def _candidates(problem: Problem, units: Units, with_updates: bool) -> list[Array]:
    """Ops that move together: parameters that updates rewrite, with these or without; those read
    least often first."""
    graph = problem.graph
    readers = np.diff(graph.consumer_start)
    found: list[tuple[int, int, Array]] = []
    for unit in np.unique(units.unit[graph.is_parameter]).tolist():
        ops = units.ops[units.start[unit] : units.start[unit + 1]]
        parameters = ops[graph.is_parameter[ops]]
        others = ops[~graph.is_parameter[ops]]
        if (graph.phase[others] != UPDATE).any() or (
            (graph.group[ops] >= 0).any() and not with_updates
        ):
            continue
        chosen = ops if with_updates else parameters
        found.append(
            (int(readers[parameters].max()), -int(graph.output_bytes[parameters].sum()), chosen)
        )
    return [ops for _, _, ops in sorted(found, key=lambda row: row[:2])]


def _nearest(problem: Problem, excess: Array, ops: Array, crowded: int, size: int) -> int | None:
    """The nearest device with room for it, the one with most where several are as near, hosts
    first; or None."""
    cluster = problem.cluster
    allowed = np.array(problem.allowed[ops].all(axis=0)) & (-excess > size)
    allowed[crowded] = False
    hosts = np.array([device.kind in ("cpu", MEMORY) for device in cluster.devices])
    for among in (hosts & allowed, ~hosts & allowed):
        if among.any():
            return min(
                np.flatnonzero(among).tolist(),
                key=lambda d: (cluster.seconds_per_byte[d, crowded], excess[d]),
            )
    return None


def needs_offload(problem: Problem) -> bool:
    """Whether the parameters are more than the accelerators hold, so that some must live with a
    host."""
    graph, cluster = problem.graph, problem.cluster
    hosts = np.array([device.kind in ("cpu", MEMORY) for device in cluster.devices])
    resident = int(graph.output_bytes[graph.is_parameter].sum())
    return bool((~hosts).any()) and resident > 0.5 * int(cluster.memory[~hosts].max())
