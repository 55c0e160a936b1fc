"""`cluster.toml`, field by field, and clusters to and from it."""

from __future__ import annotations

import msgspec

from roost.core import units
from roost.core.cluster import Cluster, Device, Link
from roost.core.rows.base import File, Quantity, check_version
from roost.errors import InputError


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
        DeviceBlock(
            name=device.name,
            kind=device.kind,
            memory=units.write_bytes(device.memory),
            host=device.host,
            peak=dict(device.peak),
            memory_bandwidth=device.memory_bandwidth,
            efficiency=dict(device.efficiency),
            launch_overhead=device.launch_overhead,
            gap=device.gap,
            figures_from=device.figures_from,
        )
        for device in cluster.devices
    ]
    links = [
        LinkBlock(
            between=[link.source, link.target] if link.both_ways else [],
            source="" if link.both_ways else link.source,
            target="" if link.both_ways else link.target,
            latency=link.latency,
            bandwidth=link.bandwidth,
            send_bandwidth=link.send_bandwidth,
            send_latency=link.send_latency,
            sender_busy=link.sender_busy,
            receiver_busy=link.receiver_busy,
            bus=link.bus,
            gap=link.gap,
            figures_from=link.figures_from,
        )
        for link in cluster.links
    ]
    return ClusterFile(
        version=1,
        name=cluster.name,
        devices=devices,
        links=links,
        description=cluster.description,
        broadcast=cluster.broadcast,
        copies_in_memory=cluster.copies_in_memory,
    )


def cluster_from(file: ClusterFile) -> Cluster:
    check_version(file.version, "cluster")
    devices = [
        device
        for i, block in enumerate(file.devices)
        for device in _devices(block, f"devices[{i}]")
    ]
    return Cluster(
        name=file.name,
        devices=tuple(devices),
        links=tuple(_link(block, f"links[{i}]") for i, block in enumerate(file.links)),
        description=file.description,
        broadcast=file.broadcast,
        copies_in_memory=file.copies_in_memory,
    )


def _devices(block: DeviceBlock, where: str) -> list[Device]:
    if bool(block.name) == bool(block.names):
        raise InputError(f"{where}: give either name, or names for several alike")
    return [
        Device(
            name=name,
            kind=block.kind,
            memory=_size(block.memory, f"{where}.memory"),
            host=block.host,
            peak={
                dtype: _quantity(rate, units.FLOP_RATE, f"{where}.peak.{dtype}")
                for dtype, rate in block.peak.items()
            },
            memory_bandwidth=_quantity(
                block.memory_bandwidth, units.RATE, f"{where}.memory_bandwidth"
            ),
            efficiency=block.efficiency,
            launch_overhead=_quantity(
                block.launch_overhead, units.SECONDS, f"{where}.launch_overhead"
            ),
            gap=_quantity(block.gap, units.SECONDS, f"{where}.gap"),
            figures_from=block.figures_from,
        )
        for name in block.names or [block.name]
    ]


def _link(block: LinkBlock, where: str) -> Link:
    both_ways = bool(block.between)
    if both_ways == bool(block.source or block.target) or (both_ways and len(block.between) != 2):
        raise InputError(f"{where}: give between = [one, other], or source and target")
    source, target = block.between if both_ways else (block.source, block.target)
    return Link(
        source=source,
        target=target,
        bandwidth=_quantity(block.bandwidth, units.RATE, f"{where}.bandwidth"),
        latency=_quantity(block.latency, units.SECONDS, f"{where}.latency"),
        both_ways=both_ways,
        bus=block.bus,
        gap=_quantity(block.gap, units.SECONDS, f"{where}.gap"),
        figures_from=block.figures_from,
        send_bandwidth=_quantity(block.send_bandwidth, units.RATE, f"{where}.send_bandwidth"),
        send_latency=_quantity(block.send_latency, units.SECONDS, f"{where}.send_latency"),
        sender_busy=_quantity(block.sender_busy, units.SECONDS, f"{where}.sender_busy"),
        receiver_busy=_quantity(block.receiver_busy, units.SECONDS, f"{where}.receiver_busy"),
    )


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
