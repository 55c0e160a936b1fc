"""`roost export`: a placement in the words of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roost import catalog
from roost.cli import _built, _console, _problem, _search
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
            "torch.distributed.pipelining, llama_cpp for the -ot option of llama.cpp, or "
            "package.module:Class.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write it here instead of standard output."
        ),
    ] = None,
    train: _problem.Train = False,
    optimizer: _problem.Optimizer = None,
    setting: _problem.Settings = None,
    shape: _problem.Shapes = None,
    costs: _problem.CostsFile = None,
    as_json: _console.AsJson = False,
) -> None:
    """Write a placement as another tool takes it.

    Rounded to what that tool can express, with what the rounding costs. What cannot be expressed is
    refused, with the reason. Given a model rather than a graph, the export also knows modules that
    the step does not use.
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
        problem, model = _problem.read(model_or_graph, on, costs, train, optimizer, setting, shape)
        loaded, module = formats.load_as(Placement, placement), _module(model)
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
    """The model that a plan is for; None where it is not one of PyTorch."""
    from roost.runtime.whole.module_placement import check_signature

    if _problem.is_our_file(source):
        raise InputError(f"{source}: is a file of a graph, and a plan is for a model; name that")
    module = _module(_problem.Model.of(source, train, optimizer, setting, shape))
    if module is not None:
        check_signature(module, plan.modules)
    return module


def _module(model: _problem.Model | None) -> nn.Module | None:
    """The model that the graph was captured from, where it is one of PyTorch; its weights are not
    held."""
    if model is None or model.source.endswith((".pt2", ".onnx", ".pb")):
        return None
    if not (model.in_zoo or ":" in model.source or model.is_config):
        return None
    return _built.build(model, "meta").module
