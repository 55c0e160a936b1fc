"""Every placement of a tiny problem, in every order: the truth that bounds and exact placers are
held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.batch import run_batch


@dataclass(frozen=True)
class Optimum:
    """The best there is. A time is infinite where nothing fits."""

    step_time: float  # of the placements that fit
    unlimited: float  # of all placements
    placement: Placement | None  # that takes `step_time`
    num_simulations: int


def exhaustive(problem: Problem) -> Optimum:
    """Try all placements, all dispatch orders and `fifo`, and windows as large as any choice of the
    parameters."""
    devices = all_devices(problem)
    best, unlimited, found, count = np.inf, np.inf, None, 0
    for order in _orders(problem.graph):
        layout = Simulator.of(problem).layout(order)
        for window in _windows(problem.graph):
            step_time, fits = _run(problem, layout, devices, window, order.order == "fifo")
            count += len(devices)
            unlimited = min(unlimited, float(step_time.min()))
            row = int(np.where(fits, step_time, np.inf).argmin())
            if fits[row] and step_time[row] < best:
                best = float(step_time[row])
                found = Placement(devices[row], order.order, order.priority, window)
    return Optimum(best, unlimited, found, count)


def _run(
    problem: Problem, layout: object, devices: Array, window: int, fifo: bool
) -> tuple[Array, Array]:
    count, cluster = len(devices), problem.cluster
    step_time, moves = np.zeros(count), np.zeros(count, np.int64)
    peak = np.zeros((count, cluster.num_devices), np.int64)
    windows = np.full(cluster.num_devices, window, dtype=np.int64)
    run_batch(
        layout, devices, windows, fifo, cluster.has_shared_buses, True, step_time, peak, moves
    )
    return step_time, np.asarray((peak <= cluster.memory).all(axis=1))


def all_devices(problem: Problem) -> Array:  # [batch, ops] i4
    """Every choice of devices that respects groups and allowed kinds."""
    graph = problem.graph
    leader = np.arange(graph.num_ops)
    members = graph.group >= 0
    leader[members] = problem.group_leader[graph.group[members]]
    choices = []
    for op in range(graph.num_ops):
        together = problem.allowed[leader == op]
        choices.append(np.flatnonzero(together.all(axis=0)).tolist() if len(together) else [0])
    return np.array(list(product(*choices)), dtype=np.int32)[:, leader]


def _orders(graph: Graph) -> Iterator[Placement]:
    """A placement with each order there is; its devices mean nothing."""
    nowhere = np.zeros(graph.num_ops, np.int32)
    yield Placement(nowhere, "fifo")
    for sequence in _sequences(graph, [], set()):
        priority = np.zeros(graph.num_ops)
        priority[sequence] = -np.arange(1, len(sequence) + 1)
        yield Placement(nowhere, "priority", priority)


def _sequences(graph: Graph, done: list[int], seen: set[int]) -> Iterator[list[int]]:
    """All the ways to list the ops, parameters left out, inputs first."""
    parameter = graph.is_parameter
    left = [op for op in range(graph.num_ops) if not parameter[op] and op not in seen]
    if not left:
        yield list(done)
    for op in left:
        if all(parameter[source] or source in seen for source in graph.inputs_of(op).tolist()):
            yield from _sequences(graph, [*done, op], {*seen, op})


def _windows(graph: Graph) -> list[int]:
    """What any of the parameters take together: no other window behaves otherwise. Few, where these
    are many."""
    sums = {0}
    for size in graph.output_bytes[graph.is_parameter].tolist():
        sums |= {one + size for one in sums}
    ranked = sorted(sums)
    return ranked if len(ranked) <= 8 else [ranked[0], ranked[len(ranked) // 2], ranked[-1]]


def tiny(seed: int, most_ops: int = 6, plain: bool = False, crowded: bool = False) -> Problem:
    """A random problem of 2 to `most_ops` ops on 1 to 3 devices, with everything that may go wrong
    in a bound.

    Shared buses, broadcast, gaps, slow sends, ends that are kept busy, remote parameters, updates,
    groups, allowed kinds, ties, zeros, little memory. `plain` leaves out shared buses, broadcast,
    busy ends and parameters: what an exact solver can schedule without a gap. `crowded` has a slow
    device with much memory, fast ones with little, and many parameters.
    """
    rng = np.random.default_rng(seed)
    whole = rng.random() < 0.5
    num_devices = int(rng.choice([1, 2, 2, 2, 3]))

    def figure(high: int, zero: float = 0.25) -> float:
        if rng.random() < zero:
            return 0.0
        return float(rng.integers(0, high)) if whole else float(rng.random() * high)

    builder = GraphBuilder(f"tiny_{seed}")
    names: list[str] = []
    parameters: list[str] = []
    density = rng.random() * 2
    grouped = rng.random() < 0.3
    for op in range(int(rng.integers(2, most_ops + 1))):
        group = f"g{rng.integers(2)}" if grouped and rng.random() < 0.6 else None
        allowed = (
            ["cpu", "cuda"][: int(rng.integers(1, 3))]
            if rng.random() < 0.1 and group is None
            else []
        )
        settings: dict[str, Any] = {
            "group": group,
            "allowed": allowed,
            "output_bytes": int(figure(40)),
        }
        if not plain and rng.random() < (0.45 if crowded else 0.3):
            parameters.append(builder.parameter(f"p{op}", **settings))
            continue
        inputs = [str(n) for n in rng.permutation(names)[: rng.poisson(density)]]
        inputs += [str(n) for n in rng.permutation(parameters)[: rng.poisson(1.0)]]
        phase = "update" if inputs and rng.random() < 0.25 else "forward"
        workspace = int(figure(30, 0.7))
        names.append(
            builder.add(f"op{op}", "op", inputs, phase=phase, workspace_bytes=workspace, **settings)
        )
    graph = builder.freeze()
    gaps = rng.random() < 0.3
    memory = int(rng.choice([30, 60] if crowded else [60, 100, 1000]))
    devices = tuple(
        Device(
            f"d{d}",
            "cpu" if d == 0 else "cuda",
            memory * int(rng.integers(1, 3)),
            gap=figure(3) * gaps,
        )
        for d in range(num_devices)
    )
    broadcast = bool(not plain and rng.random() < 0.25)
    shared = "{source}" if broadcast else "{source}->{target}"
    if not plain and not broadcast:
        shared = str(rng.choice([shared, "{source}", "{target}", "one"]))
    links = [Link("*", "*", 2.0 + figure(20), figure(3), bus=shared, gap=figure(3) * gaps)]
    if num_devices > 1 and rng.random() < 0.4:
        links.append(
            Link(
                "d0",
                "*",
                2.0 + figure(9),
                figure(2),
                bus=shared,
                both_ways=bool(rng.random() < 0.5),
            )
        )
    cluster = Cluster(
        "tiny",
        devices,
        tuple(links),
        broadcast=broadcast,
        copies_in_memory=bool(rng.random() < 0.8),
    )
    times = np.array([[figure(8) for _ in devices] for _ in range(graph.num_ops)])
    if rng.random() < 0.5:
        times[:] = times[:, :1]
    if crowded:
        devices = tuple(
            replace(device, memory=1000 if d == 0 else memory) for d, device in enumerate(devices)
        )
        cluster = replace(cluster, devices=devices)
        times[:, 0] *= 4
    times[graph.is_parameter] = 0.0
    if rng.random() < 0.4:
        links = [replace(link, send_bandwidth=link.bandwidth / (1.0 + figure(8))) for link in links]
        links = [replace(link, send_latency=link.latency + figure(4)) for link in links]
        cluster = replace(cluster, links=tuple(links))
    if not plain and rng.random() < 0.3:
        links = [replace(link, sender_busy=figure(3), receiver_busy=figure(3)) for link in links]
        cluster = replace(cluster, links=tuple(links))
    return Problem(graph, cluster, times)  # type: ignore[arg-type]
