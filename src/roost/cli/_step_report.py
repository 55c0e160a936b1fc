"""One step as all verbs show it: a row for each device, and for each module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console
from roost.cli._text import show_bytes, show_seconds, styled

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from roost.core.arrays import Array
    from roost.core.graph import Graph
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.core.timeline import Timeline


TimelineFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the whole timeline here, compressed if the name ends in .gz."
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev here, .gz or not."),
]


def write(step: Timeline, graph: Graph, timeline: Path | None, trace: Path | None) -> None:
    """Write the timeline and the trace, where a path is given."""
    if timeline is not None:
        step.save(timeline)
        _console.note(f"wrote {timeline}")
    if trace is not None:
        from roost.report.trace import write_trace

        write_trace(step, trace, graph)
        _console.note(f"wrote {trace}; open it in ui.perfetto.dev")


def summary(problem: Problem, placement: Placement, step: Timeline) -> dict[str, Any]:
    """The step in seconds and bytes, as --json prints it."""
    import numpy as np

    assert step.device is not None
    assert step.transfers is not None
    names = step.device_names
    moves = step.transfers
    count = len(step.device_names)
    size = problem.graph.output_bytes[moves.tensor]  # [transfers] bytes

    def total(device: Array) -> Array:
        """Bytes by device, as whole numbers: bincount with weights would round."""
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
        "devices": [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ],
    }


def fits(facts: dict[str, Any]) -> Text:
    """`fits`, or the devices that lack memory."""

    lacks = [
        f"{name} lacks {show_bytes(size)}" for name, size in facts["missing_bytes"].items() if size
    ]
    return styled(f"does not fit: {', '.join(lacks)}", "red") if lacks else styled("fits", "green")


def num_ops(facts: dict[str, Any]) -> int:
    return sum(device["num_ops"] for device in facts["devices"])


def device_table(facts: dict[str, Any]) -> RenderableType:
    """A row for each device, of the simulated step, also if the step was measured."""

    over = {name: size for name, size in facts["missing_bytes"].items() if size}
    numbers = ["ops", "busy", "share", "sent", "received", "peak", "capacity"]
    numbers += ["over by"] * bool(over)
    rows = _console.table(["device", *numbers], numbers)
    step_time = facts.get("simulated_step_time", facts["step_time"])
    for device in facts["devices"]:
        share = device["busy"] / step_time if step_time else 0.0
        beyond = over.get(device["name"], 0)
        rows.add_row(
            device["name"],
            f"{device['num_ops']:,}",
            show_seconds(device["busy"]),
            f"{share:.0%}",
            show_bytes(device["sent_bytes"]),
            show_bytes(device["received_bytes"]),
            show_bytes(device["peak_memory"]),
            show_bytes(device["capacity"]),
            *[styled(show_bytes(beyond) if beyond else "", "red")] * bool(over),
        )
    return rows


def modules(problem: Problem, step: Timeline, depth: int) -> list[dict[str, Any]]:
    """The seconds of each module on each device, by so many parts of module names."""
    from roost.transforms.by_module import plain

    assert step.device is not None
    graph = problem.graph
    names = step.device_names
    rows: dict[str, dict[str, Any]] = {}
    for op, (module, device) in enumerate(zip(graph.modules, step.device.tolist(), strict=True)):
        name = ".".join(plain(module).split(".")[:depth])
        row = rows.setdefault(
            name,
            {"name": name, "num_ops": 0, "weight_bytes": 0, "seconds": dict.fromkeys(names, 0.0)},
        )
        row["num_ops"] += 1
        row["weight_bytes"] += int(graph.output_bytes[op]) if graph.is_parameter[op] else 0
        row["seconds"][names[device]] += float(problem.op_time[op, device])
    return list(rows.values())


def module_table(rows: list[dict[str, Any]]) -> RenderableType:
    """A row for each module, with its seconds on each device."""
    devices = list(rows[0]["seconds"])
    numbers = ["ops", "weights", *devices]
    table = _console.table(["module", *numbers], numbers)
    for row in rows:
        busy = [
            show_seconds(row["seconds"][device]) if row["seconds"][device] else ""
            for device in devices
        ]
        weights = show_bytes(row["weight_bytes"]) if row["weight_bytes"] else ""
        table.add_row(row["name"] or "(none)", f"{row['num_ops']:,}", weights, *busy)
    return table
