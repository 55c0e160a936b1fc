"""`roost simulate`: predict one step of a placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roost.cli import _console
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.arrays import Array
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.core.timeline import Timeline


def simulate(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="A graph.json or problem.json, .gz or not.")],
    on: Annotated[
        str | None, typer.Option("--on", metavar="CLUSTER", help="A preset (see roost clusters) or a cluster.toml.")
    ] = None,
    placement: Annotated[Path | None, typer.Option(metavar="FILE", help="The placement.json to simulate.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Put every op on this device instead, such as cuda:0.")
    ] = None,
    order: Annotated[
        Literal["program", "rank", "fifo"] | None, typer.Option(help="The order of ops; otherwise the placement's.")
    ] = None,
    prefetch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory on each device for parameters fetched ahead, such as 512MiB; otherwise the placement's.",
        ),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A costs.npz; otherwise a roofline of the cluster's figures.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the whole timeline here, compressed where it ends in .gz."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev here, likewise.")
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """Predict one step of a placement.

    Shows its time, and what each device does and holds. A placement that does not fit is a result like any other: the
    exit code is 0. With neither --placement nor --device, every op goes on the first device that is not a CPU.
    """
    window = None if prefetch is None else _size(prefetch, "--prefetch")
    with _console.working("reading"):
        problem = _problem(graph, on, costs)
    if placement is None and device is None:
        device = _first_device(problem)
        _console.note(f"no --placement or --device given: every op goes on {device}")
    chosen = _placement(problem, placement, device)
    if order is not None:
        chosen = replace(chosen, order=order, priority=None)
    if window is not None:
        chosen = replace(chosen, prefetch_bytes=window)
    with _console.working("simulating (compiling the simulator first, where this is its first run)"):
        from roost.simulator.compiled import simulate as run

        step = run(problem, chosen, full=True)
    if timeline is not None:
        step.save(timeline)
        _console.note(f"wrote {timeline}")
    if trace is not None:
        from roost.report.trace import write_trace

        write_trace(step, trace, problem.graph)
        _console.note(f"wrote {trace}; open it in ui.perfetto.dev")
    found = _summary(problem, chosen, step)
    if as_json:
        _console.show_json(found)
    else:
        _console.show(*_report(found))


def _size(text: str, option: str) -> int:
    from roost.core.units import parse_bytes

    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _problem(path: Path, on: str | None, costs: Path | None) -> Problem:
    from roost.core import formats
    from roost.core.costs import Costs
    from roost.core.graph import Graph
    from roost.core.problem import Problem
    from roost.cost_models import estimate
    from roost.presets import cluster

    found = formats.load(path)
    if isinstance(found, Problem):
        for option, value in (("--on", on), ("--costs", costs)):
            if value is not None:
                raise InputError(f"{path}: is a problem, with a cluster and costs of its own; leave out {option}")
        return found
    if not isinstance(found, Graph):
        raise InputError(f"{path}: holds a {type(found).__name__.lower()}, not a graph or a problem")
    if on is None:
        raise InputError(f"{path}: is a graph without a cluster; add --on CLUSTER (roost clusters lists the presets)")
    if costs is None:
        return estimate(found, cluster(on))
    given = formats.load_as(Costs, costs)
    try:
        return Problem(found, cluster(on), given)
    except InputError as error:
        if str(error).startswith("op_time"):
            error.args = (f"{costs}: {error}",)
        raise


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


def _summary(problem: Problem, placement: Placement, step: Timeline) -> dict[str, Any]:
    """The result in seconds and bytes, as --json prints it."""
    import numpy as np

    assert step.device is not None
    assert step.transfers is not None
    names, moves, count = step.device_names, step.transfers, len(step.device_names)
    size = problem.graph.output_bytes[moves.tensor]  # [transfers] bytes

    def total(device: Array) -> Array:
        """Bytes by device. Added as whole numbers: bincount with weights would round."""
        sums = np.zeros(count, np.int64)
        np.add.at(sums, device, size)
        return sums

    columns = {
        "name": list(names),
        "num_ops": np.bincount(step.device, minlength=count).tolist(),
        "busy": step.busy.tolist(),
        "sent_bytes": total(moves.source).tolist(),
        "received_bytes": total(moves.target).tolist(),
        "peak_memory": step.peak_memory.tolist(),
        "capacity": step.capacity.tolist(),
    }
    return {
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
        "costs": problem.costs.source,
        "order": placement.order,
        "step_time": step.step_time,
        "feasible": step.feasible,
        "num_transfers": step.num_transfers,
        "peak_memory": dict(zip(names, columns["peak_memory"], strict=True)),
        "capacity": dict(zip(names, columns["capacity"], strict=True)),
        "missing_bytes": dict(zip(names, step.missing.tolist(), strict=True)),
        "devices": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }


def _report(found: dict[str, Any]) -> list[RenderableType]:
    """The result for people."""
    from rich.text import Text

    from roost.core.units import show_bytes, show_seconds

    missing = {name: size for name, size in found["missing_bytes"].items() if size}
    if missing:
        lacks = ", ".join(f"{name} lacks {show_bytes(size)}" for name, size in missing.items())
        verdict = Text(f"does not fit: {lacks}", "red")
    else:
        verdict = Text("fits", "green")
    ops = sum(device["num_ops"] for device in found["devices"])
    head = Text.assemble(
        (f"{show_seconds(found['step_time'])} a step", "bold"),
        f", {_console.plural(found['num_transfers'], 'transfer')}, ",
        verdict,
    )
    about = (
        f"{found['graph']} ({_console.plural(ops, 'op')}) on {found['cluster']}, "
        f"{found['order']} order, costs: {found['costs']}"
    )
    numbers = ["ops", "busy", "share", "sent", "received", "peak", "capacity", *["over by"] * bool(missing)]
    rows = _console.table(["device", *numbers], numbers)
    for device in found["devices"]:
        share = device["busy"] / found["step_time"] if found["step_time"] else 0.0
        over = missing.get(device["name"], 0)
        rows.add_row(
            device["name"],
            f"{device['num_ops']:,}",
            show_seconds(device["busy"]),
            f"{share:.0%}",
            show_bytes(device["sent_bytes"]),
            show_bytes(device["received_bytes"]),
            show_bytes(device["peak_memory"]),
            show_bytes(device["capacity"]),
            *[Text(show_bytes(over) if over else "", "red")] * bool(missing),
        )
    return [head, Text(about, "dim"), "", rows]
