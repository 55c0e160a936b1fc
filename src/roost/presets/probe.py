"""This machine as a cluster; its figures are measured once for its hardware."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from roost.core.cluster import MOST_DEVICES, Cluster, Device, Link
from roost.core.units import parse_bytes, show_bytes
from roost.errors import InputError, UnknownName
from roost.presets import machine, measurement_cache

_log = logging.getLogger(__name__)

_METHOD = 8  # another number for another way of measuring, which makes kept figures useless
_ROUND = 64 * 2**20  # bytes; free memory changes a little all the time
_DEVICE_FIGURES = """
memory: {memory}
peak: measured here, square matrix products in each type, with the settings that PyTorch has
memory_bandwidth: measured here, a copy inside the device, bytes read and written both counted
launch_overhead: measured here, what the host takes for a tiny op
"""
_LINK_FIGURES = """
bandwidth: measured here, many MiB {way}
send_bandwidth: {sends}
send_latency: {waits}
sender_busy: {sender}
receiver_busy: {receiver}
latency: measured here, 4 KiB {way}, from the call to the arrival
bus: assumed, each direction is separate
"""


def probe(
    memory: Mapping[str, int | str] | None = None, *, virtual: int = 0, refresh: bool = False
) -> Cluster:
    """The cluster of this machine: `cpu`, and `cuda:0` and so on for its GPUs.

    `memory` caps the memory of devices, as in {"cuda:0": "6GiB"}. With `virtual` the devices are so
    many threads instead, `cpu:0` and so on, which share cores and memory evenly. Measuring takes
    less than a minute. The figures are kept for this hardware, driver and PyTorch; `refresh`
    measures them again. Raises UnknownName for a device that is not here, and InputError for a cap
    above the memory.
    """
    if not isinstance(virtual, int) or not 0 <= virtual <= MOST_DEVICES:
        raise InputError(
            f"virtual is {virtual!r}; it must be a number of devices, at most {MOST_DEVICES}"
        )
    names = _names(virtual)
    caps = _caps(memory or {}, names)
    key = machine.hardware() | {"virtual": virtual, "method": _METHOD}
    figures = {} if refresh else measurement_cache.read("probe", key)
    if not _sound(figures, names):
        _log.info("measuring this machine, once for its hardware: less than a minute")
        figures = measured(virtual)
        measurement_cache.write("probe", key, figures)
    room = {name: _memory(name, virtual) for name in names}
    for name, cap in caps.items():
        if cap > room[name]:
            raise InputError(
                f"memory of {name!r} is {show_bytes(cap)}; only {show_bytes(room[name])} can be had"
            )
    devices = tuple(
        _device(name, figures["devices"][name], caps.get(name, room[name]), name in caps)
        for name in names
    )
    links = tuple(_link(*row) for row in figures["links"])
    return Cluster("here", devices, links, _description(key))


def measured(virtual: int) -> dict[str, Any]:
    """The figures of each device, and of each link as `_row` orders them."""
    from roost.presets import _figures

    if virtual:
        cores = machine.shares(virtual)
        by_size = {len(share): share for share in cores}
        cpus = {size: _figures.of_cpu(size, share) for size, share in by_size.items()}
        link = _figures.between_threads() if virtual > 1 else None
        return {
            "devices": {f"cpu:{number}": cpus[len(share)] for number, share in enumerate(cores)},
            "links": [_row("*", "*", link, "copied by a thread")] if link else [],
        }
    import torch

    own = machine.parts(["cpu", *["cuda"] * machine.num_gpus()])[0]
    # Threads and cores of the host.
    host = min(len(own), torch.get_num_threads()), own if machine.num_gpus() else None
    devices = {"cpu": _figures.of_cpu(*host)}
    links: list[list[Any]] = []
    for number in range(machine.num_gpus()):
        name = f"cuda:{number}"
        devices[name] = _figures.of_gpu(number)
        links += [
            _row("cpu", name, _figures.host_to_gpu(number, *host), "from pinned memory"),
            _row(name, "cpu", _figures.gpu_to_host(number, *host), "to pinned memory"),
        ]
        for other in range(number):
            for one, two in ((other, number), (number, other)):
                figures = _figures.gpu_to_gpu(one, two)
                links.append(_row(f"cuda:{one}", f"cuda:{two}", figures, "from GPU to GPU"))
    return {"devices": devices, "links": links}


def _row(source: str, target: str, figures: Mapping[str, float], way: str) -> list[Any]:
    """The arguments of `_link`, as the cache keeps them."""
    more = ("send_bandwidth", "send_latency", "sender_busy", "receiver_busy")
    rest = (figures.get(name, 0.0) for name in more)
    return [source, target, figures["bandwidth"], figures["latency"], way, *rest]


def _names(virtual: int) -> list[str]:
    if virtual:
        return [f"cpu:{number}" for number in range(virtual)]
    return ["cpu", *(f"cuda:{number}" for number in range(machine.num_gpus()))]


def _caps(memory: Mapping[str, int | str], names: list[str]) -> dict[str, int]:
    for name in memory:
        if name not in names:
            raise UnknownName("device of this machine", name, names)
    return {name: parse_bytes(size) for name, size in memory.items()}


def _memory(name: str, virtual: int) -> int:
    """The memory that a device may have, rounded down so that small changes make no new problem."""
    if name.startswith("cuda:"):
        room = machine.gpu_memory(int(name.removeprefix("cuda:")))
    else:
        room = machine.available_memory() // max(virtual, 1)
    return room // _ROUND * _ROUND


def _device(name: str, figures: Mapping[str, Any], memory: int, capped: bool) -> Device:
    kind = name.partition(":")[0]
    source = "what this process can have" if kind == "cuda" else "what is available"
    if capped:
        source = "as asked for"
    return Device(
        name,
        kind,
        memory,
        peak=dict(figures["peak"]),
        memory_bandwidth=figures["memory_bandwidth"],
        launch_overhead=figures["launch_overhead"],
        figures_from=_DEVICE_FIGURES.format(memory=source),
    )


def _link(
    source: str,
    target: str,
    bandwidth: float,
    latency: float,
    way: str,
    send_bandwidth: float,
    send_latency: float,
    sender_busy: float,
    receiver_busy: float,
) -> Link:
    sends = "measured here, 1, 4 and 16 MiB that were just made, with what the host does for it"
    waits = (
        "measured here, what it adds to an op on either side that the other side goes on after "
        "it, less busy ends"
    )
    sender = "measured here, what the thread that sends 4 KiB takes for it"
    receiver = (
        "measured here, what the thread that receives 4 KiB takes for it, or the threads of a CPU "
        "to wake up"
    )
    figures = _LINK_FIGURES.format(
        way=way,
        sends=sends if send_bandwidth else "assumed, no less than bandwidth",
        waits=waits if send_latency else "assumed, no more than latency",
        sender=sender if sender_busy else "assumed, not busy",
        receiver=receiver if receiver_busy else "assumed, not busy",
    )
    return Link(
        source,
        target,
        bandwidth,
        latency,
        both_ways=source == target,
        figures_from=figures,
        send_bandwidth=send_bandwidth,
        send_latency=send_latency,
        sender_busy=sender_busy,
        receiver_busy=receiver_busy,
    )


def _description(key: Mapping[str, Any]) -> str:
    parts = [f"{key['cpu']}, {key['cores']} cores, {key['threads']} threads", *key["gpus"]]
    return " + ".join(parts) + (f", as {key['virtual']} devices" if key["virtual"] else "")


def _sound(figures: Mapping[str, Any], names: list[str]) -> bool:
    """Tell whether kept figures can be used: anyone may have written the file."""
    try:
        numbers = [value for row in figures["links"] for value in row[2:4]]
        for name in names:
            device = figures["devices"][name]
            numbers += [device["memory_bandwidth"], device["launch_overhead"]]
            numbers += device["peak"].values()
        if not all(map(_is_positive, numbers)):
            return False
        devices = tuple(_device(name, figures["devices"][name], 1, False) for name in names)
        Cluster("here", devices, tuple(_link(*row) for row in figures["links"]))
        return all(device.peak for device in devices)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _is_positive(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
