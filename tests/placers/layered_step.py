"""Training steps of equal layers in a row, and machines of equal devices, for tests of copies."""

from __future__ import annotations

import numpy as np

import roost
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.problem import Problem
from roost.search.microbatches import unrolled_problem
from roost.transforms.microbatch import Microbatch

SECONDS = {"mm": 1.0, "mm_input": 1.0, "mm_weight": 1.0}  # of one microbatch


def layered_step(num_layers: int = 4, weight: int = 1000, activation: int = 100) -> Graph:
    """Layers of one product each: forward, gradient of the input, gradient of the weight."""
    builder = GraphBuilder("layers")
    last = builder.add("x", "input", phase="input", output_bytes=activation)
    inputs = []
    for number in range(num_layers):
        module = {"module": f"layers.{number}"}
        builder.parameter(f"w{number}", weight, **module)
        inputs.append(last)
        last = builder.add(f"y{number}", "mm", [last, f"w{number}"], flop=1.0,
                           output_bytes=activation, **module)  # fmt: skip
    for number in reversed(range(num_layers)):
        traits = {"phase": "backward", "module": f"layers.{number}", "flop": 1.0}
        weight_op = builder.add(f"gw{number}", "mm_weight", [last, inputs[number]],
                                output_bytes=weight, **traits)  # fmt: skip
        last = builder.add(f"gx{number}", "mm_input", [last, f"w{number}"],
                           output_bytes=activation, **traits)  # fmt: skip
        builder.add(f"w{number}:update", "sgd", [f"w{number}", weight_op], phase="update",
                    module=f"layers.{number}")  # fmt: skip
    return builder.freeze()


def machine(num_devices: int = 4, memory: int = 10**6, bandwidth: float = 1e9) -> Cluster:
    devices = tuple(
        Device(f"cuda:{d}", "cuda", memory, peak={"float32": 1e12}, memory_bandwidth=1e12)
        for d in range(num_devices)
    )
    return Cluster("machine", devices, (Link("*", "*", bandwidth),))


def step_problem(graph: Graph, cluster: Cluster, speeds: tuple[float, ...] = ()) -> Problem:
    """One second for each product, faster by the speed of its device."""
    seconds = np.array([SECONDS.get(kind, 0.0) for kind in graph.kinds])
    speed = np.array(speeds or (1.0,) * cluster.num_devices)
    return roost.Problem(graph, cluster, seconds[:, None] / speed[None, :])


def unrolled(
    count: int, num_devices: int = 4, speeds: tuple[float, ...] = (), **more: int
) -> Problem:
    """The step of four layers in microbatches."""
    graph = layered_step(**more)
    base = step_problem(graph, machine(num_devices), speeds)
    return unrolled_problem(base, Microbatch(count).apply(graph))
