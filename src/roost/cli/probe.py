"""`roost probe`: the machine we are on as a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli import _console
from roost.cli.clusters import detail, portrait
from roost.errors import InputError


def probe(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A cluster.toml to write, for --on."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            "--memory",
            metavar="DEVICE=SIZE",
            help="Cap a device, as in cuda:0=6GiB; may be repeated.",
        ),
    ] = None,
    virtual: Annotated[
        int,
        typer.Option(
            "--virtual",
            metavar="N",
            min=0,
            help="Devices cpu:0 and so on that share the cores instead.",
        ),
    ] = 0,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure anew what was measured here before.")
    ] = False,
    as_json: _console.AsJson = False,
) -> None:
    """Find the devices of this machine and measure them.

    And the links between them. It takes less than a minute, and is kept for the next time on the
    same hardware, driver and PyTorch.
    """
    from roost.core import formats
    from roost.core.cluster import Cluster
    from roost.presets.probe import probe as found_here

    if output is not None:
        formats.check_path(Cluster, output)
    caps: dict[str, int | str] = {}
    for text in memory or []:
        name, equals, size = text.partition("=")
        if not equals or not name:
            raise InputError(f"--memory {text!r}: write it as DEVICE=SIZE, such as cuda:0=6GiB")
        caps[name] = size
    with _console.working("looking at this machine"):
        cluster = found_here(caps, virtual=virtual, refresh=refresh)
    if output is not None:
        cluster.save(output)
        _console.note(f"wrote {output}")
    _console.show_json(detail(cluster)) if as_json else _console.show(*portrait(cluster))
