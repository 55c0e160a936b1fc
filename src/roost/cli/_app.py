"""The verbs of `roost`. A verb imports heavy modules when it runs: `roost --help` is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from roost import __version__
from roost.cli import (
    bound,
    capture,
    clusters,
    compare,
    export,
    learn,
    place,
    placers,
    probe,
    profile,
    run,
    simulate,
    train,
    verify,
    zoo,
)
from roost.cli._exit_codes import Group

app = typer.Typer(
    name="roost",
    cls=Group,
    help="On which device should each operation of a neural network run?",
    epilog="Exits 0 when done, 2 on bad usage or bad input, 3 when nothing fits, 4 when "
    "verification failed.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"roost {__version__}")
        raise typer.Exit


@app.callback()
def _roost(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


app.command()(capture.capture)
app.command()(simulate.simulate)
app.command()(place.place)
app.command()(compare.compare)
app.command()(bound.bound)
app.command()(learn.learn)
app.command()(probe.probe)
app.command()(profile.profile)
app.command()(run.run)
app.command()(train.train)
app.command()(verify.verify)
app.command()(export.export)
app.command()(placers.placers)
app.command()(zoo.zoo)
app.command()(clusters.clusters)
