"""The problem that a command names: a model, a graph or a problem file, a cluster and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roost.cli import _console
from roost.cli._model import ModelSpec
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.graph import Graph
    from roost.core.problem import Problem
    from roost.plan.plan import Plan

ModelOrGraph = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_GRAPH",
        help="A graph.json or problem.json, .gz or not, or a model: a zoo name (see roost zoo), "
        "package.module:callable, a .onnx or .pt2 file, a SavedModel folder, a Hugging Face "
        "config.json.",
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="A preset (see roost clusters), a cluster.toml, or here: this machine.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="A costs.npz. Or the problem.json of this model, in place of --on: roost profile -o "
        "and roost place -o write one. The default is a roofline of the cluster's figures.",
    ),
]
Placed = Annotated[
    Path | None,
    typer.Option(
        "--placement",
        metavar="FILE",
        help="The placement.json, or the folder that roost place -o wrote. Without --on and "
        "--costs the problem beside it is used. verify and export take a plan.json too.",
    ),
]

PLACEMENT, PROBLEM = "placement.json", "problem.json.gz"  # as `roost place -o` names them
_MODEL_FILES = (".onnx", ".pt2", ".pb")


def read(
    source: str,
    on: str | None,
    costs: Path | None,
    train: bool,
    optimizer: str | None,
    settings: list[str] | None,
    shapes: list[str] | None,
    trust: bool = False,
) -> tuple[Problem, ModelSpec | None]:
    """The problem, and the model where it was captured from one."""
    if not is_our_file(source):
        model = ModelSpec.of(source, train, optimizer, settings, shapes, trust)
        check_cluster(source, on, costs)  # before the minutes that capturing may take
        with _console.working(f"capturing {source}"):
            graph = model.capture()
        return with_cluster(graph, source, on, costs), model
    given = {
        "--train": train,
        "--optimizer": optimizer,
        "--set": settings,
        "--input": shapes,
        "--trust": trust,
    }
    for option, value in given.items():
        if value:
            raise InputError(f"{source}: is captured already; {option} is for models, leave it out")
    with _console.working(f"reading {source}"):
        return read_file(Path(source), on, costs), None


def read_file(path: Path, on: str | None, costs: Path | None) -> Problem:
    """The problem in a file, or the problem of a graph in a file."""
    from roost.core import formats
    from roost.core.graph import Graph
    from roost.core.problem import Problem

    noun = formats.load(path)
    if isinstance(noun, Problem):
        for option, value in (("--on", on), ("--costs", costs)):
            if value is not None:
                raise InputError(
                    f"{path}: is a problem, with a cluster and costs of its own; leave out {option}"
                )
        return noun
    if not isinstance(noun, Graph):
        raise InputError(f"{path}: holds a {type(noun).__name__.lower()}, not a graph or a problem")
    return with_cluster(noun, str(path), on, costs)


def placed_in(placement: Path, on: str | None, costs: Path | None) -> tuple[Path, Path | None]:
    """The file of a placement, and its costs: by default those in the problem beside it.

    `placement` may be the folder that `roost place -o` wrote.
    """
    inside = placement.is_dir()
    if not inside and not placement.exists():
        raise InputError(f"{placement}: no such file or folder")
    if inside and not (placement / PLACEMENT).exists():
        raise InputError(
            f"{placement}: has no {PLACEMENT}; name a folder that roost place -o wrote"
        )
    beside = (placement if inside else placement.parent) / PROBLEM
    if on is None and costs is None and beside.is_file():
        costs = beside
    return placement / PLACEMENT if inside else placement, costs


def plan_in(placement: Path, on: str | None, costs: Path | None) -> Plan | None:
    """The plan in a file, or None if the file is of another kind."""
    from roost.core import formats
    from roost.plan.plan import Plan

    if not placement.is_file():
        return None
    noun = formats.load(placement)
    if not isinstance(noun, Plan):
        return None
    if on is not None or costs is not None:
        raise InputError(
            f"{placement}: is a plan, with a cluster and costs of its own; leave out --on and "
            f"--costs"
        )
    return noun


def with_cluster(graph: Graph, source: str, on: str | None, costs: Path | None) -> Problem:
    """The graph on a cluster, with costs from a file or by roofline, or the problem in a file."""
    from roost.core import formats
    from roost.core.costs import Costs
    from roost.core.problem import Problem
    from roost.cost_models import estimate
    from roost.presets import cluster

    check_cluster(source, on, costs)
    given = None if costs is None else formats.load(costs)
    if isinstance(given, Problem):
        if on is not None:
            raise InputError(
                f"{costs}: is a problem, with a cluster and costs of its own; leave out --on"
            )
        return _of_graph(given, graph, source, f"{costs}")
    if given is not None and not isinstance(given, Costs):
        raise InputError(
            f"{costs}: is a {type(given).__name__.lower()} file; costs or a problem are needed here"
        )
    assert on is not None
    if given is None:
        devices = cluster(on)
        try:
            return estimate(graph, devices)
        except InputError as error:
            error.args = (f"{source}: {error}",)
            raise
    try:
        return Problem(graph, cluster(on), given)
    except InputError as error:
        if str(error).startswith("op_time"):
            error.args = (f"{costs}: {error}",)
        raise


def _of_graph(given: Problem, graph: Graph, source: str, path: str) -> Problem:
    """The problem, if it is of this graph."""
    from roost.transforms.microbatch import copies_of

    if given.graph.digest != graph.digest:
        count = int(copies_of(given.graph).max()) + 1
        if count > 1:
            raise InputError(
                f"{path}: is a problem of {count} copies of {given.graph.name!r}; name this file "
                f"in place of {source}"
            )
        raise InputError(
            f"{path}: is a problem of graph {given.graph.name!r}, {given.graph.digest}; {source} "
            f"as given here is "
            f"{graph.digest}: give the settings that it was made with, such as --train and --set"
        )
    return given


def check_cluster(source: str, on: str | None, costs: Path | None = None) -> None:
    """Raise InputError if no cluster is named, or an unknown one. A problem brings its own."""
    if (
        costs is not None
        and str(costs) in ("profiled", "estimated", "roofline")
        and not costs.exists()
    ):
        raise InputError(
            f"--costs is {costs}; it takes a file. roost profile MODEL --on CLUSTER -o "
            f"problem.json times the ops and "
            "writes one; without --costs they are estimated by roofline"
        )
    from roost.presets import HERE, cluster

    if on is None:
        if costs is not None and costs.name.endswith((".json", ".json.gz")):
            return
        raise InputError(
            f"{source}: brings no cluster; add --on CLUSTER (roost clusters lists the presets)"
        )
    if on != HERE:
        cluster(on)


def is_our_file(source: str) -> bool:
    """True for the name of a Roost file, which may not exist; False for a model."""
    path = Path(source)
    if path.name == "config.json" or source.endswith(_MODEL_FILES) or path.is_dir():
        return False
    if source.endswith((".json", ".json.gz")):
        return True
    from roost.frontends import installed_reader

    return path.exists() and installed_reader(source) is None
