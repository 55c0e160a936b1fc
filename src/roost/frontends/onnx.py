"""ONNX: a `.onnx` file to a Graph.

Only shapes and types are read: weights in other files are never opened. Initializers and constants
become parameters. Views are not ops: an op that reads a view reads the tensor behind it. A node
with several outputs becomes one op, plus a free op for each output that is used. They share a
group, so each output can go where it is needed. Nodes that no output depends on are left out.
Control flow is written out: see `_onnx_unroll`.
"""

from __future__ import annotations

import ast
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.core import files
from roost.core.arrays import Array
from roost.core.graph import Graph, GraphBuilder
from roost.errors import InputError, MissingExtra
from roost.frontends._onnx_flop import COSTS, QUANTISED, SHAPE_ONLY
from roost.frontends._onnx_known import STANDARD, node_name
from roost.frontends._onnx_shapes import DTYPES, Shapes
from roost.frontends.tracing.op_costs import OpCall
from roost.frontends.tracing.tensors import Count, Coverage, Names, Tensor

log = logging.getLogger(__name__)

_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
_SCOPES = "pkg.torch.onnx.name_scopes"  # PyTorch's exporter notes the modules of a node here
_MOST_SETTING_ELEMENTS = 16


@dataclass(frozen=True)
class Onnx:
    """Reads ONNX models.

    With `fold`, a few numbers that follow from constants and shapes (the axes of a slice, the shape
    of an expand) are part of the op that takes them, like attributes. The nodes that compute them
    are left out. Without `fold` they are ops and small parameters like any other.
    """

    fold: bool = True

    suffixes = (".onnx",)

    def read(
        self,
        source: str | Path,
        *,
        inputs: Mapping[str, Sequence[int] | Array] | None = None,
        name: str | None = None,
    ) -> Graph:
        """The graph of a model.

        `inputs` gives the shapes that the file leaves open. An array in it is a value: it decides
        an `If` or the length of a loop.
        """
        return self._read(Path(source), inputs, name)[0]

    def coverage(
        self, source: str | Path, *, inputs: Mapping[str, Sequence[int] | Array] | None = None
    ) -> Coverage:
        """The shares of a model's costs that come from formulas."""
        return self._read(Path(source), inputs, None)[1]

    def _read(
        self, path: Path, inputs: Mapping[str, Sequence[int] | Array] | None, name: str | None
    ) -> tuple[Graph, Coverage]:
        try:
            onnx = importlib.import_module("onnx")
        except ImportError as error:
            raise MissingExtra("onnx", "onnx") from error
        model = _load(onnx, path)
        shapes = Shapes(onnx, model, inputs or {}, str(path))
        writer = _OnnxWriter(shapes, name or path.stem, self.fold)
        writer.add_all()
        coverage = writer.count.coverage()
        if coverage.unknown_kinds:
            log.info("%s: costs are guessed for %s", path, ", ".join(coverage.unknown_kinds))
        return writer.builder.freeze(), coverage


def _load(onnx: Any, path: Path) -> Any:
    """The model in a file, with its functions inlined; data in other files stays unread."""
    data = files.read_bytes(path)
    if data.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: is a Git LFS pointer and not the model itself; run git lfs pull")
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as error:  # DecodeError, from whichever protobuf is installed
        raise InputError(
            f"{path}: is not an ONNX model, or not a whole one ({error}); export it again"
        ) from None
    if not model.opset_import or not (model.graph.node or model.graph.output):
        raise InputError(
            f"{path}: is not an ONNX model, or not a whole one (no graph and opset); export it "
            "again"
        )
    if (damaged := next(_damaged_texts(model), None)) is not None:
        field, text = damaged
        raise InputError(
            f"{path}: a text of the model is not UTF-8 ({field}: {text[:40]!r}); the file is "
            "damaged, export it again"
        )
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in STANDARD and not 1 <= entry.version <= newest:
            raise InputError(
                f"{path}: is written in opset {entry.version}; the onnx installed here reads 1 to "
                f"{newest}: update it (pip install -U onnx), or export the model with an older "
                "opset_version"
            )
    if model.functions:
        try:
            inliner = importlib.import_module("onnx.inliner")
            model = inliner.inline_local_functions(model)
        except Exception as error:  # the C++ side raises several kinds
            raise InputError(
                f"{path}: the functions in this model cannot be inlined: {error}"
            ) from error
    return model


def _damaged_texts(message: Any) -> Iterator[tuple[str, bytes]]:
    """The texts of a message that are not UTF-8, by field. Protobuf returns them as bytes."""
    for field, value in message.ListFields():
        if field.name == "doc_string":  # nobody reads it
            continue
        values = (
            [value] if isinstance(value, str | bytes) or hasattr(value, "ListFields") else value
        )
        if field.type == field.TYPE_STRING:
            yield from ((field.name, text) for text in values if isinstance(text, bytes))
        elif field.type == field.TYPE_MESSAGE:
            for part in values:
                yield from _damaged_texts(part)


