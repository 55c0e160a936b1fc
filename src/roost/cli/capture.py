"""`roost capture`: the graph of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _model
from roost.cli._model import ModelSpec
from roost.cli._text import show_bytes, show_count

if TYPE_CHECKING:
    from roost.core.graph import Graph


def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A zoo name (see roost zoo), package.module:callable, a .onnx or .pt2 file, a "
            "SavedModel folder, or a Hugging Face config.json.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The graph.json to write, or .json.gz."
        ),
    ],
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    as_json: _console.AsJson = False,
) -> None:
    """Capture a model as a graph.

    The model does not run, and its weights take no memory.
    """
    from roost.core import formats
    from roost.core.graph import Graph

    formats.check_path(Graph, output)
    chosen = ModelSpec.of(model, train, optimizer, setting, shape, trust)
    with _console.working(f"capturing {model}"):
        graph = chosen.capture()
    graph.save(output)
    _console.note(f"wrote {output}")
    facts = summary(graph)
    if as_json:
        _console.show_json(facts)
        return
    flop = facts["flop_by_formula"]
    moved = facts["bytes_by_formula"]
    _console.show(
        f"{graph.name}: {facts['ops']} ops, {facts['edges']} edges, "
        f"{show_count(facts['flop'], 'FLOP')}, "
        f"parameters {show_bytes(facts['parameter_bytes'])}",
        f"{flop:.1%} of the FLOP and {moved:.1%} of the bytes moved belong to ops costed by a "
        "formula; the others count their elements",
    )


def summary(graph: Graph) -> dict[str, Any]:
    """The sizes of a graph, as --json prints them."""
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
