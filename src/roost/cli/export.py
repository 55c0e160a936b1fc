"""`roost export`: a placement as the file of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roost import catalog
from roost.cli import _console, _model, _problem, _search
from roost.cli._model import ModelSpec
from roost.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from roost.plan.plan import Plan
    from roost.report.exports import Export


def export(
    model_or_graph: _problem.ModelOrGraph,
    on: _problem.On = None,
    placement: _problem.Placed = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="device_map for accelerate and transformers, split_spec for "
            "torch.distributed.pipelining, llama_cpp for the -ot option of llama.cpp, "
            "microbatches for the pipeline or data parallelism of place --microbatches, or "
            "package.module:Class.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file instead of standard output."
        ),
    ] = None,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    costs: _problem.CostsFile = None,
    as_json: _console.AsJson = False,
) -> None:
    """Write a placement as another tool takes it.

    Rounds the placement to what the tool can express, and shows the cost of rounding. Refuses, with
    the reason, what the tool cannot express. With a model in place of a graph the export covers
    modules that the step does not use.
    """
    if placement is None:
        raise InputError("--placement is missing; name the placement.json or plan.json to export")
    if form is None:
        known = ", ".join(catalog.names("report/exports"))
        raise InputError(f"--format is missing; give one of {known}")
    exporter: type[Export] = catalog.find("report/exports", form)
    from roost.core import files, formats
    from roost.core.placement import Placement

    if output is not None:
        files.check_writable(output)
    plan = _problem.plan_in(placement, on, costs)
    if plan is not None:
        problem, loaded = plan.on_real_devices()
        module = _planned(plan, model_or_graph, train, optimizer, setting, shape)
    else:
        placement, found_with = _problem.placed_in(placement, on, costs)
        if not _problem.is_our_file(model_or_graph):
            costs = found_with
        problem, model = _problem.read(
            model_or_graph, on, costs, train, optimizer, setting, shape, trust
        )
        loaded = formats.load_as(Placement, placement)
        module = _module(model)
        try:
            loaded = problem.check(loaded)
        except InputError as error:
            error.args = (f"{placement}: {error}",)
            raise
    with _console.working("exporting", _search.COMPILING):
        export = exporter.of(module, problem, loaded)
    if output is not None:
        export.save(output)
        _console.note(f"wrote {output}")
    if as_json:
        _console.show_json({"format": form} | export.facts())
    elif output is None:
        typer.echo(export.text(), nl=False)
    _console.note(str(export))


def _planned(
    plan: Plan,
    source: str,
    train: bool,
    optimizer: str | None,
    setting: list[str] | None,
    shape: list[str] | None,
) -> nn.Module | None:
    """The model of a plan; None if it is not one of PyTorch."""
    from roost.runtime.whole.module_placement import check_signature

    if _problem.is_our_file(source):
        raise InputError(f"{source}: is the file of a graph; name the model that the plan is for")
    module = _module(ModelSpec.of(source, train, optimizer, setting, shape))
    if module is not None:
        check_signature(module, plan.modules)
    return module


def _module(model: ModelSpec | None) -> nn.Module | None:
    """The PyTorch model of a graph, without weights; None if there is none."""
    return None if model is None or not model.has_module else model.build("meta").module
