"""The moves that a search has: units, blocks of units, and rows of blocks.

A block is a module or a part of one. Rows are in the order of the forward pass.
"""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD
from roost.placers._annealing.state import Space
from roost.placers._shared.units import Units

_MOST_BLOCKS = 4  # for each unit: every level of the modules has its blocks
_LONGEST_WINDOW = 64


def space_of(units: Units) -> Space:
    """The space of some units, made once for them."""
    kept: Space | None = vars(units).get("_space")
    if kept is None:
        kept = vars(units)["_space"] = _space_of(units)
    return kept


def _space_of(units: Units) -> Space:
    graph = units.problem.graph
    bits = np.uint64(1) << np.arange(units.problem.cluster.num_devices, dtype=np.uint64)
    near_start, near = _near(units)
    paths = _module_of_units(units)
    singles = [np.array([unit], dtype=np.int64) for unit in range(units.num_units)]
    parts = _part_blocks(units, paths)
    leaves = _leaf_blocks(paths)
    modules = _module_blocks(paths)
    blocks = [*singles, *parts, *leaves, *modules]
    level = np.cumsum([0, len(singles), len(parts), len(leaves), len(modules)]).astype(np.int64)
    forward = _first_forward(units)
    rows = [np.arange(units.num_units)]  # units by their first op
    for first, kind in ((level[1], parts), (level[2], leaves)):
        if len(kind) > 1:
            met = [forward[block].min() for block in kind]
            rows.append(first + np.argsort(met, kind="stable"))
    start, unit = _joined(blocks)
    row_start, row_block = _joined(rows)
    return Space(
        num_units=units.num_units,
        num_devices=units.problem.cluster.num_devices,
        unit_start=units.start.astype(np.int64),
        unit_op=units.ops.astype(np.int32),
        allowed=(units.allowed * bits).sum(axis=1, dtype=np.uint64),
        near_start=near_start,
        near=near,
        block_start=start,
        block_unit=unit,
        level=level,
        row_start=row_start,
        row_block=row_block,
        longest_window=min(_LONGEST_WINDOW, max(1, graph.num_ops)),
        home=_homes(units),
    )


def _homes(units: Units) -> Array:
    """The units with parameters that an op outside them reads."""
    graph = units.problem.graph
    unit = units.unit
    reads = graph.is_parameter[graph.input_op]
    source = graph.input_op[reads]
    target = graph.edge_target[reads]
    return np.unique(unit[source[unit[source] != unit[target]]]).astype(np.int32)


def _joined(rows: list[Array]) -> tuple[Array, Array]:
    """Rows as starts and one flat array."""
    start = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    return start, np.concatenate(rows).astype(np.int32)


def _near(units: Units) -> tuple[Array, Array]:
    """The units that share a tensor with each."""
    source, target, _ = units.edges
    ends = np.unique(
        np.concatenate([np.stack([source, target]), np.stack([target, source])], axis=1), axis=1
    )
    start = np.concatenate([[0], np.cumsum(np.bincount(ends[0], minlength=units.num_units))])
    return start.astype(np.int64), ends[1].astype(np.int32)


def _module_of_units(units: Units) -> list[str]:
    """The module path of each unit: that of its first op which has one."""
    graph = units.problem.graph
    paths = [""] * units.num_units
    for op in units.leader.tolist():
        paths[units.unit[op]] = graph.modules[op]
    missing = [unit for unit, path in enumerate(paths) if not path]
    for unit in missing:
        members = units.ops[units.start[unit] : units.start[unit + 1]].tolist()
        paths[unit] = next((graph.modules[op] for op in members if graph.modules[op]), "")
    return paths


def _module_blocks(paths: list[str]) -> list[Array]:
    """For every module that is not a leaf, and is not the whole: the units within it."""
    within: dict[str, list[int]] = {}
    for unit, path in enumerate(paths):
        names = path.split(".") if path else []
        for depth in range(1, len(names)):
            within.setdefault(".".join(names[:depth]), []).append(unit)
    whole = len(paths)
    seen: set[tuple[int, ...]] = set()
    found = []
    room = _MOST_BLOCKS * whole
    for members in within.values():
        key = tuple(members)
        if 1 < len(members) < whole and key not in seen:
            seen.add(key)
            found.append(np.array(members))
    total = np.cumsum([len(block) for block in found]) if found else np.zeros(0)
    return [block for block, upto in zip(found, total, strict=True) if upto <= room]


def _leaf_blocks(paths: list[str]) -> list[Array]:
    """The units of each module path; units without one go alone."""
    leaves: dict[str, list[int]] = {}
    for unit, path in enumerate(paths):
        leaves.setdefault(path or f"\0{unit}", []).append(unit)
    return [np.array(members) for members in leaves.values()]


def _part_blocks(units: Units, paths: list[str]) -> list[Array]:
    """The units of each module by the phase of their first op; units without a module alone."""
    phase = units.problem.graph.phase[units.leader].tolist()
    parts: dict[tuple[str, int], list[int]] = {}
    for unit, path in enumerate(paths):
        parts.setdefault((path, phase[unit]) if path else ("", -1 - unit), []).append(unit)
    return [np.array(members) for members in parts.values()]


def _first_forward(units: Units) -> Array:  # [units]
    """The first forward op of each unit, or its first op."""
    graph = units.problem.graph
    first = np.full(units.num_units, graph.num_ops, dtype=np.int64)
    forward = np.flatnonzero(graph.phase == FORWARD)
    np.minimum.at(first, units.unit[forward], forward)
    return np.where(first == graph.num_ops, graph.num_ops + units.leader, first)
