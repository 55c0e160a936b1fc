"""Memory: proofs that nothing fits, from what no placement and no order can escape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from roost.bounds._relaxed import Relaxed, unit_needs
from roost.core.arrays import Array
from roost.core.graph import FORWARD, Graph
from roost.core.problem import Problem
from roost.core.units import show_bytes
from roost.errors import Infeasible

_MOMENTS = 8  # at which what is alive is added up


def nothing_fits(problem: Problem) -> Infeasible | None:
    """The proof that no placement fits, as the error to raise; None where there is no such
    proof."""
    relaxed = Relaxed.of(problem, memory=False)
    return _too_large_for_each(relaxed) or _too_large_together(relaxed)


def _too_large_for_each(relaxed: Relaxed) -> Infeasible | None:
    """A unit that needs more than any of its devices has."""
    problem = relaxed.problem
    _, first = np.unique(relaxed.unit, return_index=True)
    missing = unit_needs(problem, relaxed.unit) - problem.cluster.memory
    missing = np.where(np.isfinite(relaxed.time[first]), missing, np.inf)  # [units, devices]
    worst = int(missing.min(axis=1).argmax())
    if missing[worst].min() <= 0:
        return None
    device = int(missing[worst].argmin())
    name = problem.cluster.device_names[device]
    lacking = math.ceil(missing[worst, device])
    members = np.flatnonzero(relaxed.unit == worst)
    what = f"op {problem.graph.op_names[members[0]]!r}"
    if len(members) > 1:
        what = (
            f"group {problem.graph.group_names[problem.graph.group[members[0]]]!r} of "
            f"{len(members)} ops"
        )
    message = (
        f"nothing fits: {what} needs more memory than any device has; {name!r} lacks least, "
        f"{show_bytes(lacking)}"
    )
    return Infeasible(message, name, lacking)


def _too_large_together(relaxed: Relaxed) -> Infeasible | None:
    """The error where parameters and live tensors are more than all their devices hold."""
    problem = relaxed.problem
    graph = problem.graph
    cluster = problem.cluster
    moment = fullest_moment(problem)
    held = np.where(graph.is_parameter, graph.output_bytes, 0).astype(float)
    held[moment.alive] = graph.output_bytes[moment.alive]
    may = np.isfinite(relaxed.time)
    # A tensor that is alive may be anywhere: where it was made, or where it will be read.
    may[moment.alive] = True
    for mask in np.unique(may, axis=0):
        inside = ~(may & ~mask).any(axis=1)
        extra = moment.passing if mask.all() else 0.0
        missing = held[inside].sum() + extra - cluster.memory[mask].sum()
        if missing > 0:
            name = cluster.device_names[int(np.where(mask, cluster.memory, -1).argmax())]
            names = np.array(cluster.device_names)[mask].tolist()
            have = f"{names[0]!r} has" if len(names) == 1 else f"{', '.join(names)} have together"
            what = (
                f"parameters and what is alive at {graph.op_names[moment.op]!r}"
                if mask.all()
                else "parameters"
            )
            lacking = math.ceil(missing)
            message = f"nothing fits: {what} need {show_bytes(lacking)} more memory than {have}"
            return Infeasible(message, name, lacking)
    return None


@dataclass(frozen=True, eq=False)
class Moment:
    """The running of one op, and the tensors that some device holds meanwhile, in every order."""

    op: int
    alive: Array  # [tensors] ops whose outputs are held: made before it, and used by it or after it
    late: Array  # [ops] whether it is this op or comes after it
    early: Array  # [ops] whether it comes before
    passing: float  # bytes of its own output and workspace


def fullest_moment(problem: Problem) -> Moment:
    """The moment, of a few likely ones, at which the most bytes are alive.

    None are where received copies are not counted, or where the op might take no time, in which
    `fifo` counts nothing.
    """
    graph = problem.graph
    inputs = graph.input_lists()
    consumers = graph.consumer_lists()
    best: Moment | None = None
    for op in _likely(graph):
        early = _reached(op, inputs)
        late = _reached(op, consumers)
        late[op] = True
        ahead = np.zeros(graph.num_ops, dtype=bool)
        ahead[graph.input_op[late[graph.edge_target]]] = True
        alive = np.flatnonzero(early & ahead & ~graph.is_parameter)
        passing = float(graph.output_bytes[op] + graph.workspace_bytes[op])
        if not problem.cluster.copies_in_memory or not (problem.op_time[op] > 0).all():
            alive = alive[:0]
            passing = 0.0
        found = Moment(op, alive, late, early, passing)
        if best is None or _bytes(graph, found) > _bytes(graph, best):
            best = found
    assert best is not None
    return best


def _bytes(graph: Graph, moment: Moment) -> float:
    return float(graph.output_bytes[moment.alive].sum()) + moment.passing


def _likely(graph: Graph) -> list[int]:
    """Ops at which the most bytes are alive in program order, one for each part of it."""
    last = np.arange(graph.num_ops)
    np.maximum.at(last, graph.input_op, graph.edge_target)
    size = np.where(graph.is_parameter, 0, graph.output_bytes).astype(float)
    change = np.zeros(graph.num_ops + 1)
    np.add.at(change, np.arange(graph.num_ops), size)
    np.add.at(change, last + 1, -size)
    held = np.cumsum(change)[:-1]
    ops = np.flatnonzero(~graph.is_parameter)
    if not len(ops):
        return [0]
    parts = np.array_split(ops, min(_MOMENTS, len(ops)))
    found = {int(part[held[part].argmax()]) for part in parts}
    forward = np.flatnonzero(graph.phase == FORWARD)
    return sorted(found | set(forward[-1:].tolist()))


def _reached(op: int, following: list[list[int]]) -> Array:  # [ops]
    """True for ops that can be reached from an op."""
    found = np.zeros(len(following), dtype=bool)
    left = [op]
    while left:
        for other in following[left.pop()]:
            if not found[other]:
                found[other] = True
                left.append(other)
    return found
