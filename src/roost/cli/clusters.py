"""`roost clusters`: the presets, or one cluster in detail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console
from roost.cli._text import assembled, show_bytes, show_count, show_seconds, styled

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.cluster import Cluster, Device, Link


def clusters(
    cluster: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME_OR_PATH",
            help="A preset or a cluster.toml; the default is a list of all presets.",
        ),
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """List the clusters that Roost knows, or show one.

    Shows the devices of one cluster, its links, and the source of each figure.
    """
    from roost import presets

    if cluster is not None:
        chosen = presets.cluster(cluster)
        _console.answer(as_json, detail(chosen), portrait(chosen))
        return
    known = [presets.cluster(name) for name in presets.names()]
    _console.answer(as_json, {"clusters": [_brief(each) for each in known]}, [_list(known)])


def _brief(cluster: Cluster) -> dict[str, Any]:
    devices = [
        {"name": each.name, "kind": each.kind, "memory": each.memory} for each in cluster.devices
    ]
    return {"name": cluster.name, "description": cluster.description, "devices": devices}


def detail(cluster: Cluster) -> dict[str, Any]:
    """All fields of a cluster, as --json prints them."""
    names = ("name", "description", "broadcast", "copies_in_memory")
    return {name: getattr(cluster, name) for name in names} | {
        "devices": [asdict(device) for device in cluster.devices],
        "links": [asdict(link) for link in cluster.links],
    }


def _list(known: Sequence[Cluster]) -> RenderableType:
    rows = _console.table(["name", "devices", "memory of each", "description"])
    for cluster in known:
        kinds = Counter(device.kind for device in cluster.devices)
        sizes = dict.fromkeys(
            (device.kind, show_bytes(device.memory)) for device in cluster.devices
        )
        rows.add_row(
            cluster.name,
            " + ".join(f"{count} {kind}" for kind, count in kinds.items()),
            "\n".join(f"{kind} {size}" for kind, size in sizes),
            cluster.description,
        )
    return rows


def portrait(cluster: Cluster) -> Iterator[RenderableType]:
    """One cluster for people: its devices, its links, and the sources of its figures."""

    yield assembled(
        (cluster.name, "bold"), *([f": {cluster.description}"] if cluster.description else [])
    )
    if cluster.broadcast:
        yield "Broadcast: one transfer of a tensor serves every device that needs it."
    if not cluster.copies_in_memory:
        yield "Received copies of tensors do not count in memory."
    alike = [
        list(group)
        for _, group in groupby(cluster.devices, key=lambda device: replace(device, name="x"))
    ]
    yield ""
    yield _devices(alike)
    links = cluster.links
    if links:
        yield ""
        yield _links(links)
    if len(links) > 1:
        yield styled("Where several links join two devices, the last one counts.", "dim")
    sources: dict[str, list[str]] = {}  # source -> devices and links with figures from it
    for group in alike:
        sources.setdefault(group[0].figures_from, []).append(_names(group))
    for link in links:
        sources.setdefault(link.figures_from, []).append(_ends(link))
    for text, owners in sources.items():
        if text:
            yield ""
            yield from _sources(", ".join(owners), text)


def _devices(alike: Sequence[Sequence[Device]]) -> RenderableType:
    hosts = len({group[0].host for group in alike}) > 1
    gaps = any(group[0].gap for group in alike)
    numbers = ["memory", "bandwidth", "launch", *["gap"] * gaps]
    rows = _console.table(["device", "kind", *["host"] * hosts, *numbers, "peak"], numbers)
    for group in alike:
        device = group[0]
        rows.add_row(
            _names(group),
            device.kind,
            *[device.host] * hosts,
            show_bytes(device.memory),
            show_count(device.memory_bandwidth, "B/s"),
            show_seconds(device.launch_overhead),
            *[show_seconds(device.gap)] * gaps,
            "\n".join(
                f"{dtype} {show_count(rate, 'FLOP/s')}" for dtype, rate in device.peak.items()
            ),
        )
    return rows


def _links(links: Sequence[Link]) -> RenderableType:
    gaps = any(link.gap for link in links)
    sends = any(link.send_bandwidth for link in links)
    late = any(link.send_latency for link in links)
    busy = any(link.sender_busy or link.receiver_busy for link in links)
    ends = ["sender busy", "receiver busy"] * busy
    numbers = [
        "bandwidth",
        *["of sends"] * sends,
        "latency",
        *["of sends"] * late,
        *ends,
        *["gap"] * gaps,
    ]
    rows = _console.table(["link", *numbers, "bus"], numbers)
    for link in links:
        gap = [show_seconds(link.gap)] * gaps
        send = [show_count(link.send_bandwidth or link.bandwidth, "B/s")] * sends
        wait = [
            show_seconds(link.latency),
            *[show_seconds(link.send_latency or link.latency)] * late,
        ]
        kept = [show_seconds(link.sender_busy), show_seconds(link.receiver_busy)] * busy
        rows.add_row(
            _ends(link), show_count(link.bandwidth, "B/s"), *send, *wait, *kept, *gap, link.bus
        )
    return rows


def _sources(title: str, text: str) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table

    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", overflow="fold")
    lines.add_column(overflow="fold")
    for line in text.strip().splitlines():
        figure, colon, source = line.partition(":")
        lines.add_row(*((figure, source.strip()) if colon else ("", line)))
    yield styled(f"Figures of {title}", "bold")
    yield Padding(lines, (0, 0, 0, 2))


def _names(alike: Sequence[Device]) -> str:
    """`cuda:0..3`, or all names if their numbers do not count up."""
    names = [device.name for device in alike]
    stem, _, first = names[0].rpartition(":")
    last = f"{int(first) + len(names) - 1}" if first.isdecimal() and len(first) < 9 else ""
    counted = [f"{stem}:{number}" for number in range(int(first), int(last) + 1)] if last else []
    return f"{names[0]}..{last}" if len(names) > 1 and names == counted else ", ".join(names)


def _ends(link: Link) -> str:
    return f"{link.source} {'<->' if link.both_ways else '->'} {link.target}"
