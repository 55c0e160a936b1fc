"""PyTorch: a module and example inputs, a `.pt2` file, or `package.module:callable`, to a Graph.

`capture` traces the model (see `trace.py`) and describes each op. Views are no ops: whoever reads a
view reads the tensor it looks into. An op with several outputs is one op, and a free op for each
output that is used, in one group with it, so that each goes where it is needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.core.graph import Graph, GraphBuilder
from roost.errors import InputError, UnknownName
from roost.frontends.tracing.tensors import Count, Coverage

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

    from roost.frontends.tracing.trace import Program

# Optimizer -> states it keeps for each parameter, FLOP for each element.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], int]] = {
    "sgd": ((), 2),
    "momentum": (("momentum_buffer",), 4),
    "adam": (("exp_avg", "exp_avg_sq"), 12),
    "adamw": (("exp_avg", "exp_avg_sq"), 13),
}


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    train: bool = False,
    optimizer: str = "sgd",
    loss: Callable[..., Tensor] | None = None,
    name: str | None = None,
) -> Graph:
    """The graph of one step: of inference, or with `train` of forward, loss, backward and the
    optimizer's update.

    `example_inputs` is a tensor, a tuple of arguments or a dict of keyword arguments; only shapes
    and types matter, and both model and inputs may be on the meta device. For training the model
    returns its loss, or `loss` makes it of the model's output. Raises UnsupportedOp where the model
    decides by the values of tensors.
    """
    return step_of(
        model, example_inputs, train=train, optimizer=optimizer, loss=loss, name=name
    ).graph


def step_of(
    model: nn.Module,
    example_inputs: Any,
    *,
    train: bool = False,
    optimizer: str = "sgd",
    loss: Callable[..., Tensor] | None = None,
    name: str | None = None,
) -> Described:
    """As `capture`, with the program that the graph describes: what the runtime and the profiler
    take."""
    from roost.frontends.tracing import trace

    if not isinstance(optimizer, str):
        known = ", ".join(OPTIMIZERS)
        raise InputError(f"optimizer is {type(optimizer).__name__}; give its name, one of {known}")
    if optimizer not in OPTIMIZERS:
        raise UnknownName("optimizer", optimizer, OPTIMIZERS)
    if name is not None and not isinstance(name, str):
        raise InputError(f"name is {name!r}; it must be a text")
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    else:
        args = (
            tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
        )
        kwargs = {}
    try:
        program = trace.trace(model, args, kwargs, train=train, loss=loss)
        return described(program, name or type(model).__name__, optimizer if train else None)
    # Sparse gradients, nested tensors: PyTorch says no.
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"the model cannot be captured: {str(error).strip().splitlines()[0]}"
        ) from error


def describe(program: Program, name: str, optimizer: str | None = None) -> tuple[Graph, Coverage]:
    """The graph of a traced program, and how well its costs are known."""
    found = described(program, name, optimizer)
    return found.graph, found.coverage


@dataclass(frozen=True, eq=False)
class Update:
    """What an op of the phase `update` does: writes the new value of a resident."""

    resident: str  # the op of the resident
    states: tuple[str, ...]  # ops of what the optimizer keeps for it
    value: fx.Node  # its gradient, or its new value where it is a buffer


@dataclass(frozen=True, eq=False)
class Described:
    """The graph of a traced program, and which node of the program each op is."""

    program: Program
    graph: Graph
    coverage: Coverage
    op_of: Mapping[fx.Node, str]  # node -> the op whose output it is, or looks into
    # Op -> the node that makes its output; not of updates and of what they keep.
    maker: Mapping[str, fx.Node]
    updates: Mapping[str, Update]  # op -> what it does
    optimizer: str | None


def described(program: Program, name: str, optimizer: str | None = None) -> Described:
    """As `describe`, for who wants to run it too."""
    description = _Description(program, name)
    description.add_placeholders()
    for node in program.module.graph.nodes:
        if node.op == "call_function":
            description.add_op(node)
        elif node.op == "get_attr":
            description.add_constant(node)
    if optimizer is not None:
        description.add_updates(optimizer)
    description.add_new_values()
    graph, coverage = description.builder.freeze(), description.count.coverage()
    return Described(
        program,
        graph,
        coverage,
        description.op_of,
        description.made_by,
        description.updates,
        optimizer,
    )


class _Description:
    """Adds the nodes of a program to a graph one by one."""

    def __init__(self, program: Program, name: str) -> None:
        self.program = program
        self.builder = GraphBuilder(name)
        self.op_of: dict[Any, str] = {}  # node -> the op whose output it is, or looks into
        self.maker: dict[int, str] = {}  # storage -> the op that made it
        self.made_by: dict[str, fx.Node] = {}  # op -> its node
        self.updates: dict[str, Update] = {}
        self.taken: set[str] = set()
        self.count = Count()

    def add_placeholders(self) -> None:
        names = (*self.program.residents, *self.program.inputs)
        count = len(self.program.residents)
        for number, (node, name) in enumerate(zip(self.program.placeholders, names, strict=True)):
            value = node.meta.get("val")
            op = self._unused(name)
            size, dtype = _storage_bytes(value), _dtype(value)
            if number < count:
                self.builder.parameter(op, size, dtype=dtype, module=name.rpartition(".")[0])
            else:
                self.builder.add(op, "input", phase="input", output_bytes=size, dtype=dtype)
            self._made(node, op)

    def add_constant(self, node: fx.Node) -> None:
        """A tensor that tracing met and that belongs to no module."""
        value = getattr(self.program.module, str(node.target))
        op = self._unused(node.name)
        self.builder.parameter(op, _storage_bytes(value), dtype=_dtype(value))
        self.op_of[node] = op
        self.made_by[op] = node

    def add_op(self, node: fx.Node) -> None:
        from roost.frontends.tracing import flop as _flop
        from roost.frontends.tracing.trace import BACKWARD, is_getitem

        value = node.meta.get("val")
        made = list(_flop.tensors_in(value))
        if not made:
            return  # an assertion about a tensor: it makes nothing
        inputs = list(
            dict.fromkeys(
                self.op_of[source] for source in node.all_input_nodes if source in self.op_of
            )
        )
        if all(_storage(tensor) in self.maker for tensor in made):
            self.op_of[node] = self.maker[_storage(made[0])]
            return
        modules = node.meta.get("nn_module_stack") or {}
        paths = [_module_path(key, path) for key, (path, _) in modules.items() if key != BACKWARD]
        about: dict[str, Any] = {
            "phase": "backward" if BACKWARD in modules else "forward",
            "module": paths[-1] if paths else "",
            "dtype": _dtype(next((t for t in made if t.is_floating_point()), made[0])),
        }
        op = self._unused(node.name)
        if is_getitem(node):
            producer = self.op_of[node.args[0]]
            self.builder.add(
                op,
                "output",
                [producer],
                output_bytes=_storage_bytes(value),
                group=producer,
                **about,
            )
            self._made(node, op)
            return
        self._check_dtypes(node, about["module"])
        flop, known = _flop.flop_of(node)
        read, written = _flop.bytes_of(node)
        self.count.add(_kind(node), flop, read + written, "formula" if known else "elements")
        several = isinstance(value, tuple | list)
        self.builder.add(
            op,
            _kind(node),
            inputs,
            flop=flop,
            bytes_read=read,
            bytes_written=written,
            output_bytes=0 if several else _storage_bytes(value),
            workspace_bytes=sum(map(_storage_bytes, made)) if several else 0,
            group=op if several else None,
            **about,
        )
        if several:
            self.op_of[node] = op  # its outputs are made by the getitems that follow
            self.made_by[op] = node
        else:
            self._made(node, op)

    def _check_dtypes(self, node: fx.Node, module: str) -> None:
        """Fake tensors multiply what real ones refuse to: a half-precision weight with
        single-precision inputs."""
        from roost.frontends.tracing import flop as _flop

        if not _kind(node).endswith(("mm", "convolution")):
            return
        dtypes = {
            _dtype(tensor)
            for tensor in _flop.tensors_in(_flop.arguments(node))
            if tensor.is_floating_point()
        }
        if len(dtypes) > 1:
            raise InputError(
                f"{_kind(node)} in module {module!r} mixes {' and '.join(sorted(dtypes))}; give "
                "the model and its inputs one type"
            )

    def add_updates(self, optimizer: str) -> None:
        """One op for each parameter that has a gradient, at the end, as an optimizer's step does
        it."""
        states, flop = OPTIMIZERS[optimizer]
        sizes = dict(zip(self.program.residents, self.program.placeholders, strict=False))
        for name, gradient in self.program.gradients.items():
            value = sizes[name].meta["val"]
            size, module, dtype = _storage_bytes(value), name.rpartition(".")[0], _dtype(value)
            kept = [
                self.builder.parameter(
                    self._unused(f"{name}:{state}"), size, module=module, dtype=dtype
                )
                for state in states
            ]
            touched = size * (1 + len(kept))
            op = self._unused(f"{name}:update")
            self.updates[op] = Update(self.op_of[sizes[name]], tuple(kept), gradient)
            self.builder.add(
                op,
                optimizer,
                [self.op_of[sizes[name]], *kept, self.op_of[gradient]],
                flop=flop * value.numel(),
                bytes_read=touched + size,
                bytes_written=touched,
                phase="update",
                module=module,
                dtype=dtype,
            )

    def add_new_values(self) -> None:
        """One op for each buffer that the step changes: the new value goes where the buffer
        lives."""
        holders = dict(zip(self.program.residents, self.program.placeholders, strict=False))
        for name, node in self.program.new_values.items():
            size = _storage_bytes(holders[name].meta["val"])
            op = self._unused(f"{name}:update")
            self.updates[op] = Update(self.op_of[holders[name]], (), node)
            self.builder.add(
                op,
                "copy",
                dict.fromkeys([self.op_of[holders[name]], self.op_of[node]]),
                bytes_read=size,
                bytes_written=size,
                phase="update",
                module=name.rpartition(".")[0],
                dtype=_dtype(holders[name].meta["val"]),
            )

    def _made(self, node: fx.Node, op: str) -> None:
        self.op_of[node] = op
        self.made_by[op] = node
        value: Any = node.meta.get("val")
        if hasattr(value, "untyped_storage"):
            self.maker[_storage(value)] = op

    def _unused(self, name: str) -> str:
        """The name, or with a number where a parameter and an op are called alike."""
        unused, number = name, 1
        while unused in self.taken:
            number += 1
            unused = f"{name}#{number}"
        self.taken.add(unused)
        return unused


def _storage(tensor: Tensor) -> int:
    from torch.multiprocessing.reductions import StorageWeakRef

    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def _storage_bytes(value: Any) -> int:
    """Bytes held for a tensor: what it looks into, which may be less than its shape says, or
    more."""
    return int(value.untyped_storage().nbytes()) if hasattr(value, "untyped_storage") else 0


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else "float32"


def _kind(node: fx.Node) -> str:
    """`aten.conv2d.default` is of kind conv2d."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _module_path(key: str, path: str) -> str:
    """Paths as `state_dict` writes them, and `layer@3` for the fourth call of a module that is
    called several times.

    The export writes some paths as `L['self'].layer`, and has the number of the call in the key
    alone.
    """
    path = path.removeprefix("L['self']").removeprefix(".")
    _, _, call = key.rpartition("@")
    return f"{path}@{call}" if "@" in key and call.isdecimal() else path


