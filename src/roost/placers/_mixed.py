"""Weights that do not fit, for inference: some kept, some streamed, some used where they lie, evenly over the program.

A link that brings weights and a host that computes beside it work at the same time when both have something to do all
along: so each part of the program gets its share of the three. Which shares are best is found by trying.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.graph import FORWARD
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate

_IN_PLACE = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # share of what does not fit
_WINDOW = (0.02, 0.04, 0.08, 0.16)  # of the memory
_WEIGHTS = (1, 2, 3)  # and as many of the largest weight, where memory is short
_MOST_WINDOW = 0.75  # of the memory
_RETRIES = 3


@dataclass(frozen=True)
class _Part:
    """Ops that run together, and the weights that they alone read."""

    ops: list[int]
    weights: list[int]
    size: int  # bytes of weights
    movable: bool  # whether the host may run it


def mixed(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """Placements for one accelerator and a host; none where there is more to it than that."""
    graph, cluster = problem.graph, problem.cluster
    kinds = [device.kind for device in cluster.devices]
    hosts = [number for number, kind in enumerate(kinds) if kind == "cpu"]
    mains = [number for number, kind in enumerate(kinds) if kind not in ("cpu", MEMORY)]
    if not hosts or not mains or graph.phase.max() > FORWARD or not graph.is_parameter.any():
        return []
    host, main = max(hosts, key=lambda d: int(cluster.memory[d])), max(mains, key=lambda d: int(cluster.memory[d]))
    store = kinds.index(MEMORY) if MEMORY in kinds else host
    somewhere = np.where(problem.allowed[:, host], host, problem.allowed.argmax(axis=1))
    start = np.where(problem.allowed[:, main], main, somewhere).astype(np.int32)
    parts = _parts(problem, start, main, host)
    if not parts:
        return []
    whole = evaluate([problem.placement(start)])[0]
    excess = int(whole.peak_memory[main]) - int(cluster.memory[main])
    if whole.feasible or excess <= 0:
        return [whole]
    found = [whole]
    for window in _windows(problem, parts, int(cluster.memory[main])):
        for in_place in _IN_PLACE:
            less = excess + (window if in_place < 1.0 else 0)
            for _ in range(_RETRIES):
                trial = evaluate([_placement(problem, start, parts, less, in_place, window, (main, store, host))])[0]
                found.append(trial)
                missing = int(trial.peak_memory[main]) - int(cluster.memory[main])
                if missing <= 0:
                    break
                less += missing
    return found


def _windows(problem: Problem, parts: list[_Part], memory: int) -> list[int]:
    """Bytes, from small to large. What is larger than its window cannot be streamed."""
    largest = max(int(problem.graph.output_bytes[weight]) for part in parts for weight in part.weights)
    found = {int(share * memory) for share in _WINDOW} | {count * largest for count in _WEIGHTS}
    return sorted(window for window in found if window <= _MOST_WINDOW * memory)


def _parts(problem: Problem, start: Array, main: int, host: int) -> list[_Part]:
    """In program order. Weights in a group with ops go with these; others are free."""
    graph = problem.graph
    consumers = graph.consumer_lists()
    members: dict[int, list[int]] = {}
    for op, group in enumerate(graph.group.tolist()):
        if group >= 0:
            members.setdefault(group, []).append(op)
    weights: dict[int, list[int]] = {}  # first op of a part -> its weights
    ops: dict[int, list[int]] = {}
    for weight in np.flatnonzero(graph.is_parameter & (graph.group < 0) & problem.allowed[:, host]).tolist():
        heads = set()
        for reader in consumers[weight]:
            together = members.get(int(graph.group[reader]), [reader])
            heads.add(together[0])
            ops[together[0]] = together
        if len(heads) == 1:
            weights.setdefault(heads.pop(), []).append(weight)
    sizes = {head: int(graph.output_bytes[own].sum()) for head, own in weights.items()}
    return [
        _Part(ops[head], weights[head], sizes[head], bool(problem.allowed[ops[head], host].all()))
        for head in sorted(weights, key=lambda head: min(op for op in ops[head] if not graph.is_parameter[op]))
        if start[ops[head]].max() == start[ops[head]].min() == main and sizes[head]
    ]


def _placement(
    problem: Problem,
    start: Array,
    parts: list[_Part],
    less: int,
    in_place: float,
    window: int,
    devices: tuple[int, int, int],  # the main one, where weights are streamed from, where they are used in place
) -> Placement:
    """With so many bytes less on the main device; each part goes where its share is behind most."""
    total = sum(part.size for part in parts)
    away = min(1.0, less / total)
    shares = np.array([1.0 - away, away * (1.0 - in_place), away * in_place])
    given = np.zeros(3)
    seen = 0.0
    device = start.copy()
    largest = [max(int(problem.graph.output_bytes[weight]) for weight in part.weights) for part in parts]
    for number, part in enumerate(parts):
        seen += part.size
        behind = shares * seen - given
        choice = int(np.argmax(behind if part.movable else behind[:2]))
        if choice == 1 and largest[number] > window:
            choice = 0  # it would need a larger window than all others
        given[choice] += part.size
        device[part.weights] = devices[choice]
        if choice == 2:
            device[part.ops] = devices[2]
    windows = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    windows[devices[0]] = window if in_place < 1.0 else 0
    return problem.placement(device, prefetch_bytes=windows)
