"""Problems and searches that tests of placers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.problem import Problem
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating
from support.nasty import nasty

KINDS = ("cpu", "cuda", "tpu")


def searching(
    problem: Problem, seed: int = 0, trials: float = float("inf")
) -> tuple[Search, Evaluation]:
    search = Search(problem, Simulating(problem, 1), Budget(trials), seed)
    return search, Evaluation(search, "test")


def machine(
    *memory: int, kinds: Sequence[str] = (), bandwidth: float = 1e6, hosts: Sequence[str] = ()
) -> Cluster:
    """Devices with so many bytes, GPUs unless told otherwise, and links from each to each."""
    devices = tuple(
        Device(
            f"d{number}",
            kinds[number] if kinds else "cuda",
            size,
            host=hosts[number] if hosts else "host",
        )
        for number, size in enumerate(memory)
    )
    links = (Link("*", "*", bandwidth),) if len(memory) > 1 else ()
    return Cluster("machine", devices, links)


def model(modules: Sequence[str], size: int = 10, weight: int = 100, updates: bool = True) -> Graph:
    """A chain of forward ops, one for each module path, each with a parameter, run backward and
    updated."""
    builder = GraphBuilder("model")
    builder.add("input", phase="input", output_bytes=size)
    before = "input"
    names = [f"{number}:{module}" for number, module in enumerate(modules)]
    for name, module in zip(names, modules, strict=True):
        builder.parameter(f"{name}/weight", weight, module=module)
        before = builder.add(
            f"{name}/forward", inputs=[before, f"{name}/weight"], output_bytes=size, module=module
        )
    for name, module in reversed(list(zip(names, modules, strict=True))):
        inputs = [before, f"{name}/weight", f"{name}/forward"]
        before = builder.add(
            f"{name}/backward", inputs=inputs, output_bytes=size, module=module, phase="backward"
        )
        if updates:
            gradient = builder.add(
                f"{name}/gradient", inputs=inputs, output_bytes=weight, phase="backward"
            )
            builder.add(
                f"{name}/update", inputs=[gradient, f"{name}/weight"], phase="update", module=module
            )
    return builder.freeze()


def timed(
    graph: Graph, cluster: Cluster, seconds: float = 1.0, speed: Sequence[float] = ()
) -> Problem:
    """Every op that is no parameter takes as long, divided by the speed of the device."""
    time = np.where(graph.is_parameter, 0.0, seconds)[:, None] / np.array(
        speed or [1.0] * cluster.num_devices
    )
    return Problem(graph, cluster, time)  # type: ignore[arg-type]


def nastier(seed: int) -> Problem:
    """A nasty problem with module paths, groups, and ops that may not run everywhere."""
    problem, _ = nasty(seed)
    graph, rng = problem.graph, np.random.default_rng(seed + 1_000_000)
    devices = tuple(
        replace(device, kind=str(rng.choice(KINDS))) for device in problem.cluster.devices
    )
    cluster = replace(problem.cluster, devices=devices)
    there = sorted({device.kind for device in devices})
    allowed = [
        tuple(rng.choice(there, rng.integers(1, 3))) if rng.random() < 0.3 else ()
        for _ in graph.op_names
    ]
    paths = ("", "a", "b.0", "b.1@2", "b.1", "c.x.0", "Mixed_5b", "cell_0", "lstm.0@4")
    group, names = np.full(graph.num_ops, -1), []
    for _ in range(int(rng.integers(0, 4))):
        common, members = set(there), []
        for op in rng.permutation(graph.num_ops)[: rng.integers(2, 8)].tolist():
            may = common & (set(allowed[op]) or common)
            if group[op] < 0 and may:
                common, members = may, [*members, op]
        if members:
            group[members] = len(names)
            names.append(f"g{len(names)}")
    modules = tuple(str(rng.choice(paths)) for _ in graph.op_names)
    graph = replace(
        graph, allowed=tuple(allowed), group=group, group_names=tuple(names), modules=modules
    )
    return Problem(graph, cluster, problem.costs)
