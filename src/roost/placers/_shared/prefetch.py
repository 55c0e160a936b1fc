"""Windows for fetched parameters, large enough for each to be sent once a step."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem


def fetched_once(problem: Problem, device: Array) -> Array:  # [devices] bytes
    """Windows for devices [ops] with room for all that each device reads and does not hold."""
    graph = problem.graph
    num_devices = problem.cluster.num_devices
    edges = _reads(problem)
    parameter = graph.input_op[edges]
    reader = device[graph.edge_target[edges]]
    away = reader != device[parameter]
    pair = np.unique(parameter[away].astype(np.int64) * num_devices + reader[away])
    window = np.zeros(num_devices, dtype=np.int64)
    np.add.at(window, pair % num_devices, graph.output_bytes[pair // num_devices])
    return window


def _reads(problem: Problem) -> Array:
    """The edges from parameters."""
    kept = vars(problem).get("_reads")
    if kept is None:
        kept = vars(problem)["_reads"] = np.flatnonzero(
            problem.graph.is_parameter[problem.graph.input_op]
        )
    return np.asarray(kept)
