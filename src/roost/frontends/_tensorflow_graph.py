"""A traced TensorFlow graph to a Graph; it must run in a process that has TensorFlow.

Variables are parameters. Reading one is free unless the step has changed it before. An op that
changes a variable has the phase update and shares a group with the variable, as TensorFlow demands.
Ops that the model colocates share a group too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.core.graph import Graph, GraphBuilder
from roost.errors import GraphError, InputError
from roost.frontends._tensorflow_flop import COSTS, SHAPE_ONLY
from roost.frontends._tensorflow_traced import Inferred, Traced, infer
from roost.frontends.tracing.op_costs import OpCall
from roost.frontends.tracing.tensors import BITS, Count, Coverage, Names, Tensor, words

# An op that reads their output reads their input.
_VIEWS = words(
    """
    EnsureShape ExpandDims Identity IdentityN PlaceholderWithDefault PreventGradient Reshape
    Snapshot Squeeze StopGradient
    """
)
_READS = frozenset(
    ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")
)
# Makes a list of axes from shapes, of a length that TensorFlow does not infer.
_AXES = "BroadcastGradientArgs"
_CALL_PARTS = ("PartitionedCall", "StatefulPartitionedCall", "gradient_tape")
_MOST_SETTING_ELEMENTS = 16

Ref = tuple[str, int]  # an op and the index of one of its outputs


def describe(
    tf: Any, traced: Traced, given: Mapping[str, Sequence[int]], name: str, where: str
) -> tuple[Graph, Coverage]:
    """The graph of a traced function with the given shapes of inputs, and its coverage."""
    writer = _TensorflowWriter(tf, traced, infer(tf, traced, given, where), where)
    return writer.graph(name), writer.count.coverage()


@dataclass
class _OpRow:
    """An op that is added to the graph once its group is known."""

    name: str
    kind: str
    inputs: list[str]
    settings: dict[str, Any]


class _TensorflowWriter:
    """Adds the ops of a traced graph to a Graph one by one."""

    def __init__(self, tf: Any, traced: Traced, inferred: Inferred, where: str) -> None:
        self.tf = tf
        self.where = where
        self.ops = inferred.ops
        self.colocated = inferred.colocated
        self.constants = traced.constants
        variables = {op: variable.name for op, variable in traced.variables.items()}
        self.given_names = {**variables, **traced.inputs, **traced.constants}
        self.count = Count()
        self.names = Names()
        self.rows: dict[str, _OpRow] = {}
        self.op_of: dict[Ref, str] = {}  # output -> our op that makes it
        self.backward: set[str] = set()  # our ops
        self.copies: dict[
            str, str
        ] = {}  # parameter -> the op that reads it for updates of other parameters
        self.settings: dict[str, bool] = {}  # tensor -> whether it is part of the ops that take it
        self.group_of = _JoinedNames()
        self.root: dict[Ref, Ref] = {}  # output of a view -> the tensor behind it
        # Read of a variable -> the op that changed it last.
        self.written_before: dict[str, str] = {}
        self._follow_views()
        self.needed = self._needed(inferred.outputs)

    def graph(self, name: str) -> Graph:
        for op in self.ops:
            if op.type == "VarHandleOp" or op.type == "Const" or op.name in self.constants:
                self._add_parameter(op)
            elif op.type == "Placeholder":
                tensor = self._tensor(op.outputs[0])
                self._add(op, "input", [], {"phase": "input", **_size(tensor)})
            elif self._is_update(op):
                self._add_update(op)
            elif op.name in self.written_before:
                self._add_read(op)
            elif (op.name, 0) not in self.root and self._used(op):
                self._add_op(op)
        if not self.rows:
            raise GraphError(f"{self.where}: nothing is computed in this graph")
        return self._freeze(name)

    def _follow_views(self) -> None:
        writer: dict[Ref, str] = {}
        for op in self.ops:
            if op.type in _VIEWS:
                for index in range(len(op.outputs)):
                    self.root[op.name, index] = self._source(
                        op.inputs[index if op.type == "IdentityN" else 0]
                    )
            elif op.type == "ReadVariableOp":
                variable = self._source(op.inputs[0])
                if variable in writer:
                    self.written_before[op.name] = writer[variable]
                else:
                    self.root[op.name, 0] = variable
            elif self._is_update(op):
                for variable in self._targets(op):
                    writer[variable] = op.name

    def _source(self, tensor: Any) -> Ref:
        ref = (tensor.op.name, tensor.value_index)
        return self.root.get(ref, ref)

    def _is_update(self, op: Any) -> bool:
        """Tell whether an op changes a variable: it takes its handle and does more than read."""
        return op.type not in _READS | _VIEWS and bool(self._targets(op))

    def _targets(self, op: Any) -> list[Ref]:
        return [self._source(tensor) for tensor in op.inputs if self._is_handle(tensor)]

    def _is_handle(self, tensor: Any) -> bool:
        """Tell whether a tensor is the handle of a variable, and not of a table or an iterator."""
        if tensor.dtype != self.tf.resource:
            return False
        maker = tensor.graph.get_operation_by_name(self._source(tensor)[0])
        return bool(maker.type == "VarHandleOp")

    def _needed(self, outputs: Sequence[str] | None) -> set[Ref]:
        """The tensors that the outputs and the changes of variables depend on."""
        needed = set(self._sinks() if outputs is None else map(self._output, outputs))
        for op in reversed(self.ops):
            made = {(op.name, index) for index in range(len(op.outputs))}
            if self._is_update(op) or (op.type not in _VIEWS and not needed.isdisjoint(made)):
                needed.update(self._reads(op))
        return needed

    def _output(self, reference: str) -> Ref:
        name, _, index = reference.partition(":")
        ref = (name, int(index or 0))
        return self.root.get(ref, ref)

    def _sinks(self) -> list[Ref]:
        """The outputs of ops whose outputs nobody reads."""
        unread = [op for op in self.ops if not any(tensor.consumers() for tensor in op.outputs)]
        ends = [op for op in unread if op.type != "Placeholder"]
        return [self._source(tensor) for op in ends for tensor in op.outputs]

    def _reads(self, op: Any) -> list[Ref]:
        """The tensors that an op reads."""
        if op.type.lower() in SHAPE_ONLY:
            return []
        return [self._source(tensor) for tensor in op.inputs if not self._is_setting(tensor)]

    def _is_setting(self, tensor: Any) -> bool:
        """Tell whether a tensor is part of the op that takes it: a few numbers known beforehand."""
        if tensor.name not in self.settings:
            count = tensor.shape.num_elements()
            few = count is not None and count <= _MOST_SETTING_ELEMENTS and tensor.dtype.is_integer
            known = (few or tensor.shape.rank == 0) and self.tf.get_static_value(tensor) is not None
            self.settings[tensor.name] = known or tensor.op.type == _AXES
        return self.settings[tensor.name]

    def _used(self, op: Any) -> bool:
        return any((op.name, index) in self.needed for index in range(len(op.outputs)))

    def _tensor(self, tensor: Any) -> Tensor:
        """The type and shape of a tensor; a handle counts as its variable."""
        if self._is_handle(tensor):
            maker = tensor.graph.get_operation_by_name(self._source(tensor)[0])
            shape = maker.get_attr("shape")
            return Tensor(_dtype_name(maker.get_attr("dtype")), tuple(d.size for d in shape.dim))
        if tensor.dtype in (self.tf.resource, self.tf.variant):
            return Tensor("bool", (0,))  # a table or a generator has no data to move
        if not tensor.shape.is_fully_defined():
            raise InputError(
                f"{self.where}: the shape of {tensor.name!r} ({tensor.op.type}) does not follow "
                f"from the shapes of the inputs, only {tensor.shape}; trace the model with shapes "
                "that are fixed"
            )
        return Tensor(_dtype_name(tensor.dtype), tuple(tensor.shape.as_list()))

    def _taken(self, tensor: Any) -> Tensor:
        if self._is_setting(tensor) and not tensor.shape.is_fully_defined():
            return Tensor(_dtype_name(tensor.dtype), (0,))
        return self._tensor(tensor)

    def _add_parameter(self, op: Any) -> None:
        if (op.name, 0) not in self.needed:
            return
        tensor = self._tensor(op.outputs[0])
        self._add(op, "parameter", [], {"phase": "parameter", **_size(tensor)})

    def _add_op(self, op: Any) -> None:
        outputs = tuple(
            self._tensor(tensor) if (op.name, index) in self.needed else None
            for index, tensor in enumerate(op.outputs)
        )
        flop, read, written, counted = self._costs(op, outputs)
        used = [tensor for tensor in outputs if tensor is not None]
        several = len(used) > 1
        settings = {
            "flop": flop,
            "bytes_read": read,
            "bytes_written": written,
            "output_bytes": 0 if several else written,
            "workspace_bytes": written if several else 0,
            "counted": counted,
            "dtype": next((tensor for tensor in used if tensor.is_float), used[0]).dtype,
        }
        inputs = [self.op_of[ref] for ref in self._reads(op)]
        name = self._add(op, op.type.lower(), inputs, settings)
        for index, tensor in enumerate(outputs):
            if tensor is not None and several:
                self._add(op, "output", [name], _size(tensor), index)
            elif tensor is not None:
                self.op_of[op.name, index] = name

    def _costs(self, op: Any, outputs: tuple[Tensor | None, ...]) -> tuple[float, int, int, bool]:
        kind = op.type.lower()
        inputs = tuple(map(self._taken, op.inputs))
        call = OpCall(kind, _attributes(op.node_def), inputs, outputs)
        try:
            flop, source = COSTS.flop(call)
            read, written = COSTS.bytes(call)
        except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise InputError(
                f"{self.where}: op {op.name!r} ({op.type}) has odd inputs: {error!r}"
            ) from error
        self.count.add(kind, flop, read + written, source)
        return flop, read, written, source != "formula"

    def _add_update(self, op: Any) -> None:
        targets = list(dict.fromkeys(self._targets(op)))
        flop, read, _, counted = self._costs(op, ())
        changed = [self._tensor(tensor) for tensor in op.inputs if self._is_handle(tensor)]
        size = sum(tensor.bytes for tensor in changed)
        settings = {
            "phase": "update",
            "flop": flop,
            "bytes_read": read - (size if op.type == "AssignVariableOp" else 0),
            "bytes_written": size,
            "counted": counted,
            "dtype": changed[0].dtype,
        }
        variables = [self.op_of[ref] for ref in targets]
        others = [self.op_of[ref] for ref in self._reads(op) if ref not in targets]
        name = self._add(op, op.type.lower(), [*variables, *map(self._as_data, others)], settings)
        self.op_of[op.name, 0] = name
        for variable in variables:
            self.group_of.join(name, variable)

    def _as_data(self, source: str) -> str:
        """The op whose output an update may read without changing a parameter.

        An op of the phase update changes every parameter it reads. So another op reads for it the
        parameters that it must not change.
        """
        row = self.rows[source]
        if row.settings.get("phase") != "parameter":
            return source
        if source not in self.copies:
            settings = {key: row.settings[key] for key in ("output_bytes", "dtype", "module")}
            name = self.names.unused(f"{source}/read")
            self.rows[name] = _OpRow(name, "readvariableop", [source], settings)
            self.copies[source] = name
        return self.copies[source]

    def _add_read(self, op: Any) -> None:
        """Add the read of a changed variable: after the op that changes it, at the variable."""
        if not self._used(op):
            return
        tensor = self._tensor(op.outputs[0])
        variable = self.op_of[self._source(op.inputs[0])]
        writer = self.op_of[self.written_before[op.name], 0]
        name = self._add(op, "readvariableop", [variable, writer], _size(tensor))
        self.group_of.join(name, variable)

    def _add(
        self,
        op: Any,
        kind: str,
        inputs: list[str],
        settings: dict[str, Any],
        output: int | None = None,
    ) -> str:
        """Add one of our ops for an op of TensorFlow, or with `output` for one of its outputs."""
        given = self.given_names.get(op.name, op.name)
        name = self.names.unused(given if output is None else f"{given}/{output}")
        settings.setdefault("phase", self._phase(op, name, inputs))
        settings["module"] = _module_path(given)
        self.rows[name] = _OpRow(name, kind, list(dict.fromkeys(inputs)), settings)
        self.op_of[op.name, output or 0] = name
        if output is not None:
            self.group_of.join(name, inputs[0])
        for target in self.colocated.get(op.name, []):
            self.group_of.join(name, f"loc:@{target}")
        return name

    def _phase(self, op: Any, name: str, inputs: list[str]) -> str:
        """Backward for ops of the tape or tf.gradients, and for ops that depend on them."""
        made_by_tape = "gradient_tape/" in op.name or op.name.startswith("gradients/")
        if made_by_tape or any(source in self.backward for source in inputs):
            self.backward.add(name)
            return "backward"
        return "forward"

    def _freeze(self, name: str) -> Graph:
        builder = GraphBuilder(name)
        for target in sorted({target for targets in self.colocated.values() for target in targets}):
            # An op colocated with a view is colocated with the tensor behind it.
            ref = self.root.get((target, 0), (target, 0))
            if ref in self.op_of:
                self.group_of.join(f"loc:@{target}", self.op_of[ref])
        groups = self.group_of.shared(self.rows)
        for row in self.rows.values():
            builder.add(row.name, row.kind, row.inputs, group=groups.get(row.name), **row.settings)
        return builder.freeze()


class _JoinedNames:
    """Names that share a group, joined two by two."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def join(self, name: str, other: str) -> None:
        self._above[self._top(name)] = self._top(other)

    def shared(self, names: Iterable[str]) -> dict[str, str]:
        """The group of every name that shares one; a group is named after its first name."""
        members: dict[str, list[str]] = {}
        for name in names:
            members.setdefault(self._top(name), []).append(name)
        return {
            name: several[0] for several in members.values() if len(several) > 1 for name in several
        }

    def _top(self, name: str) -> str:
        while name in self._above and self._above[name] != name:
            name = self._above[name]
        return name


def _size(tensor: Tensor) -> dict[str, Any]:
    return {"output_bytes": tensor.bytes, "dtype": tensor.dtype}


def _attributes(node: Any) -> dict[str, Any]:
    """The plain attributes of a node."""
    values: dict[str, Any] = {}
    for name, value in node.attr.items():
        which = value.WhichOneof("value")
        if which in ("i", "f", "b"):
            values[name] = getattr(value, which)
        elif which == "s":
            values[name] = value.s.decode(errors="replace")
        elif which == "list" and value.list.i:
            values[name] = list(value.list.i)
    return values


def _dtype_name(dtype: Any) -> str:
    """The name of a type: int8 for qint8, float16 for half, the type behind a reference."""
    name = str(dtype.base_dtype.name)
    name = name.removeprefix("q") if name.startswith(("qint", "quint")) else name
    if name not in BITS:
        raise InputError(f"tensors of type {name} have no known size")
    return name


def _module_path(name: str) -> str:
    """The module of an op: net.conv1 for `gradient_tape/net/conv1/Conv2DBackpropInput`."""
    parts = name.split("/")[:-1]
    return ".".join(part for part in parts if part.rstrip("_0123456789") not in _CALL_PARTS)
