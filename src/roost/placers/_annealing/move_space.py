"""The moves that a search has: units, blocks of units, and rows of blocks.

A block is a module or a part of one. Rows are in the order of the forward pass. In a step that is
unrolled into microbatches, stretches of layers in neighbouring copies are blocks too.
"""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD
from roost.placers._annealing.state import Space
from roost.placers._shared.layers import Layers
from roost.placers._shared.units import Units
from roost.transforms.microbatch import SHARED, copies_of

_MOST_BLOCKS = 4  # for each unit: every level of the modules has its blocks
_MOST_COPY_BLOCKS = 16  # likewise, of stretches of copies
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
    copied = _copy_blocks(units)
    levels = [singles, parts, leaves, modules, *([copied] if copied else [])]
    blocks = [block for row in levels for block in row]
    level = np.cumsum([0, *map(len, levels)]).astype(np.int64)
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


def _copy_blocks(units: Units) -> list[Array]:
    """Stretches of layers times ranges of copies, both in powers of two; none if nothing is copied.

    With all layers that is a copy, with all copies a layer.
    """
    graph = units.problem.graph
    copy = copies_of(graph)[units.leader]
    count = int(copy.max(initial=0)) + 1
    if count < 2:
        return []
    layer = Layers.of(graph).layer[units.leader]
    num_layers = int(layer.max()) + 1
    of_pair: dict[tuple[int, int], list[int]] = {}
    for unit in np.flatnonzero(copy != SHARED).tolist():
        of_pair.setdefault((int(copy[unit]), int(layer[unit])), []).append(unit)
    found = []
    room = _MOST_COPY_BLOCKS * units.num_units
    for copies in _ranges(count):
        for layers in _ranges(num_layers):
            pairs = [(one, other) for one in copies for other in layers]
            members = [unit for pair in pairs for unit in of_pair.get(pair, ())]
            if 1 < len(members) <= room:
                found.append(np.array(members, dtype=np.int64))
                room -= len(members)
    return found


def _ranges(count: int) -> list[range]:
    """Ranges of a power of two of neighbours, the shortest first, and the whole."""
    found = []
    length = 1
    while length < count:
        found += [range(first, min(count, first + length)) for first in range(0, count, length)]
        length *= 2
    return [*found, range(count)]


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
