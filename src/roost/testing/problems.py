"""Made-up problems of any size that look like training steps, for benchmarks and examples."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph
from roost.core.problem import Problem


def training_like(num_ops: int, num_devices: int, seed: int = 0) -> Problem:
    """A problem like a training step: a forward half, and a backward half in reverse.

    A parameter for every fourth forward op, read by it and by its backward op.
    """
    rng = np.random.default_rng(seed)
    half = num_ops // 2
    edges: set[tuple[int, int]] = set()
    for op in range(1, half):
        edges.add((max(0, op - int(rng.geometric(0.6))), op))
        if rng.random() < 0.35:
            edges.add((max(0, op - int(rng.integers(1, 30))), op))
    # Op `half + k` is the backward op of forward op `half - 1 - k`: reversed edges, plus its
    # activation.
    backward = {op: 2 * half - 1 - op for op in range(half)}
    edges |= {(backward[target], backward[source]) for source, target in edges}
    edges |= {(op, backward[op]) for op in range(half) if op == half - 1 or rng.random() < 0.45}
    edges |= {(op - 1, op) for op in range(2 * half, num_ops)}
    parameters = list(range(0, half, 4))
    shift = len(parameters)
    sources: list[list[int]] = [[] for _ in range(shift + num_ops)]
    for source, target in sorted(edges):
        sources[shift + target].append(shift + source)
    for number, op in enumerate(parameters):
        sources[shift + op].append(number)
        sources[shift + backward[op]].append(number)
    count = shift + num_ops
    phase = np.full(count, 2)
    phase[:shift] = 0
    phase[shift + half :] = 3
    graph = Graph(
        name=f"training_like_{num_ops}",
        op_names=tuple(f"op{op}" for op in range(count)),
        kinds=tuple("parameter" if op < shift else "matmul" for op in range(count)),
        dtypes=("float32",) * count,
        modules=("",) * count,
        allowed=((),) * count,
        phase=phase,
        flop=np.where(phase == 0, 0.0, rng.lognormal(20, 1, count)),
        bytes_read=np.zeros(count),
        bytes_written=np.zeros(count),
        output_bytes=rng.lognormal(13, 1, count).astype(np.int64),
        workspace_bytes=np.zeros(count),
        group_names=(),
        group=np.full(count, -1),
        input_start=np.cumsum([0, *map(len, sources)]),
        input_op=np.array([source for row in sources for source in row]),
    )
    devices = tuple(Device(f"cuda:{d}", "cuda", 12 * 2**30) for d in range(num_devices))
    cluster = Cluster("alike", devices, (Link("cuda:*", "cuda:*", 10e9, 20e-6),))
    return Problem(graph, cluster, np.repeat((graph.flop / 4e12)[:, None], num_devices, axis=1))  # type: ignore[arg-type]


def scattered(problem: Problem, seed: int = 0, run: int = 1) -> Array:
    """A random device for each run of consecutive ops; parameters go with their first reader."""
    rng = np.random.default_rng(seed)
    graph = problem.graph
    blocks = rng.integers(0, problem.cluster.num_devices, -(-graph.num_ops // run))
    device = np.repeat(blocks, run)[: graph.num_ops].astype(np.int32)
    # Everything that reads a parameter goes with the first op that does; ops here read at most one.
    parameters = np.flatnonzero(graph.is_parameter & (np.diff(graph.consumer_start) > 0))
    device[parameters] = device[graph.consumer_op[graph.consumer_start[parameters]]]
    reads = graph.is_parameter[graph.input_op]
    device[graph.edge_target[reads]] = device[graph.input_op[reads]]
    return device
