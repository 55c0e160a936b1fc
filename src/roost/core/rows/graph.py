"""`graph.json`, field by field, and graphs to and from it."""

from __future__ import annotations

import msgspec
import numpy as np

from roost.core.graph import PHASES, Graph
from roost.core.rows.base import Count, Figure, File, check_version
from roost.errors import GraphError


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
    starts, sources = graph.input_start.tolist(), graph.input_op.tolist()
    rows = [
        OpRow(
            name=name,
            kind=kind,
            inputs=[names[source] for source in sources[first:end]],
            phase=PHASES[phase],
            dtype=dtype,
            flop=flop,
            bytes_read=read,
            bytes_written=written,
            output_bytes=output,
            workspace_bytes=workspace,
            module=module,
            group=None if group < 0 else graph.group_names[group],
            allowed=list(allowed),
        )
        for name, kind, dtype, module, allowed, phase, group, flop, read, written, output,
        workspace, first, end in zip(
            names, graph.kinds, graph.dtypes, graph.modules, graph.allowed, graph.phase.tolist(),
            graph.group.tolist(), graph.flop.tolist(), graph.bytes_read.tolist(),
            graph.bytes_written.tolist(),
            graph.output_bytes.tolist(), graph.workspace_bytes.tolist(), starts[:-1], starts[1:],
            strict=True,
        )
    ]  # fmt: skip
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
    groups: dict[str, int] = {}
    return Graph(
        name=file.name,
        op_names=tuple(row.name for row in rows),
        kinds=tuple(row.kind for row in rows),
        dtypes=tuple(row.dtype for row in rows),
        modules=tuple(row.module for row in rows),
        allowed=tuple(tuple(row.allowed) for row in rows),
        phase=np.array([phases[row.phase] for row in rows], dtype=np.int8),
        flop=np.array([row.flop for row in rows]),
        bytes_read=np.array([row.bytes_read for row in rows], dtype=np.int64),
        bytes_written=np.array([row.bytes_written for row in rows], dtype=np.int64),
        output_bytes=np.array([row.output_bytes for row in rows], dtype=np.int64),
        workspace_bytes=np.array([row.workspace_bytes for row in rows], dtype=np.int64),
        group=np.array(
            [
                -1 if row.group is None else groups.setdefault(row.group, len(groups))
                for row in rows
            ],
            dtype=np.int32,
        ),
        group_names=tuple(groups),
        input_start=np.cumsum([0, *map(len, inputs)]),
        input_op=np.array([source for sources in inputs for source in sources], dtype=np.int32),
    )


def _input_ops(row: OpRow, op: int, index: dict[str, int]) -> list[int]:
    try:
        sources = [index[name] for name in row.inputs]
    except KeyError as error:
        raise GraphError(
            f"ops[{op}].inputs: op {row.name!r} takes {error.args[0]!r}, which is no op of this "
            f"graph"
        ) from None
    return sources if len(sources) < 2 else list(dict.fromkeys(sources))
