"""The cluster of a plan: a machine with less memory, and its host memory as one more device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from roost.core.cluster import MEMORY, Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.units import parse_bytes, show_bytes
from roost.errors import Infeasible, InputError
from roost.presets import cluster as preset
from roost.presets.probe import probe
from roost.runtime.whole.cpu_beside_gpu import hop_seconds
from roost.simulator.compiled import simulate

STORE = "host memory"
# Memory of libraries and of rounding by the allocator, which is in no graph. PyTorch has cuBLAS
# keep 32 MiB for each stream on a Hopper GPU.
LIBRARIES = 96 * 2**20
# Share of the activations that PyTorch holds after their last use: 0.28 and 0.43 were seen (Llama,
# on an H200).
_HELD_LONGER = 0.45
_NARROW = 50
_OURS = "no link of the machine: how weights and what is computed share one (see roost.plan)"
_NEVER = 1.0  # bytes/s: of a link that nothing should use
_LONG = 1e6  # seconds: no op should run there
_HOP = 1e-4  # seconds, where no GPU can measure it
_COPY = 1e-5  # seconds at most from the end of one copy in a stream to the begin of the next


def cluster_of(cluster: Cluster | str | None, memory: Mapping[str, int | str]) -> Cluster:
    """Give the cluster of a plan for whole modules, with caps; None: this machine."""
    capped = capped_cluster(cluster, memory)
    if sum(one.kind == "cpu" for one in capped.devices) > 1:
        raise InputError(
            f"cluster {capped.name!r} has several CPUs; a model as written runs on one: take the "
            f"graph runtime for more"
        )
    return capped


def without_libraries(cluster: Cluster) -> Cluster:
    """The cluster without the memory of GPUs that no graph knows of."""
    gpus = [device.name for device in cluster.devices if device.name.startswith("cuda")]
    return with_less(cluster, dict.fromkeys(gpus, LIBRARIES))


def capped_cluster(cluster: Cluster | str | None, memory: Mapping[str, int | str]) -> Cluster:
    """Give the cluster with caps on its memory; None: this machine."""
    if cluster is None:
        return probe(memory)
    named = preset(cluster) if isinstance(cluster, str) else cluster
    for name in memory:
        named.index_of(name)
    devices = [
        replace(one, memory=min(one.memory, parse_bytes(memory.get(one.name, one.memory))))
        for one in named.devices
    ]
    return replace(named, devices=tuple(devices))


def main_of(cluster: Cluster) -> str:
    """Give the device with the highest rate, no CPU if there is any other."""
    others = [one for one in cluster.devices if one.kind != "cpu"] or cluster.devices[:1]
    return max(others, key=lambda one: max(one.peak.values(), default=0.0)).name


def with_less(cluster: Cluster, room: Mapping[str, int]) -> Cluster:
    """Take so many bytes off devices; raise `Infeasible` if a device has no more than that."""
    for name, size in room.items():
        device = cluster.devices[cluster.index_of(name)]
        if size >= device.memory:
            raise Infeasible(
                f"nothing fits: {name!r} has {show_bytes(device.memory)}, and {show_bytes(size)} "
                f"of it must stay free for keys and values, for what is reserved, and for PyTorch "
                f"and its libraries; give it more memory, or reserve less",
                name,
                size - device.memory + 1,
            )
    devices = [
        replace(one, memory=max(0, one.memory - room.get(one.name, 0))) for one in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def held_longer(problem: Problem, main: str) -> int:
    """Bytes that PyTorch holds after the last use of tensors, until a function returns."""
    number = problem.cluster.index_of(main)
    everywhere = problem.placement(np.full(problem.graph.num_ops, number))
    peak = int(simulate(problem, everywhere).peak_memory[number])
    weights = int(problem.graph.output_bytes[problem.graph.is_parameter].sum())
    return int(_HELD_LONGER * max(0, peak - weights))


def with_store(problem: Problem, main: str, hop: float, large: bool = False) -> Problem:
    """Add the memory of the CPU as one more device, from which weights are streamed.

    So weights queue for the link by themselves, and outputs of the CPU go to the GPU past them (see
    `cpu_beside_gpu.py`).

    - `hop`: seconds for a tensor to go to the CPU and come back.
    - `large`: outputs of the CPU may be large and take their time. Otherwise their link is so slow
      that no weights take it, past those that queue.
    """
    cluster = problem.cluster
    host = next((device for device in cluster.devices if device.kind == "cpu"), None)
    if host is None or host.name == main:
        return problem
    devices = (*cluster.devices, Device(STORE, MEMORY, host.memory, host.host))
    one = cluster.index_of(host.name)
    other = cluster.index_of(main)
    # Copies of weights wait for no thread. The GPU waits for outputs of the CPU within the hop.
    forth = min(float(cluster.latency[one, other]), _COPY)
    back = float(cluster.latency[other, one])
    rate_forth = 1 / float(cluster.seconds_per_byte[one, other])
    rate_back = 1 / float(cluster.seconds_per_byte[other, one])
    output_rate = rate_forth / _NARROW
    if large:
        output_rate = 1 / float(cluster.sent_seconds_per_byte[one, other])
    way_there = hop - forth if hop > forth else back
    ways = {  # from, to: bytes/s, latency, bus
        (STORE, "*"): (rate_forth, forth, "weights to {target}"),
        ("*", STORE): (rate_back, back, "weights from {source}"),
        (STORE, host.name): (_NEVER, 0.0, "no need of it"),
        (main, host.name): (rate_back, way_there, f"{main} to {host.name}"),
        (host.name, main): (output_rate, forth, f"{host.name} to {main}"),
    }
    links = [
        Link(source, target, bandwidth, latency, both_ways=False, bus=bus, figures_from=_OURS)
        for (source, target), (bandwidth, latency, bus) in ways.items()
    ]
    seconds = np.where(problem.graph.is_parameter, 0.0, _LONG)[:, None]
    costs = Costs(np.hstack([problem.op_time, seconds]), problem.costs.source)
    larger = replace(cluster, devices=devices, links=(*cluster.links, *links))
    return Problem(problem.graph, larger, costs)


def without_store(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Remove the device that `with_store` has added."""
    cluster = problem.cluster
    if STORE not in cluster.device_names:
        return problem, placement
    host = next(number for number, one in enumerate(cluster.devices) if one.kind == "cpu")
    store = cluster.index_of(STORE)
    links = tuple(link for link in cluster.links if link.figures_from != _OURS)
    real = replace(cluster, devices=cluster.devices[:-1], links=links)
    costs = Costs(problem.op_time[:, :store], problem.costs.source)
    smaller = Problem(problem.graph, real, costs)
    device = np.where(placement.device == store, host, placement.device)
    window = np.broadcast_to(placement.prefetch_bytes, len(cluster.devices))[:store]
    return smaller, smaller.placement(device, prefetch_bytes=np.array(window))


