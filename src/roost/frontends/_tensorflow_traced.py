"""A traced TensorFlow graph with its calls inlined and all shapes inferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.errors import InputError
from roost.frontends._tensorflow_inline import Inlined, inline
from roost.frontends.tracing.tensors import fixed_shapes


@dataclass(frozen=True)
class Variable:
    """A tensor that is kept between steps."""

    name: str
    dtype: int  # TensorFlow's number for it
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """A graph with its calls, and the meaning of its placeholders."""

    graph_def: Any
    inputs: Mapping[str, str]  # placeholder -> name of the input
    outputs: Sequence[str] | None  # "op:index"; None for all tensors that nobody reads
    variables: Mapping[str, Variable] = field(default_factory=dict)  # placeholder -> variable
    # Placeholder -> name of a tensor that is not a variable.
    constants: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inferred:
    """The ops of a traced graph in the order in which they run, with all shapes inferred."""

    ops: Sequence[Any]
    colocated: Mapping[str, Sequence[str]]  # op -> ops that it must share a device with
    outputs: Sequence[str] | None  # "op:index"; None for all tensors that nobody reads


def infer(tf: Any, traced: Traced, given: Mapping[str, Sequence[int]], where: str) -> Inferred:
    """Inline all calls, fix the shapes of the inputs, and let TensorFlow infer the others."""
    inlined, placed = inline(traced.graph_def, where)
    _fix_inputs(inlined, traced, given, where)
    _make_variables(inlined, traced.variables)
    graph = _imported(tf, inlined, traced.graph_def.versions, where)
    ops = [graph.get_operation_by_name(node.name) for node in inlined.nodes]
    outputs = (
        None if traced.outputs is None else [placed(reference) for reference in traced.outputs]
    )
    return Inferred(ops, inlined.colocated, outputs)


def _fix_inputs(
    inlined: Inlined, traced: Traced, given: Mapping[str, Sequence[int]], where: str
) -> None:
    nodes = {node.name: node for node in inlined.nodes if node.name in traced.inputs}
    declared = {}
    for op, name in traced.inputs.items():
        shape = nodes[op].attr["shape"].shape
        known = "shape" in nodes[op].attr and not shape.unknown_rank
        declared[name] = (
            tuple(d.size if d.size >= 0 else None for d in shape.dim) if known else None
        )
    shapes, _ = fixed_shapes(declared, given, where)
    for op, name in traced.inputs.items():
        _set_shape(nodes[op], shapes[name])


def _set_shape(node: Any, shape: tuple[int, ...]) -> None:
    fixed = node.attr["shape"].shape
    fixed.Clear()
    for size in shape:
        fixed.dim.add(size=size)


def _make_variables(inlined: Inlined, variables: Mapping[str, Variable]) -> None:
    """Turn the placeholders of variables into variables, so that reads of them have a shape."""
    for node in inlined.nodes:
        if node.name in variables:
            variable = variables[node.name]
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype
            _set_shape(node, variable.shape)


def _imported(tf: Any, inlined: Inlined, versions: Any, where: str) -> Any:
    """The nodes as a TensorFlow graph, which infers all shapes."""
    graph_def = tf.compat.v1.GraphDef(node=inlined.nodes, versions=versions)
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except Exception as error:  # shapes that do not fit, ops of a library that is not loaded
        raise InputError(f"{where}: TensorFlow cannot build this graph: {error}") from None
    return graph
