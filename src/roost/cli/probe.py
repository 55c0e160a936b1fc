"""`roost probe`: this machine as a cluster."""

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
            help="Cap the memory of a device, such as cuda:0=6GiB; may be repeated.",
        ),
    ] = None,
    virtual: Annotated[
        int,
        typer.Option(
            "--virtual",
            metavar="N",
            min=0,
            help="Use N virtual devices cpu:0, cpu:1, ... that share the cores.",
        ),
    ] = 0,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh", help="Measure again; ignore earlier measurements of this machine."
        ),
    ] = False,
    as_json: _console.AsJson = False,
) -> None:
    """Find the devices of this machine and measure them.

    Measures the links between them too. It takes less than a minute. The figures are kept for the
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
    _console.answer(as_json, detail(cluster), portrait(cluster))
