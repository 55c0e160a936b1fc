"""The fields of `placement.json` and `problem.json`, and the nouns to and from them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.rows.base import Count, Figure, File, file_of
from roost.core.rows.cluster import ClusterFile, cluster_file, cluster_from
from roost.core.rows.graph import GraphFile, graph_file, graph_from
from roost.errors import InputError


class PlacementFile(File, tag_field="format", tag="roost.placement"):
    """`placement.json`: for each op, in the order of the graph, its index in `devices`."""

    version: int
    devices: list[str]
    device: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    order: str = "program"
    priority: list[float] | None = None
    prefetch_bytes: list[Count] | Count = 0
    graph: str = ""


class ProblemFile(File, tag_field="format", tag="roost.problem"):
    """`problem.json`: a graph, a cluster, and seconds of each op on each device."""

    version: int
    graph: GraphFile
    cluster: ClusterFile
    op_time: list[list[Figure]]
    costs_from: str = "given"


def placement_file(placement: Placement) -> PlacementFile:
    window = placement.prefetch_bytes
    return file_of(
        PlacementFile,
        placement,
        version=1,
        devices=list(placement.devices),
        device=placement.device.tolist(),
        priority=None if placement.priority is None else placement.priority.tolist(),
        prefetch_bytes=window if isinstance(window, int) else window.tolist(),
    )


def placement_from(file: PlacementFile) -> Placement:
    window: Any = file.prefetch_bytes
    return Placement(
        device=np.array(file.device, dtype=np.int64),
        order=file.order,
        priority=None if file.priority is None else np.array(file.priority),
        prefetch_bytes=window if isinstance(window, int) else np.array(window, dtype=np.int64),
        devices=tuple(file.devices),
        graph=file.graph,
    )


def problem_file(problem: Problem) -> ProblemFile:
    return ProblemFile(
        version=1,
        graph=graph_file(problem.graph),
        cluster=cluster_file(problem.cluster),
        op_time=problem.op_time.tolist(),
        costs_from=problem.costs.source,
    )


def problem_from(file: ProblemFile) -> Problem:
    lengths = {len(row) for row in file.op_time}
    if not lengths:
        raise InputError("op_time: is empty; it must have a row of seconds for each op")
    if len(lengths) > 1:
        raise InputError(
            f"op_time: rows have {min(lengths)} to {max(lengths)} entries; all must have the same"
        )
    times = np.array(file.op_time, dtype=np.float64).reshape(len(file.op_time), -1)
    return Problem(
        graph_from(file.graph), cluster_from(file.cluster), Costs(times, source=file.costs_from)
    )
