"""Made-up problems: training-like graphs for benchmarks, and nasty little ones for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.placement import ORDERS, Placement
from roost.core.problem import Problem


def training_like(num_ops: int, num_devices: int, seed: int = 0) -> Problem:
    """A forward half, a mirrored backward half with activations reused, E/V about 1.75, alike
    devices.

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
    """A random device for each run of so many consecutive ops; parameters go where their first
    consumer is."""
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


def nasty(seed: int) -> tuple[Problem, Placement]:
    """A small random problem and placement with everything that may go wrong in a simulator.

    Ties, zero-time ops, zero-byte tensors, isolated ops, lonely parameters, 1 to 16 devices, shared
    buses, broadcast, gaps, ends that are kept busy, remote parameters, updates, tiny and huge
    windows, every order. Most figures are small whole numbers, so that many times are equal; some
    are not, so that sums round.
    """
    rng = np.random.default_rng(seed)
    whole = rng.random() < 0.7
    num_devices = int(rng.integers(1, 17)) if rng.random() < 0.5 else int(rng.integers(1, 5))
    num_ops = int(rng.integers(1, 60))

    def figures(count: int, high: int, zero: float = 0.3) -> Array:
        values = rng.integers(0, high, count).astype(float) if whole else rng.random(count) * high
        return np.where(rng.random(count) < zero, 0.0, values)

    builder = GraphBuilder(f"nasty_{seed}")
    names: list[str] = []
    parameters: list[str] = []
    density = rng.random() * 3
    for op in range(num_ops):
        if rng.random() < 0.25:
            parameters.append(builder.parameter(f"p{op}", int(figures(1, 50)[0])))
            continue
        inputs = [str(n) for n in rng.permutation(names)[: rng.poisson(density)]]
        inputs += [str(n) for n in rng.permutation(parameters)[: rng.poisson(0.8)]]
        update = bool(inputs) and rng.random() < 0.15
        name = builder.add(
            f"op{op}",
            "op",
            [str(n) for n in rng.permutation(inputs)],
            output_bytes=int(figures(1, 40)[0]),
            workspace_bytes=int(figures(1, 30, 0.7)[0]),
            phase="update" if update else str(rng.choice(["input", "forward", "backward"])),
        )
        names.append(name)
    graph = builder.freeze()
    cluster = _nasty_cluster(rng, num_devices, whole)
    times = figures(num_ops * num_devices, 6).reshape(num_ops, num_devices)
    if rng.random() < 0.5:
        times[:] = times[:, :1]
    times[graph.is_parameter] = 0.0
    order = str(rng.choice(ORDERS))
    placement = Placement(
        rng.integers(0, num_devices, num_ops)
        if rng.random() < 0.8
        else np.full(num_ops, rng.integers(num_devices)),
        order=order,
        priority=figures(num_ops, 5) if order == "priority" else None,
        prefetch_bytes=rng.integers(0, 120, num_devices)
        if rng.random() < 0.6
        else int(rng.integers(0, 3)) * 40,
    )
    if rng.random() < 0.4:
        busy = [figures(2, 4).tolist() for _ in cluster.links]
        pairs = zip(cluster.links, busy, strict=True)
        links = tuple(
            replace(link, sender_busy=out, receiver_busy=back) for link, (out, back) in pairs
        )
        cluster = replace(cluster, links=links)
    return Problem(graph, cluster, times), placement  # type: ignore[arg-type]


def _nasty_cluster(rng: np.random.Generator, num_devices: int, whole: bool) -> Cluster:
    def figure(high: int) -> float:
        return float(rng.integers(0, high)) if whole else float(rng.random() * high)

    gaps = rng.random() < 0.3
    devices = tuple(
        Device(
            f"d{d}",
            "cpu",
            int(rng.integers(10, 400)),
            host=f"h{d % 2}",
            gap=figure(3) if gaps else 0.0,
        )
        for d in range(num_devices)
    )
    broadcast = bool(rng.random() < 0.25)
    shared = str(rng.choice(["{source}->{target}", "{source}", "{target}", "{source_host}", "one"]))
    links = [
        Link(
            "*",
            "*",
            1.0 + figure(20),
            figure(3),
            bus="{source}" if broadcast else shared,
            gap=figure(3) * gaps,
        )
    ]
    if num_devices > 1:
        for _ in range(int(rng.integers(0, 4))):
            source, target = (f"d{d}" for d in rng.choice(num_devices, 2, replace=False))
            bus = "{source}" if broadcast else str(rng.choice([shared, "other"]))
            both = bool(rng.random() < 0.5)
            links.append(Link(source, target, 1.0 + figure(9), figure(2), both_ways=both, bus=bus))
    if rng.random() < 0.3:
        links = [replace(link, send_bandwidth=link.bandwidth / (1.0 + figure(4))) for link in links]
        links = [replace(link, send_latency=link.latency + figure(2)) for link in links]
    copies = bool(rng.random() < 0.8)
    return Cluster("nasty", devices, tuple(links), broadcast=broadcast, copies_in_memory=copies)
