"""`roost profile`: the seconds of each op of a model on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _model
from roost.cli._model import ModelSpec
from roost.cli._text import plural, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.problem import Problem
    from roost.cost_models.timing.profile import Profile
    from roost.frontends.tracing.captured_step import CapturedStep
    from roost.runtime.ops.calibrate import Calibrated

_SLOWEST = 12  # kinds of ops in the table


def profile(
    model: _model.RunnableModel,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="CLUSTER",
            help="Devices of this machine: here, or a file of roost probe.",
        ),
    ] = "here",
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A problem.json to write, or .json.gz, for roost place.",
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Time ops of the CPU alone, not while a copy to a GPU runs.",
        ),
    ] = False,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="Also time ops that were timed on this machine before."),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure", help="Also run the whole model on each device, to compare."
        ),
    ] = True,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Time ops in their step. Run whole steps on each device, and in pieces on all. "
            "Scale the costs to match.",
        ),
    ] = False,
    as_json: _console.AsJson = False,
) -> None:
    """Time each op of a model on the devices of this machine.

    Equal ops are timed once, and their times are kept. The times of ops that cannot be timed come
    from the figures of the cluster (a roofline), and are counted. The whole model runs on each
    device that it fits on, beside the predicted step.
    """
    from roost import presets
    from roost.core import formats
    from roost.core.problem import Problem
    from roost.cost_models.profiled import Profiled

    if output is not None:
        formats.check_path(Problem, output)
    chosen = ModelSpec.of(model, train, optimizer, setting, None)
    with _console.working("looking at this machine"):
        cluster = presets.cluster(on)
    with _console.working(f"capturing {model}"):
        step = chosen.describe()
    with _console.progress("timing ops") as tell:
        settings = Profiled(step, not alone, in_step=calibrate, refresh=refresh, progress=tell)
        timed = settings.profile(step.graph, cluster)
    problem = Problem(step.graph, cluster, timed.costs)
    whole = None
    if calibrate:
        with _console.working(f"running steps of {model}"):
            whole = _calibrated(chosen, step, problem)
            problem = whole.problem
    if output is not None:
        problem.save(output)
        _console.note(f"wrote {output}")
    facts = _facts(problem, timed, whole)
    if measure:
        with _console.working(f"running {model} on each device"):
            _measure(chosen, problem, facts)
    _console.answer(as_json, facts, _portrait(facts))


def _calibrated(model: ModelSpec, step: CapturedStep, problem: Problem) -> Calibrated:
    import torch

    from roost.runtime.ops.calibrate import calibrated
    from roost.runtime.step.unplaced import residents_of
    from roost.search.measured.served_model import cores_of

    torch.manual_seed(0)
    module, inputs = model.real()
    return calibrated(step, problem, residents_of(module), inputs, cores_of(problem.cluster))


def _facts(problem: Problem, timed: Profile, whole: Calibrated | None) -> dict[str, Any]:
    import numpy as np

    from roost.simulator.compiled import simulate

    graph = problem.graph
    names = problem.cluster.device_names
    devices = []
    for index, name in enumerate(names):
        step = simulate(problem, problem.placement(np.full(graph.num_ops, index)))
        devices.append(
            {
                "name": name,
                "op_time": float(problem.op_time[:, index].sum()),
                "predicted_step_time": step.step_time,
                "fits": step.feasible,
                "calibrated": whole.slower.get(name) if whole else None,
                "measured_step_time": None,
                "not_measured": "",
            }
        )
    kinds = np.array(graph.kinds)
    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "num_ops": int((kinds == kind).sum()),
            "seconds": dict(
                zip(names, problem.op_time[kinds == kind].sum(axis=0).tolist(), strict=True)
            ),
        }
        for kind in dict.fromkeys(graph.kinds)
    ]
    share = [
        max(row["seconds"][device["name"]] / (device["op_time"] or 1.0) for device in devices)
        for row in rows
    ]
    order = sorted(range(len(rows)), key=lambda row: -share[row])
    return {
        "graph": graph.name,
        "digest": graph.digest,
        "cluster": problem.cluster.name,
        "costs": problem.costs.source,
        "num_ops": graph.num_ops,
        "num_signatures": timed.num_signatures,
        "num_timed": timed.num_timed,
        "fallen_back": [asdict(each) for each in timed.fallen_back],
        "kinds": [rows[row] for row in order if share[row] > 0],
        "devices": devices,
        "crossings": whole.crossings._asdict() if whole else None,
    }


def _measure(model: ModelSpec, problem: Problem, facts: dict[str, Any]) -> None:
    """Fill in the measured step time of each device, or the reason why there is none."""
    import torch

    from roost.cost_models.profiled import alone_on
    from roost.runtime.step.eager import eager_step_time

    torch.manual_seed(0)
    module, inputs = model.real()
    for index, device in enumerate(facts["devices"]):
        if not device["fits"]:
            device["not_measured"] = "does not fit"
            continue
        try:
            device["measured_step_time"] = alone_on(
                problem.cluster,
                index,
                lambda there: eager_step_time(
                    module, inputs, there, model.optimizer if model.train else None
                ),
            )
        except Exception as error:  # the user's code, on a device that it may not know
            device["not_measured"] = f"{type(error).__name__}: {error}".splitlines()[0]


def _portrait(facts: dict[str, Any]) -> Iterator[RenderableType]:
    names = [device["name"] for device in facts["devices"]]
    unique = plural(facts["num_signatures"], "unique pair") + " of op"
    yield (
        f"{facts['graph']}: {facts['num_ops']:,} ops; {unique} and device, "
        f"{facts['num_timed']:,} timed now"
    )
    lost = sum(each["num_ops"] for each in facts["fallen_back"])
    if lost:
        yield f"{plural(lost, 'time')} taken from the figures of the cluster instead:"
        for each in facts["fallen_back"]:
            yield (
                f"  {each['kind']} on {each['device']} "
                f"({plural(each['num_ops'], 'op')}): {each['why']}"
            )
    yield ""
    columns = [
        text for name in names for text in (name, f"share of {name}" if len(names) > 1 else "share")
    ]
    rows = _console.table(["kind", "ops", *columns], ["ops", *columns])
    for row in facts["kinds"][:_SLOWEST]:
        cells = []
        for device in facts["devices"]:
            seconds = row["seconds"][device["name"]]
            cells += [
                show_seconds(seconds),
                f"{seconds / device['op_time']:.0%}" if device["op_time"] else "-",
            ]
        rows.add_row(row["kind"], f"{row['num_ops']:,}", *cells)
    yield rows
    yield ""
    yield _devices(facts)
    if facts["crossings"] not in (None, {"times": 1.0, "more": 0.0}):
        more = (
            f", and {show_seconds(facts['crossings']['more'])} more"
            if facts["crossings"]["more"]
            else ""
        )
        yield f"\nTransfers take {facts['crossings']['times']:g} times as long as probed{more}"


def _devices(facts: dict[str, Any]) -> RenderableType:
    by = ["calibrated by"] if any(device["calibrated"] for device in facts["devices"]) else []
    numbers = ["all ops", *by, "predicted step", "measured step", "predicted / measured"]
    rows = _console.table(["device", *numbers], numbers)
    for device in facts["devices"]:
        predicted = device["predicted_step_time"]
        measured = device["measured_step_time"]
        rows.add_row(
            device["name"],
            show_seconds(device["op_time"]),
            *([f"{device['calibrated']:.2f}" if device["calibrated"] else "-"] if by else []),
            show_seconds(predicted),
            show_seconds(measured) if measured else device["not_measured"] or "-",
            f"{predicted / measured:.2f}" if measured else "-",
        )
    return rows
