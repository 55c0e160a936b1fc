"""What the verbs read: a model, a graph or a problem, with the cluster and the costs that go with
it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console
from roost.errors import InputError, UnknownName

if TYPE_CHECKING:
    from torch import nn

    from roost.core.graph import Graph
    from roost.core.problem import Problem
    from roost.frontends.tracing.captured_step import CapturedStep
    from roost.plan.plan import Plan

ModelOrGraph = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_GRAPH",
        help="A graph.json or problem.json, .gz or not, or a model as roost capture takes it: a "
        "zoo name (see roost "
        "zoo), package.module:callable, a .onnx or .pt2 file, a SavedModel folder, a Hugging Face "
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
        help="A costs.npz, or the problem.json of this model (roost profile -o, roost place -o) "
        "in place of --on; "
        "otherwise a roofline of the cluster's figures.",
    ),
]
Placed = Annotated[
    Path | None,
    typer.Option(
        "--placement",
        metavar="FILE",
        help="The placement.json, or the folder that roost place -o wrote; without --on and "
        "--costs the problem that "
        "it wrote beside it is taken. To verify and export also a plan.json.",
    ),
]
Train = Annotated[
    bool, typer.Option("--train", help="A whole training step of the model instead of inference.")
]
Optimizer = Annotated[
    str | None, typer.Option(help="sgd (where left out), momentum, adam or adamw; with --train.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the model, such as batch=8; may be repeated.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=1,3,224,224",
        help="The shape of an input of a file; may be repeated.",
    ),
]

_WITH_LOSS = (
    "Name a callable (package.module:callable) whose module returns its loss, or capture it in "
    "Python: "
    "roost.capture(model, inputs, train=True, loss=...).save('graph.json')"
)
PLACEMENT, PROBLEM = "placement.json", "problem.json.gz"  # as `roost place -o` names them
_MODEL_FILES = (".onnx", ".pt2", ".pb")


@dataclass(frozen=True)
class Model:
    """A model and how to capture it."""

    source: str
    train: bool = False
    optimizer: str = "sgd"
    settings: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[str, list[int]], ...] = ()

    @classmethod
    def of(
        cls,
        source: str,
        train: bool,
        optimizer: str | None,
        settings: list[str] | None,
        shapes: list[str] | None,
    ) -> Model:
        """As given on the command line."""
        pairs = [_pair(text, "--set") for text in settings or []]
        sized = [_pair(text, "--input") for text in shapes or []]
        return cls(
            source,
            train,
            optimizer or "sgd",
            tuple((key, _value(text)) for key, text in pairs),
            tuple((key, _shape(text)) for key, text in sized),
        )

    @property
    def in_zoo(self) -> bool:
        return self.source.replace("_", "").isalnum() and not Path(self.source).exists()

    @property
    def is_config(self) -> bool:
        """Whether it is a configuration of transformers, or a folder with one."""
        path = Path(self.source)
        return path.name == "config.json" or (path / "config.json").is_file()

    @property
    def batch(self) -> int | None:
        """Where that is a setting of the model that is known."""
        found = dict(self.settings).get("batch")
        if found is None and self.in_zoo:
            from roost import zoo

            found = getattr(zoo.settings(self.source, **dict(self.settings)), "batch", None)
        return found if isinstance(found, int) else None

    def with_batch(self, batch: int) -> Model:
        kept = tuple((key, value) for key, value in self.settings if key != "batch")
        return Model(
            self.source, self.train, self.optimizer, (*kept, ("batch", batch)), self.shapes
        )

    def _made(self) -> tuple[nn.Module, Any]:
        """What package.module:callable returns with these settings."""
        from roost import catalog
        from roost.frontends.torch import load_model

        if not self.settings:
            return load_model(self.source)
        try:
            made = catalog.imported(self.source)(**dict(self.settings))
            model, inputs = made if isinstance(made, tuple) else (made, made.example_inputs)
        except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
            given = ", ".join(f"{key}={value!r}" for key, value in self.settings)
            raise InputError(
                f"{self.source!r} with {given}: {type(error).__name__}: {error}"
            ) from error
        return model, inputs() if callable(inputs) else inputs

    def real(self) -> tuple[nn.Module, Any]:
        """The module and its inputs, of a model that is not a file."""
        from roost import zoo

        if self.in_zoo:
            return zoo.model(self.source, self.train, **dict(self.settings))
        if self.is_config:
            from roost.cli import _built

            return _built.made(self)
        return self._made()

    def describe(self) -> CapturedStep:
        """As `capture`, with the program that the ops come from; of what has one."""
        try:
            return self._described()
        except InputError as error:
            _advise(error)
            raise

    def capture(self) -> Graph:
        """Raises InputError with what to do on the command line, where Python would do
        otherwise."""
        try:
            return self._captured()
        except InputError as error:
            _advise(error)
            raise

    def _described(self) -> CapturedStep:
        import torch

        from roost.frontends.tracing import trace
        from roost.frontends.tracing.captured_step import captured_step
        from roost.frontends.tracing.optimizers import OPTIMIZERS

        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS)
        if self.shapes or not (self.in_zoo or self.is_config or ":" in self.source):
            raise InputError(
                f"{self.source}: cannot be timed; give a zoo name, package.module:callable or a "
                f"config.json, no --input"
            )
        if self.is_config:
            from roost.cli import _built

            return _built.build(self, "meta").described()
        try:
            with torch.device("meta") if self.in_zoo else nullcontext():
                model, inputs = self.real()
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
            args = tuple(args) if isinstance(args, tuple | list) else (args,)
            program = trace.trace(model, args, kwargs, train=self.train)
        except (RuntimeError, NotImplementedError, OverflowError) as error:
            raise InputError(
                f"{self.source}: cannot be captured: {str(error).strip().splitlines()[0]}"
            ) from error
        name = self.source if self.in_zoo else type(model).__name__
        return captured_step(program, name, self.optimizer if self.train else None)

    def _captured(self) -> Graph:
        from roost import frontends, zoo

        if self.in_zoo:
            if self.shapes:
                raise InputError(
                    "--input is for files; a model of the zoo takes --set, such as --set batch=8"
                )
            return zoo.build(
                self.source, train=self.train, optimizer=self.optimizer, **dict(self.settings)
            )
        if self.settings and ":" in self.source:
            from roost.frontends.torch import capture

            return capture(*self._made(), train=self.train, optimizer=self.optimizer)
        options: dict[str, Any] = dict(self.settings)
        if self.shapes:
            options["inputs"] = dict(self.shapes)
        try:
            return frontends.read(
                self.source, train=self.train, optimizer=self.optimizer, **options
            )
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise InputError(
                f"{self.source}: {str(error).split('got an ')[-1]}: this kind of file takes no "
                f"such setting"
            ) from error


def _advise(error: InputError) -> None:
    """Say what to do on the command line, where Python would do otherwise."""
    said, loss, _ = str(error).partition(" Return the loss, or give loss=")
    if loss:
        error.args = (f"{said} {_WITH_LOSS}",)


def read(
    source: str,
    on: str | None,
    costs: Path | None,
    train: bool,
    optimizer: str | None,
    settings: list[str] | None,
    shapes: list[str] | None,
) -> tuple[Problem, Model | None]:
    """The problem, and the model where it was captured from one."""
    if not is_our_file(source):
        model = Model.of(source, train, optimizer, settings, shapes)
        check_cluster(source, on, costs)  # before the minutes that capturing may take
        with _console.working(f"capturing {source}"):
            graph = model.capture()
        return with_cluster(graph, source, on, costs), model
    given = {"--train": train, "--optimizer": optimizer, "--set": settings, "--input": shapes}
    for option, value in given.items():
        if value:
            raise InputError(f"{source}: is captured already; {option} is for models, leave it out")
    with _console.working(f"reading {source}"):
        return read_file(Path(source), on, costs), None


def read_file(path: Path, on: str | None, costs: Path | None) -> Problem:
    """The problem in a file, or that of the graph in it."""
    from roost.core import formats
    from roost.core.graph import Graph
    from roost.core.problem import Problem

    found = formats.load(path)
    if isinstance(found, Problem):
        for option, value in (("--on", on), ("--costs", costs)):
            if value is not None:
                raise InputError(
                    f"{path}: is a problem, with a cluster and costs of its own; leave out {option}"
                )
        return found
    if not isinstance(found, Graph):
        raise InputError(
            f"{path}: holds a {type(found).__name__.lower()}, not a graph or a problem"
        )
    return with_cluster(found, str(path), on, costs)


def placed_in(placement: Path, on: str | None, costs: Path | None) -> tuple[Path, Path | None]:
    """The file of a placement, and costs for it: those it was found with, where they are there and
    no others named.

    `placement` may be the folder that `roost place -o` wrote.
    """
    inside = placement.is_dir()
    # Or the cluster, which is looked for beside it, would be missed first.
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
    """The plan in a file, where it is one; it brings its problem."""
    from roost.core import formats
    from roost.plan.plan import Plan

    if not placement.is_file():
        return None
    found = formats.load(placement)
    if not isinstance(found, Plan):
        return None
    if on is not None or costs is not None:
        raise InputError(
            f"{placement}: is a plan, with a cluster and costs of its own; leave out --on and "
            f"--costs"
        )
    return found


def with_cluster(graph: Graph, source: str, on: str | None, costs: Path | None) -> Problem:
    """The graph on a cluster, with costs from a file or by roofline; or the problem in a file,
    where it is of it."""
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
    """A problem from a file, which must be of this graph."""
    if given.graph.digest != graph.digest:
        raise InputError(
            f"{path}: is a problem of graph {given.graph.name!r}, {given.graph.digest}; {source} "
            f"as given here is "
            f"{graph.digest}: give the settings that it was made with, such as --train and --set"
        )
    return given


def check_cluster(source: str, on: str | None, costs: Path | None = None) -> None:
    """Refuse what names no cluster, or none that there is. A problem brings its own."""
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
    """Whether this names a file of ours, there or not, and no model."""
    path = Path(source)
    if path.name == "config.json" or source.endswith(_MODEL_FILES) or path.is_dir():
        return False
    if source.endswith((".json", ".json.gz")):
        return True
    from roost.frontends import installed_reader

    return path.exists() and installed_reader(source) is None


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"{option} {text!r}: write it as KEY=VALUE")
    return key, value


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InputError(f"--input shape {text!r}: write it as 1,3,224,224") from None


def _value(text: str) -> Any:
    """A number or true or false where it reads as one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
