"""Small random problems with everything that may go wrong in a simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.placement import ORDERS, Placement
from roost.core.problem import Problem


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