@dataclass(frozen=True)
class Torch:
    """Reads models from files and by name."""

    suffixes = (".pt2",)

    def read(
        self,
        source: str | Path,
        *,
        train: bool = False,
        optimizer: str = "sgd",
        name: str | None = None,
    ) -> Graph:
        """The graph of a `.pt2` file, or of what `package.module:callable` returns: a module and
        its inputs."""
        if str(source).endswith(".pt2"):
            return self._read_exported(Path(source), train=train, optimizer=optimizer, name=name)
        model, inputs = load_model(str(source))
        return capture(model, inputs, train=train, optimizer=optimizer, name=name)

    def _read_exported(self, path: Path, *, train: bool, optimizer: str, name: str | None) -> Graph:
        import torch

        from roost.frontends.tracing import trace

        if not path.is_file():
            raise InputError(f"{path}: {'is a directory' if path.is_dir() else 'no such file'}")
        try:
            exported = torch.export.load(str(path))
        except Exception as error:  # a damaged archive fails in many ways
            raise InputError(
                f"{path}: is not a program saved by torch.export.save: {error}"
            ) from error
        program = trace.trace_exported(exported, train=train)
        return describe(program, name or path.stem, optimizer if train else None)[0]


def load_model(source: str) -> tuple[nn.Module, Any]:
    """The module and example inputs that `package.module:callable` returns.

    The callable takes nothing and returns (module, inputs), or a module that has `example_inputs`.
    """
    from torch import nn

    module_name, _, attribute = source.partition(":")
    if not attribute:
        raise InputError(f"{source!r} is not package.module:callable")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules in the working folder
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        made = found() if callable(found) and not isinstance(found, nn.Module) else found
        if isinstance(made, nn.Module) and hasattr(made, "example_inputs"):
            inputs = made.example_inputs
            return made, inputs() if callable(inputs) else inputs
    except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
        raise InputError(f"cannot load {source!r}: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise InputError(
        f"{source!r} gave {type(made).__name__}; it must return (module, example_inputs), or a "
        "module that has example_inputs"
    )
