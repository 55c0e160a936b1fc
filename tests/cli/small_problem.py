"""Six ops and three devices: a parameter, a group, an op for the CPU only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder


def build_graph() -> Graph:
    builder = GraphBuilder("tiny")
    builder.parameter("weight", 4000)
    builder.add("images", "input", output_bytes=8000, phase="input")
    builder.add("left", "matmul", ["images", "weight"], flop=1e9, output_bytes=6000, group="pair")
    builder.add("right", "matmul", ["images"], flop=2e9, output_bytes=5000, group="pair")
    builder.add("load", "decode", ["images"], flop=1e6, output_bytes=10, allowed=["cpu"])
    builder.add("sum", "add", ["left", "right", "load"], flop=1e7, output_bytes=7000)
    return builder.freeze()


def build_cluster(memory: int = 2**30) -> Cluster:
    figures: dict[str, Any] = {
        "peak": {"float32": 1e12},
        "memory_bandwidth": 1e11,
        "launch_overhead": 1e-6,
    }
    devices = (
        Device("cpu:0", "cpu", 2**30, **figures),
        Device("cuda:0", "cuda", memory, **figures),
        Device("cuda:1", "cuda", 2**30, **figures),
    )
    return Cluster("mini", devices, (Link("*", "*", 1e9, 1e-5),), description="Three devices.")


def tight_cluster(memory: int) -> Cluster:
    """Every device with so little memory."""
    cluster = build_cluster()
    return Cluster(
        "tight", tuple(replace(device, memory=memory) for device in cluster.devices), cluster.links
    )


# weight, images, left, right, load, sum
DEVICES = [0, 1, 1, 1, 0, 2]
