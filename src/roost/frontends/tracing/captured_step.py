"""A captured step: the graph of a traced program, and the program's node of each op.

Made by `frontends.torch`; taken by the profiler and both runtimes. Views are not ops: an op that
reads a view reads the tensor behind it. A node with several outputs becomes one op, plus a free op
for each output that is used. They share a group, so each output can go where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from roost.core.graph import Graph, GraphBuilder
from roost.errors import InputError
from roost.frontends.tracing.flop import arguments, bytes_of, flop_of, tensors_in
from roost.frontends.tracing.optimizers import KEEP, KEPT, OPTIMIZERS
from roost.frontends.tracing.program import BACKWARD, Program, is_getitem
from roost.frontends.tracing.tensors import Count, Coverage, Names


@dataclass(frozen=True, eq=False)
class ResidentUpdate:
    """The work of an op of the phase `update`: it writes the new value of a resident."""

    resident: str  # the op of the resident
    states: tuple[str, ...]  # ops of its optimizer states
    value: fx.Node  # its gradient; for a buffer its new value


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The graph of a traced program, and the node of the program for each op."""

    program: Program
    graph: Graph
    coverage: Coverage
    op_of: Mapping[fx.Node, str]  # node -> the op of its output, or of the tensor it views
    maker: Mapping[str, fx.Node]  # op -> the node of its output; not of updates and their states
    updates: Mapping[str, ResidentUpdate]  # op -> its update
    optimizer: str | None

    @property
    def resident_ops(self) -> dict[str, str]:
        """The op of each resident."""
        return {name: self.op_of[node] for name, node in self.program.resident_nodes.items()}


def captured_step(
    program: Program, name: str, optimizer: str | None = None, keep_gradients: bool = False
) -> CapturedStep:
    """Build the graph of a traced program, with the optimizer's updates if one is named.

    `keep_gradients`: the step adds each gradient to a state of its parameter, which it leaves as it
    is. The optimizer's own states are there as well.
    """
    writer = _StepWriter(program, name)
    writer.add_placeholders()
    for node in program.module.graph.nodes:
        if node.op == "call_function":
            writer.add_op(node)
        elif node.op == "get_attr":
            writer.add_constant(node)
    if optimizer is not None:
        writer.add_updates(optimizer, keep_gradients)
    writer.add_new_values()
    return CapturedStep(
        program=program,
        graph=writer.builder.freeze(),
        coverage=writer.count.coverage(),
        op_of=writer.op_of,
        maker=writer.node_of,
        updates=writer.updates,
        optimizer=optimizer,
    )