def check_store(cluster: Cluster) -> None:
    """Raise if the host memory of a cluster from a file is not as `with_store` adds it."""
    names = cluster.device_names
    if STORE not in names:
        return
    cpus = [device.name for device in cluster.devices if device.kind == "cpu"]
    if names[-1] != STORE or cluster.devices[-1].kind != MEMORY or not cpus:
        raise InputError(
            f"cluster.devices: {STORE!r} must be the last device, of kind {MEMORY!r}, beside one "
            f"of kind 'cpu'; save "
            "the plan again"
        )


def only_on(main: str, graph: Graph, cluster: Cluster, costs: Costs) -> Costs:
    """Make ops so slow on other devices that none runs there."""
    others = np.arange(cluster.num_devices) != cluster.index_of(main)
    computes = ~graph.is_parameter
    return Costs(np.where(computes[:, None] & others, _LONG, costs.op_time), costs.source)


def with_share(problem: Problem, share: float) -> Problem:
    """Give a part of the host's memory to the CPU, and as much to streamed weights."""
    cluster = problem.cluster
    if share == 1.0 or STORE not in cluster.device_names:
        return problem
    devices = [
        replace(one, memory=int(one.memory * share)) if one.kind in ("cpu", MEMORY) else one
        for one in cluster.devices
    ]
    return Problem(problem.graph, replace(cluster, devices=tuple(devices)), problem.costs)


def hop_of(main: str) -> float:
    """Seconds for a tensor to go from a GPU to the CPU and back, without work there."""
    if not main.startswith("cuda"):
        return 0.0
    return hop_seconds(torch.device(main)) if torch.cuda.is_available() else _HOP
