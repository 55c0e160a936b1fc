"""The fields of `graph.json`, and graphs to and from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roost.core.graph import PHASES, Graph
from roost.core.rows.base import Count, Figure, File, check_version
from roost.errors import GraphError

# Columns of numbers, with their type in a graph.
_NUMBERS = {
    "flop": np.float64,
    "bytes_read": np.int64,
    "bytes_written": np.int64,
    "output_bytes": np.int64,
    "workspace_bytes": np.int64,
}


class OpRow(File, gc=False):
    """One op."""

    name: str
    kind: str = "op"
    inputs: list[str] = msgspec.field(default_factory=list)
    phase: str = "forward"
    dtype: str = "float32"
    flop: Figure = 0.0
    bytes_read: Count = 0
    bytes_written: Count = 0
    output_bytes: Count = 0
    workspace_bytes: Count = 0
    counted: bool = False
    module: str = ""
    group: str | None = None
    allowed: list[str] = msgspec.field(default_factory=list)


class GraphFile(File, tag_field="format", tag="roost.graph"):
    """`graph.json`: ops in the order they run, each with the names of its inputs."""

    version: int
    name: str
    ops: list[OpRow]


def graph_file(graph: Graph) -> GraphFile:
    names = graph.op_names
    columns: dict[str, Sequence[Any]] = {
        "name": names,
        "kind": graph.kinds,
        "inputs": [[names[source] for source in sources] for sources in graph.input_lists()],
        "phase": [PHASES[phase] for phase in graph.phase.tolist()],
        "dtype": graph.dtypes,
        **{column: getattr(graph, column).tolist() for column in _NUMBERS},
        "counted": graph.counted.tolist(),
        "module": graph.modules,
        "group": [None if g < 0 else graph.group_names[g] for g in graph.group.tolist()],
        "allowed": [list(kinds) for kinds in graph.allowed],
    }
    rows = [
        OpRow(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
    return GraphFile(version=1, name=graph.name, ops=rows)


def graph_from(file: GraphFile) -> Graph:
    check_version(file.version, "graph")
    rows = file.ops
    index: dict[str, int] = {}
    for op, row in enumerate(rows):
        if index.setdefault(row.name, op) != op:
            raise GraphError(
                f"ops[{op}].name: two ops are called {row.name!r}; op names must differ"
            )
    inputs = [_input_ops(row, op, index) for op, row in enumerate(rows)]
    phases = {phase: number for number, phase in enumerate(PHASES)}
    for op, row in enumerate(rows):
        if row.phase not in phases:
            raise GraphError(f"ops[{op}].phase: {row.phase!r} is none of {', '.join(PHASES)}")
    groups: dict[str | None, int] = {None: -1}
    for row in rows:
        groups.setdefault(row.group, len(groups) - 1)
    return Graph(
        name=file.name,
        op_names=tuple(index),
        kinds=tuple(row.kind for row in rows),
        dtypes=tuple(row.dtype for row in rows),
        modules=tuple(row.module for row in rows),
        allowed=tuple(tuple(row.allowed) for row in rows),
        phase=np.array([phases[row.phase] for row in rows], dtype=np.int8),
        **{
            column: np.array([getattr(row, column) for row in rows], dtype=dtype)
            for column, dtype in _NUMBERS.items()
        },
        counted=np.array([row.counted for row in rows], dtype=bool),
        group=np.array([groups[row.group] for row in rows], dtype=np.int32),
        group_names=tuple(name for name in groups if name is not None),
        input_start=np.cumsum([0, *map(len, inputs)]),
        input_op=np.array([source for sources in inputs for source in sources], dtype=np.int32),
    )


def _input_ops(row: OpRow, op: int, index: dict[str, int]) -> list[int]:
    try:
        sources = [index[name] for name in row.inputs]
    except KeyError as error:
        raise GraphError(
            f"ops[{op}].inputs: op {row.name!r} takes {error.args[0]!r}, "
            "which is no op of this graph"
        ) from None
    return sources if len(sources) < 2 else list(dict.fromkeys(sources))
