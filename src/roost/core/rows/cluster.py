"""The fields of `cluster.toml`, and clusters to and from them."""

from __future__ import annotations

import msgspec

from roost.core import units
from roost.core.cluster import Cluster, Device, Link
from roost.core.rows.base import File, Quantity, check_version, fields_of, file_of
from roost.errors import InputError

_DEVICE_UNITS = {
    "memory_bandwidth": units.RATE,
    "launch_overhead": units.SECONDS,
    "gap": units.SECONDS,
}
_LINK_UNITS = {
    "bandwidth": units.RATE,
    "latency": units.SECONDS,
    "gap": units.SECONDS,
    "send_bandwidth": units.RATE,
    "send_latency": units.SECONDS,
    "sender_busy": units.SECONDS,
    "receiver_busy": units.SECONDS,
}


class DeviceBlock(File):
    """One device, or several alike under `names`."""

    kind: str
    memory: Quantity
    name: str = ""
    names: list[str] = msgspec.field(default_factory=list)
    host: str = "host"
    peak: dict[str, Quantity] = msgspec.field(default_factory=dict)
    memory_bandwidth: Quantity = 0.0
    efficiency: dict[str, float] = msgspec.field(default_factory=dict)
    launch_overhead: Quantity = 0.0
    gap: Quantity = 0.0
    figures_from: str = ""


class LinkBlock(File):
    """The connections between devices: `between` both ways, or `source` to `target` one way."""

    bandwidth: Quantity
    between: list[str] = msgspec.field(default_factory=list)
    source: str = ""
    target: str = ""
    latency: Quantity = 0.0
    send_bandwidth: Quantity = 0.0
    send_latency: Quantity = 0.0
    sender_busy: Quantity = 0.0
    receiver_busy: Quantity = 0.0
    bus: str = "{source}->{target}"
    gap: Quantity = 0.0
    figures_from: str = ""


class ClusterFile(File, tag_field="format", tag="roost.cluster"):
    """`cluster.toml`: devices and the links between them."""

    version: int
    name: str
    devices: list[DeviceBlock]
    links: list[LinkBlock] = msgspec.field(default_factory=list)
    description: str = ""
    broadcast: bool = False
    copies_in_memory: bool = True


def cluster_file(cluster: Cluster) -> ClusterFile:
    devices = [
        file_of(
            DeviceBlock,
            device,
            memory=units.write_bytes(device.memory),
            peak=dict(device.peak),
            efficiency=dict(device.efficiency),
        )
        for device in cluster.devices
    ]
    links = []
    for link in cluster.links:
        ends = [link.source, link.target] if link.both_ways else []
        source, target = ("", "") if link.both_ways else (link.source, link.target)
        links.append(file_of(LinkBlock, link, between=ends, source=source, target=target))
    return file_of(ClusterFile, cluster, version=1, devices=devices, links=links)


def cluster_from(file: ClusterFile) -> Cluster:
    check_version(file.version, "cluster")
    devices: list[Device] = []
    for number, block in enumerate(file.devices):
        devices += _devices(block, f"devices[{number}]")
    links = tuple(_link(block, f"links[{number}]") for number, block in enumerate(file.links))
    others = fields_of(file, without=("version", "devices", "links"))
    return Cluster(devices=tuple(devices), links=links, **others)


def _devices(block: DeviceBlock, where: str) -> list[Device]:
    if bool(block.name) == bool(block.names):
        raise InputError(f"{where}: give either name, or names for several alike")
    fields = fields_of(block, without=("name", "names"))
    fields["memory"] = _size(block.memory, f"{where}.memory")
    fields["peak"] = {
        dtype: _quantity(rate, units.FLOP_RATE, f"{where}.peak.{dtype}")
        for dtype, rate in block.peak.items()
    }
    fields |= _quantities(block, _DEVICE_UNITS, where)
    return [Device(name=name, **fields) for name in block.names or [block.name]]


def _link(block: LinkBlock, where: str) -> Link:
    both_ways = bool(block.between)
    if both_ways == bool(block.source or block.target) or (both_ways and len(block.between) != 2):
        raise InputError(f"{where}: give between = [one, other], or source and target")
    fields = fields_of(block, without=("between",)) | _quantities(block, _LINK_UNITS, where)
    if both_ways:
        fields["source"], fields["target"] = block.between
    return Link(both_ways=both_ways, **fields)


def _quantities(block: File, known: dict[str, dict[str, float]], where: str) -> dict[str, float]:
    """The fields that have units, in base units."""
    return {
        name: _quantity(getattr(block, name), scale, f"{where}.{name}")
        for name, scale in known.items()
    }


def _size(value: Quantity, where: str) -> int:
    try:
        return units.parse_bytes(value)
    except (InputError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from None


def _quantity(value: Quantity, known: dict[str, float], where: str) -> float:
    try:
        return units.parse(value, known)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