class _StepWriter:
    """Adds the nodes of a program to a graph one by one."""

    def __init__(self, program: Program, name: str) -> None:
        self.program = program
        self.builder = GraphBuilder(name)
        self.op_of: dict[Any, str] = {}  # node -> the op of its output, or of the tensor it views
        self.op_of_storage: dict[int, str] = {}  # storage -> the op that made it
        self.node_of: dict[str, fx.Node] = {}  # op -> its node
        self.updates: dict[str, ResidentUpdate] = {}
        self.names = Names()
        self.count = Count()
        self.holders = dict(zip(program.residents, program.placeholders, strict=False))

    def add_placeholders(self) -> None:
        """Add the residents, then the inputs."""
        names = (*self.program.residents, *self.program.inputs)
        for node, name in zip(self.program.placeholders, names, strict=True):
            value = node.meta.get("val")
            op = self.names.unused(name)
            size = _storage_bytes(value)
            dtype = _dtype(value)
            if self.holders.get(name) is node:
                self.builder.parameter(op, size, dtype=dtype, module=_owner(name))
            else:
                self.builder.add(op, "input", phase="input", output_bytes=size, dtype=dtype)
            self._remember(node, op)

    def add_constant(self, node: fx.Node) -> None:
        """Add a tensor that tracing met and that belongs to no module."""
        value = getattr(self.program.module, str(node.target))
        op = self.names.unused(node.name)
        self.builder.parameter(op, _storage_bytes(value), dtype=_dtype(value))
        self.op_of[node] = op
        self.node_of[op] = node

    def add_op(self, node: fx.Node) -> None:
        """Add a call as an op; note a view as the op behind it."""
        value = node.meta.get("val")
        outputs = list(tensors_in(value))
        if not outputs:
            return  # an assertion about a tensor
        storages = [_storage(tensor) for tensor in outputs]
        if all(storage in self.op_of_storage for storage in storages):
            self.op_of[node] = self.op_of_storage[storages[0]]
            return
        traits = _traits(node, outputs)
        op = self.names.unused(node.name)
        if is_getitem(node):
            producer = self.op_of[node.args[0]]
            size = _storage_bytes(value)
            self.builder.add(op, "output", [producer], output_bytes=size, group=producer, **traits)
            self._remember(node, op)
            return
        _check_dtypes(node, traits["module"])
        work, by_formula = flop_of(node)
        read, written = bytes_of(node)
        kind = _kind(node)
        self.count.add(kind, work, read + written, "formula" if by_formula else "elements")
        several = isinstance(value, tuple | list)
        sources = (self.op_of[source] for source in node.all_input_nodes if source in self.op_of)
        self.builder.add(
            op,
            kind,
            sources,
            flop=work,
            bytes_read=read,
            bytes_written=written,
            output_bytes=0 if several else _storage_bytes(value),
            workspace_bytes=sum(map(_storage_bytes, outputs)) if several else 0,
            counted=not by_formula,
            group=op if several else None,
            **traits,
        )
        self._remember(node, op)  # several outputs are made by the getitems that follow

    def add_updates(self, optimizer: str, keep_gradients: bool) -> None:
        """Add one op for each parameter that has a gradient, after all others."""
        states, flop = OPTIMIZERS[optimizer]
        kind = optimizer
        if keep_gradients:
            states, flop, kind = (*states, KEPT), 1, KEEP
        for name, gradient in self.program.gradients.items():
            value = self.holders[name].meta["val"]
            size = _storage_bytes(value)
            traits = {"module": _owner(name), "dtype": _dtype(value)}
            state_ops = tuple(
                self.builder.parameter(self.names.unused(f"{name}:{state}"), size, **traits)
                for state in states
            )
            moved = size if keep_gradients else size * (1 + len(states))
            self._add_update(
                ResidentUpdate(self.op_of[self.holders[name]], state_ops, gradient),
                name,
                kind,
                flop=flop * value.numel(),
                bytes_read=moved + size,
                bytes_written=moved,
                **traits,
            )

    def add_new_values(self) -> None:
        """Add one op for each buffer that the step changes: it takes the new value home."""
        for name, node in self.program.new_values.items():
            value = self.holders[name].meta["val"]
            size = _storage_bytes(value)
            update = ResidentUpdate(self.op_of[self.holders[name]], (), node)
            traits = {"module": _owner(name), "dtype": _dtype(value)}
            self._add_update(update, name, "copy", bytes_read=size, bytes_written=size, **traits)

    def _add_update(self, update: ResidentUpdate, name: str, kind: str, **settings: Any) -> None:
        op = self.names.unused(f"{name}:update")
        self.updates[op] = update
        inputs = (update.resident, *update.states, self.op_of[update.value])
        self.builder.add(op, kind, inputs, phase="update", **settings)

    def _remember(self, node: fx.Node, op: str) -> None:
        self.op_of[node] = op
        self.node_of[op] = node
        value: Any = node.meta.get("val")
        if hasattr(value, "untyped_storage"):
            self.op_of_storage[_storage(value)] = op


def _traits(node: fx.Node, outputs: list[Tensor]) -> dict[str, Any]:
    """The phase, module and dtype of an op."""
    modules = node.meta.get("nn_module_stack") or {}
    paths = [_module_path(key, path) for key, (path, _) in modules.items() if key != BACKWARD]
    floats = (tensor for tensor in outputs if tensor.is_floating_point())
    return {
        "phase": "backward" if BACKWARD in modules else "forward",
        "module": paths[-1] if paths else "",
        "dtype": _dtype(next(floats, outputs[0])),
    }


def _check_dtypes(node: fx.Node, module: str) -> None:
    """Raise if a product mixes dtypes, which fake tensors allow and real ones do not."""
    if not _kind(node).endswith(("mm", "convolution")):
        return
    dtypes = {_dtype(tensor) for tensor in _float_inputs(node)}
    if len(dtypes) > 1:
        raise InputError(
            f"{_kind(node)} in module {module!r} mixes {' and '.join(sorted(dtypes))}; give the "
            "model and its inputs one type"
        )


def _float_inputs(node: fx.Node) -> Iterator[Tensor]:
    inputs = tensors_in(arguments(node))
    return (tensor for tensor in inputs if tensor.is_floating_point())


def _owner(name: str) -> str:
    """The module of a parameter or buffer."""
    return name.rpartition(".")[0]


def _storage(tensor: Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def _storage_bytes(value: Any) -> int:
    """Bytes of the storage behind a tensor; its shape may say less, or more."""
    return int(value.untyped_storage().nbytes()) if hasattr(value, "untyped_storage") else 0


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else "float32"


def _kind(node: fx.Node) -> str:
    """The kind of an op: conv2d for `aten.conv2d.default`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _module_path(key: str, path: str) -> str:
    """A module's path as in `state_dict`; `layer@3` is the fourth call of a module.

    The export writes some paths as `L['self'].layer`, and the number of the call in the key alone.
    """
    path = path.removeprefix("L['self']").removeprefix(".")
    _, _, call = key.rpartition("@")
    return f"{path}@{call}" if "@" in key and call.isdecimal() else path
