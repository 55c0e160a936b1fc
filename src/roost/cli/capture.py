"""`roost capture`: a model to a graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.graph import Graph


def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A zoo name (see roost zoo), package.module:callable, a .onnx or .pt2 file, a SavedModel folder, or a "
            "Hugging Face config.json.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The graph.json to write, or .json.gz.")
    ],
    train: Annotated[bool, typer.Option("--train", help="A whole training step instead of inference.")] = False,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw; with --train.")] = "sgd",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the model, such as batch=8; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=1,3,224,224", help="The shape of an input of a file; may be repeated."),
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """Capture a model as a graph.

    The model is not run, and its weights are not held.
    """
    settings = dict(_pair(text, "--set") for text in setting or [])
    shapes = {name: _shape(text) for name, text in (_pair(text, "--input") for text in shape or [])}
    with _console.working(f"capturing {model}"):
        graph = _graph(model, train, optimizer, {key: _value(text) for key, text in settings.items()}, shapes)
    graph.save(output)
    _console.note(f"wrote {output}")
    facts = summary(graph)
    by_formula = f"{facts['flop_by_formula']:.1%} of the FLOP and {facts['bytes_by_formula']:.1%} of the bytes moved"
    if as_json:
        _console.show_json(facts)
        return
    from roost.core.units import show_bytes, show_count

    _console.show(
        f"{graph.name}: {facts['ops']} ops, {facts['edges']} edges, {show_count(facts['flop'], 'FLOP')}, "
        f"parameters {show_bytes(facts['parameter_bytes'])}",
        f"{by_formula} belong to ops costed by a formula; the others count their elements",
    )


def summary(graph: Graph) -> dict[str, Any]:
    """What there is to say of a graph in a line."""
    from roost.cost_models.roofline import known_share

    flop_by_formula, bytes_by_formula = known_share(graph)
    return {
        "name": graph.name,
        "ops": graph.num_ops,
        "edges": graph.num_edges,
        "flop": float(graph.flop.sum()),
        "bytes_moved": int(graph.bytes_read.sum() + graph.bytes_written.sum()),
        "parameter_bytes": int(graph.output_bytes[graph.is_parameter].sum()),
        "flop_by_formula": flop_by_formula,
        "bytes_by_formula": bytes_by_formula,
        "digest": graph.digest,
    }


def _graph(model: str, train: bool, optimizer: str, settings: dict[str, Any], shapes: dict[str, list[int]]) -> Graph:
    from roost import frontends, zoo

    looks_like_a_name = model.replace("_", "").isalnum() and not Path(model).exists()
    if looks_like_a_name:
        if shapes:
            raise InputError("--input is for files; a model of the zoo takes --set, such as --set batch=8")
        return zoo.build(model, train=train, optimizer=optimizer, **settings)
    options: dict[str, Any] = dict(settings)
    if shapes:
        options["inputs"] = shapes
    try:
        return frontends.read(model, train=train, optimizer=optimizer, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise InputError(
            f"{model}: {str(error).split('got an ')[-1]}: this kind of file takes no such setting"
        ) from error


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
