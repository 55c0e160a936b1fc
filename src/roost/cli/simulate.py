"""`roost simulate`: predict one step of a placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roost.cli import _console, _model, _problem, _search, _step_report
from roost.cli._text import assembled, plural, show_seconds, styled
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.placement import Placement
    from roost.core.problem import Problem


def simulate(
    model_or_graph: _problem.ModelOrGraph,
    on: _problem.On = None,
    placement: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The placement.json to simulate, or its folder."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Put every op on this device instead, such as cuda:0."),
    ] = None,
    order: Annotated[
        Literal["program", "rank", "fifo"] | None,
        typer.Option(help="The order of ops; the default is the placement's."),
    ] = None,
    prefetch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory on each device for parameters that are fetched ahead, such as 512MiB; the "
            "default is the placement's.",
        ),
    ] = None,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    costs: _problem.CostsFile = None,
    timeline: _step_report.TimelineFile = None,
    trace: _step_report.TraceFile = None,
    modules: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="DEPTH",
            help="Also show the modules on each device, by DEPTH parts of their names.",
        ),
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """Predict one step of a placement.

    Shows its time, and a row for each device. The exit code is 0 even if the placement does not
    fit. With neither --placement nor --device, every op goes on the first device that is not a CPU.
    """
    window = None if prefetch is None else _size(prefetch, "--prefetch")
    problem, _ = _problem.read(model_or_graph, on, costs, train, optimizer, setting, shape, trust)
    if placement is None and device is None:
        device = _first_device(problem)
        _console.note(f"no --placement or --device given: every op goes on {device}")
    chosen = _placement(problem, placement, device)
    if order is not None:
        chosen = replace(chosen, order=order, priority=None)
    if window is not None:
        chosen = replace(chosen, prefetch_bytes=window)
    with _console.working("simulating", _search.COMPILING):
        from roost.simulator.compiled import simulate as run

        step = run(problem, chosen, full=True)
    _step_report.write(step, problem.graph, timeline, trace)
    facts = _step_report.summary(problem, chosen, step)
    if modules is not None:
        facts["modules"] = _step_report.modules(problem, step, modules)
    if as_json:
        _console.show_json(facts)
    else:
        _console.show(*_report(facts))


def _size(text: str, option: str) -> int:
    from roost.core.units import parse_bytes

    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _first_device(problem: Problem) -> str:
    devices = problem.cluster.devices
    return next((device.name for device in devices if device.kind != "cpu"), devices[0].name)


def _placement(problem: Problem, path: Path | None, device: str | None) -> Placement:
    """The placement in a file, or every op on one device; checked against the problem."""
    from roost.core import formats
    from roost.core.placement import Placement

    if path is not None and device is not None:
        raise InputError("--placement and --device exclude each other; leave one out")
    if path is not None:
        path = path / _problem.PLACEMENT if path.is_dir() else path
        loaded: Placement = formats.load_as(Placement, path)
        try:
            return problem.check(loaded)
        except InputError as error:
            error.args = (f"{path}: {error}",)
            raise
    assert device is not None
    placement = Placement([problem.cluster.index_of(device)] * problem.graph.num_ops)  # type: ignore[arg-type]
    try:
        return problem.check(placement)
    except InputError as error:
        error.args = (f"{error}; {_way_out(problem)}",)
        raise


def _way_out(problem: Problem) -> str:
    names = problem.cluster.device_names
    able = [name for number, name in enumerate(names) if problem.allowed[:, number].all()]
    if able:
        return f"every op may run on {able[0]!r}: give --device {able[0]}, or a --placement"
    return "no device may run every op: give a --placement"


def _report(facts: dict[str, Any]) -> list[RenderableType]:
    """The result for people."""

    head = assembled(
        (f"{show_seconds(facts['step_time'])} a step", "bold"),
        f", {plural(facts['num_transfers'], 'transfer')}, ",
        _step_report.fits(facts),
    )
    about = (
        f"{facts['graph']} ({plural(_step_report.num_ops(facts), 'op')}) on {facts['cluster']}, "
        f"{facts['order']} order, costs: {facts['costs']}"
    )
    more = ["", _step_report.module_table(facts["modules"])] if "modules" in facts else []
    return [head, styled(about, "dim"), "", _step_report.device_table(facts), *more]
