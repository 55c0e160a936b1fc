"""The cluster that a plan is made for: the machine with less memory, and its host's memory as a
device of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roost.core.cluster import MEMORY, Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.units import parse_bytes, show_bytes
from roost.errors import Infeasible, InputError
from roost.presets import cluster as preset
from roost.presets.probe import probe
from roost.simulator.compiled import simulate

STORE = "host memory"
# Share of the activations that PyTorch holds beyond their last use: 0.28 and 0.43 were seen (Llama,
# on an H200).
_LONGER = 0.45
_NARROW = 50
_OURS = "no link of the machine: how weights and what is computed share one (see roost.plan)"
_NEVER = 1.0  # bytes/s: of a way that nothing should take
_LONG = 1e6  # seconds: nothing is computed there
_HOP = 1e-4  # seconds, where there is no GPU to try it on
_COPY = 1e-5  # seconds from the end of one copy in a stream to the beginning of the next, at most


def cluster_of(cluster: Cluster | str | None, memory: Mapping[str, int | str]) -> Cluster:
    """The cluster that is meant, this machine where none is, with caps on its memory."""
    if cluster is None:
        return probe(memory)
    found = preset(cluster) if isinstance(cluster, str) else cluster
    for name in memory:
        found.index_of(name)
    devices = [
        replace(one, memory=min(one.memory, parse_bytes(memory.get(one.name, one.memory))))
        for one in found.devices
    ]
    if sum(one.kind == "cpu" for one in devices) > 1:
        raise InputError(
            f"cluster {found.name!r} has several CPUs; a model as written runs on one: take the "
            f"graph runtime for more"
        )
    return replace(found, devices=tuple(devices))


def main_of(cluster: Cluster) -> str:
    """The device with the highest rate that is no CPU, or the first."""
    faster = [one for one in cluster.devices if one.kind != "cpu"]
    return max(
        faster or cluster.devices[:1], key=lambda one: max(one.peak.values(), default=0.0)
    ).name


def with_less(cluster: Cluster, room: Mapping[str, int]) -> Cluster:
    """The cluster with so many bytes taken off its devices; raises `Infeasible` where one has no
    more than that."""
    for name, size in room.items():
        device = cluster.devices[cluster.index_of(name)]
        if size >= device.memory:
            raise Infeasible(
                f"nothing fits: of the {show_bytes(device.memory)} of {name!r} {show_bytes(size)} "
                f"are to be left for "
                "keys and values, what is reserved, and what libraries and PyTorch take; give it "
                "more, or reserve less",
                name,
                size - device.memory + 1,
            )
    devices = [
        replace(one, memory=max(0, one.memory - room.get(one.name, 0))) for one in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def kept_longer(problem: Problem, main: str) -> int:
    """Bytes that a model as written holds beyond the last use of its tensors: until a function
    returns."""
    everywhere = np.full(problem.graph.num_ops, problem.cluster.index_of(main))
    peak = simulate(problem, problem.placement(everywhere)).peak_memory[everywhere[0]]
    weights = int(problem.graph.output_bytes[problem.graph.is_parameter].sum())
    return int(_LONGER * max(0, int(peak) - weights))


def with_store(problem: Problem, main: str, hop: float, large: bool = False) -> Problem:
    """The problem with the memory of the CPU as one more device, from which weights are streamed.

    So they queue for the link by themselves: what a CPU has computed goes to the GPU past them (see
    `aside.py`). `hop` is what it takes for a tensor to go to the CPU and come back. `large`: what
    is computed there may be large, and takes as long as it does; else its way is so slow that no
    weights go there, beside those that queue.
    """
    cluster = problem.cluster
    host = next((device for device in cluster.devices if device.kind == "cpu"), None)
    if host is None or host.name == main:
        return problem
    devices = (*cluster.devices, Device(STORE, MEMORY, host.memory, host.host))
    one, other = cluster.index_of(host.name), cluster.index_of(main)
    # Copies of weights wait for no thread, nor does the GPU for what the CPU has made: that is
    # within the hop.
    forth, back = min(float(cluster.latency[one, other]), _COPY), float(cluster.latency[other, one])
    rate = [1 / float(cluster.seconds_per_byte[pair]) for pair in ((one, other), (other, one))]
    made = 1 / float(cluster.sent_seconds_per_byte[one, other]) if large else rate[0] / _NARROW
    ways = {  # from, to: bytes/s, latency, bus
        (STORE, "*"): (rate[0], forth, "weights to {target}"),
        ("*", STORE): (rate[1], back, "weights from {source}"),
        (STORE, host.name): (_NEVER, 0.0, "no need of it"),
        (main, host.name): (
            rate[1],
            hop - forth if hop > forth else back,
            f"{main} to {host.name}",
        ),
        (host.name, main): (made, forth, f"{host.name} to {main}"),
    }
    links = [
        Link(source, target, bandwidth, latency, both_ways=False, bus=bus, figures_from=_OURS)
        for (source, target), (bandwidth, latency, bus) in ways.items()
    ]
    seconds = np.where(problem.graph.is_parameter, 0.0, _LONG)[:, None]
    costs = Costs(np.hstack([problem.op_time, seconds]), problem.costs.source)
    return Problem(
        problem.graph, replace(cluster, devices=devices, links=(*cluster.links, *links)), costs
    )


def without_store(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Problem and placement without the device that memory is."""
    cluster = problem.cluster
    if STORE not in cluster.device_names:
        return problem, placement
    host = next(number for number, one in enumerate(cluster.devices) if one.kind == "cpu")
    store, real = cluster.index_of(STORE), cluster.devices[:-1]
    device = np.where(placement.device == store, host, placement.device)
    links = tuple(link for link in cluster.links if link.figures_from != _OURS)
    smaller = Problem(
        problem.graph,
        replace(cluster, devices=real, links=links),
        Costs(problem.op_time[:, :store], problem.costs.source),
    )
    window = np.broadcast_to(placement.prefetch_bytes, len(cluster.devices))[:store]
    return smaller, smaller.placement(device, prefetch_bytes=np.array(window))


def check_store(cluster: Cluster) -> None:
    """Refuse a cluster from a file whose memory of the host is not as `with_store` adds it."""
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
    """Costs with which nothing is computed on another device."""
    others = np.arange(cluster.num_devices) != cluster.index_of(main)
    computes = ~graph.is_parameter
    return Costs(np.where(computes[:, None] & others, _LONG, costs.op_time), costs.source)


def with_share(problem: Problem, share: float) -> Problem:
    """The problem with a part of the host's memory for the CPU, and as much for streamed
    weights."""
    cluster = problem.cluster
    if share == 1.0 or STORE not in cluster.device_names:
        return problem
    devices = [
        replace(one, memory=int(one.memory * share)) if one.kind in ("cpu", MEMORY) else one
        for one in cluster.devices
    ]
    return Problem(problem.graph, replace(cluster, devices=tuple(devices)), problem.costs)


def hop_of(main: str) -> float:
    """Seconds from a GPU to the CPU and back, with nothing done there."""
    if not main.startswith("cuda"):
        return 0.0
    import torch

    from roost.runtime.whole.cpu_beside_gpu import hop_seconds

    return hop_seconds(torch.device(main)) if torch.cuda.is_available() else _HOP