class _OnnxWriter:
    """Adds the nodes of a model to a graph one by one."""

    def __init__(self, shapes: Shapes, name: str, fold: bool) -> None:
        self.shapes = shapes
        self.fold = fold
        self.graph = shapes.graph
        self.builder = GraphBuilder(name)
        self.op_of: dict[str, str] = {}  # tensor -> the op of it, or of the tensor it views
        self.names = Names()
        self.count = Count()
        self.needed = self._needed()

    def add_all(self) -> None:
        for name in self.shapes.input_names:
            self.op_of[name] = self._add_input(name)
        sparse = {entry.values.name: entry for entry in self.graph.sparse_initializer}
        for name in (*(tensor.name for tensor in self.graph.initializer), *sparse):
            if name in self.needed:
                dense_bytes = self.shapes.tensors[name].bytes
                size = _sparse_bytes(sparse[name]) if name in sparse else dense_bytes
                self._add_parameter(name, size)
        for node in self.shapes.nodes:
            if self.needed.isdisjoint(node.output):
                continue
            if self._is_view(node):
                self.op_of[node.output[0]] = self.op_of[node.input[0]]
            elif node.op_type == "Constant":
                self._add_parameter(node.output[0], self.shapes.tensors[node.output[0]].bytes)
            else:
                self._add_node(node)

    def _needed(self) -> set[str]:
        """The tensors that an output of the model depends on."""
        needed = set(self.shapes.output_names)
        for node in reversed(self.shapes.nodes):
            if not needed.isdisjoint(node.output):
                needed.update(self._read_by(node))
        return needed

    def _read_by(self, node: Any) -> list[str]:
        """The tensors that a node reads, each once."""
        if self._is_view(node):
            return [node.input[0]]
        if node.op_type.lower() in SHAPE_ONLY:
            return []
        names = dict.fromkeys(name for name in node.input if name)
        return [name for name in names if not (self.fold and self._is_setting(name))]

    def _is_setting(self, name: str) -> bool:
        tensor = self.shapes.tensors[name]
        few = tensor.elements <= _MOST_SETTING_ELEMENTS and not tensor.is_float
        return name in self.shapes.values and (few or tensor.shape == ())

    def _is_view(self, node: Any) -> bool:
        if node.domain not in STANDARD:
            return False
        if node.op_type == "Dropout":  # outside training its output is its input
            mask_used = len(node.output) > 1 and node.output[1] in self.shapes.used
            training = node.input[2] if len(node.input) > 2 else ""
            return not mask_used and (not training or not self.shapes.values.get(training, True))
        return node.op_type in _VIEWS

    def _add_input(self, name: str) -> str:
        tensor = self.shapes.tensors[name]
        op = self.names.unused(name)
        return self.builder.add(
            op, "input", phase="input", output_bytes=tensor.bytes, dtype=tensor.dtype
        )

    def _add_parameter(self, name: str, size: int) -> None:
        traits = {"dtype": self.shapes.tensors[name].dtype, "module": _module_path(name)}
        self.op_of[name] = self.builder.parameter(self.names.unused(name), size, **traits)

    def _add_node(self, node: Any) -> None:
        call = self.shapes.call(node, self.needed)
        kind = node.op_type.lower()
        if node.domain not in STANDARD:
            kind = f"{node.domain.lower()}.{kind}"
        flop, read, written, counted = self._costs(node, call, kind)
        op = self.names.unused(node_name(node))
        outputs = zip(node.output, call.outputs, strict=True)
        used = {name: tensor for name, tensor in outputs if tensor is not None}
        several = len(used) > 1
        module = _scope(node) or _module_path(node.name)
        group = op if several else None
        self.builder.add(
            op,
            kind,
            dict.fromkeys(self.op_of[name] for name in self._read_by(node)),
            flop=flop,
            bytes_read=read,
            bytes_written=written,
            output_bytes=0 if several else written,
            workspace_bytes=written if several else 0,
            counted=counted,
            dtype="int8" if call.op in QUANTISED else _dtype(list(used.values())),
            module=module,
            group=group,
        )
        for number, name in enumerate(node.output):
            if name not in used:
                continue
            self.op_of[name] = op
            if several:
                self.op_of[name] = self.builder.add(
                    self.names.unused(f"{op}/{number}"),
                    "output",
                    [op],
                    output_bytes=used[name].bytes,
                    dtype=used[name].dtype,
                    module=module,
                    group=group,
                )

    def _costs(self, node: Any, call: OpCall, kind: str) -> tuple[float, int, int, bool]:
        try:
            flop, source = COSTS.flop(call)
            read, written = COSTS.bytes(call)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            label = self.shapes.label(node)
            raise InputError(
                f"{self.shapes.where}: {label} does not fit its inputs: {error!r}"
            ) from error
        self.count.add(kind, flop, read + written, source)
        return flop, read, written, source != "formula"


def _sparse_bytes(sparse: Any) -> int:
    """Bytes of a sparse tensor: its values and their indices."""
    parts = (sparse.values, sparse.indices)
    return sum(Tensor(DTYPES[part.data_type], tuple(part.dims)).bytes for part in parts)


def _dtype(outputs: list[Tensor]) -> str:
    """The type an op computes in: that of its first float output, else of its first output."""
    return next((tensor for tensor in outputs if tensor.is_float), outputs[0]).dtype


def _scope(node: Any) -> str:
    """The module of a node, from PyTorch's note "['', 'layer1', 'layer1.0', 'conv2d']"."""
    note = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        scopes = ast.literal_eval(note) if note else []
    except (SyntaxError, ValueError):
        return ""
    scope = str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    return "" if scope.startswith("_empty_nn_module_stack") else scope


def _module_path(name: str) -> str:
    """The module of a name: layer1.conv1 for `/layer1/conv1/Conv` or `layer1.conv1.weight`."""
    if "/" in name:
        return ".".join(name.strip("/").split("/")[:-1])
    return name.rpartition(".")[0]
