"""A process that reads a TensorFlow model.

`python -m roost.frontends._tensorflow_worker SOURCE OPTIONS OUT`: OPTIONS is a JSON object. The
graph goes to OUT. Standard output gets one JSON object: the coverage, or the error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from roost.core.graph import Graph
from roost.errors import InputError, MissingExtra, RoostError, UnknownName
from roost.frontends._tensorflow_graph import describe
from roost.frontends._tensorflow_traced import Traced, Variable
from roost.frontends.tracing.tensors import Coverage


def import_tensorflow() -> Any:
    try:
        return import_module("tensorflow")
    except ImportError as error:
        raise MissingExtra("tensorflow", "tf") from error


def read(
    path: Path, signature: str, inputs: Mapping[str, Sequence[int]], name: str | None
) -> tuple[Graph, Coverage]:
    """The graph of a SavedModel folder or of a frozen GraphDef."""
    tf = import_tensorflow()
    traced = (
        traced_function(_signature(tf, path, signature), str(path))
        if path.is_dir()
        else _frozen(tf, path)
    )
    return describe(tf, traced, inputs, name or path.stem, str(path))


def _signature(tf: Any, path: Path, signature: str) -> Any:
    # The weights stay on disk: only their shapes are needed.
    options = tf.saved_model.LoadOptions(experimental_skip_checkpoint=True)
    try:
        loaded = tf.saved_model.load(str(path), options=options)
    except Exception as error:  # a damaged file, an op of a library that is not loaded
        raise InputError(
            f"{path}: TensorFlow cannot load this SavedModel: {_first_line(error)}"
        ) from error
    signatures = getattr(loaded, "signatures", {})
    if signature not in signatures:
        raise UnknownName(f"signature of {path}", signature, signatures)
    function = signatures[signature]
    function._roost_keeps = loaded  # its variables live only as long as the loaded model
    return function


def _frozen(tf: Any, path: Path) -> Traced:
    graph_def = tf.compat.v1.GraphDef()
    try:
        graph_def.ParseFromString(path.read_bytes())
    except Exception as error:  # DecodeError, from whichever protobuf is installed
        raise InputError(
            f"{path}: is not a GraphDef, or not a whole one ({_first_line(error)}); save it "
            "again, or give the folder of a SavedModel"
        ) from None
    if not graph_def.node:
        raise InputError(
            f"{path}: is not a GraphDef, or not a whole one (it has no nodes); save it again"
        )
    for node in graph_def.node:
        if node.op in ("Variable", "VariableV2"):
            raise InputError(
                f"{path}: op {node.name!r} is a variable of TensorFlow 1, so this GraphDef is not "
                "frozen; freeze it, or give the folder of a SavedModel"
            )
    handles = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
    placeholders = [node for node in graph_def.node if node.op == "Placeholder"]
    inputs = {
        node.name: node.name for node in placeholders if node.attr["dtype"].type not in handles
    }
    return Traced(graph_def, inputs, None)


def traced_function(function: Any, where: str) -> Traced:
    """The traced graph of a concrete function."""
    handles = {id(variable.handle): variable for variable in function.graph.variables}
    captured = {internal.op.name: external for external, internal in function.graph.captures}
    variables = {}
    constants = {}
    for placeholder, external in captured.items():
        variable = _variable(placeholder, external, handles.get(id(external)))
        if variable is None:
            constants[placeholder] = placeholder
            continue
        if any(size < 0 for size in variable.shape):
            raise InputError(
                f"{where}: variable {variable.name!r} has shape {variable.shape}; build it with a "
                "fixed shape"
            )
        variables[placeholder] = variable
    own = [tensor.op for tensor in function.inputs if tensor.op.name not in captured]
    inputs = {
        op.name: _input_name(op)
        for op in own
        if op.outputs[0].dtype.name not in ("resource", "variant")
    }
    outputs = [tensor.name for tensor in function.outputs]
    return Traced(function.graph.as_graph_def(), inputs, outputs, variables, constants)


def _variable(placeholder: str, external: Any, variable: Any | None) -> Variable | None:
    """The variable behind a captured handle; None for a constant or a table.

    Fused optimizers take variables that the function does not list. Their handles have type and
    shape.
    """
    if variable is not None and variable.shape.rank is not None:
        shape = tuple(-1 if size is None else size for size in variable.shape.as_list())
        return Variable(variable.name.partition(":")[0], variable.dtype.as_datatype_enum, shape)
    about = getattr(external, "_handle_data", None)
    if about is None or not about.is_set or len(about.shape_and_type) != 1:
        return None
    held = about.shape_and_type[0]
    return Variable(placeholder, held.dtype, tuple(dimension.size for dimension in held.shape.dim))


def _input_name(placeholder: Any) -> str:
    named = placeholder.node_def.attr["_user_specified_name"].s.decode()
    return named or str(placeholder.name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def main(source: str, options: str, out: str) -> int:
    settings = json.loads(options)
    try:
        graph, coverage = read(
            Path(source), settings["signature"], settings["inputs"], settings["name"]
        )
        graph.save(out)
        answer: dict[str, Any] = {"coverage": dataclasses.asdict(coverage)}
    except RoostError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0 if "coverage" in answer else 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
