"""The type and shape of every tensor of an ONNX graph, and the values that follow from shapes.

Works node by node, with onnx's own inference function of each op and the values known so far: small
constants, and values computed from shapes. Inference over a whole model knows fewer values and
copies the weights.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError, UnknownName, UnsupportedOp
from roost.frontends import _onnx_contrib
from roost.frontends._onnx_known import STANDARD, Known
from roost.frontends._onnx_unroll import Unroll, bodies, names_in
from roost.frontends.tracing.op_costs import OpCall
from roost.frontends.tracing.tensors import Declared, Dimension, Shape, Tensor, fixed_shapes

_DTYPE_NAMES = """
    float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64
    complex64 complex128 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz uint4
    int4 float4_e2m1 float8_e8m0 uint2 int2 float6_e2m3 float6_e3m2
"""
DTYPES = dict(enumerate(_DTYPE_NAMES.split(), 1))  # by the number that ONNX gives them
_CODES = {name: code for code, name in DTYPES.items()}

# Exporters write these for a size that they do not know: two such sizes may differ.
_NO_NAME = re.compile(r"[\W\d_]*|(unk|unknown|none|dynamic)_*\d*", re.IGNORECASE)


class Shapes:
    """The types, shapes and known values of the tensors of a model."""

    def __init__(
        self, onnx: Any, model: Any, given: Mapping[str, Sequence[int] | Array], where: str
    ) -> None:
        self.onnx = onnx
        self.graph = model.graph
        self.where = where
        versions = {_domain(entry.domain): entry.version for entry in model.opset_import}
        values = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        self.known = Known(onnx, where, versions, values)
        self.tensors = self.known.tensors
        self.values = self.known.values
        self.versions = versions
        self.opset_imports = list(model.opset_import)
        # `used`: tensors that a node reads or the model returns; no other needs a shape.
        made, self.used = names_in(self.graph)
        self._add_initializers()
        self.input_names = [
            entry.name for entry in self.graph.input if entry.name not in self.tensors
        ]
        shapes = {
            name: shape.shape if isinstance(shape, np.ndarray) else shape
            for name, shape in given.items()
        }
        self.given = {name: shape for name, shape in shapes.items() if name not in self.input_names}
        for name in self.given:
            if name not in made:
                raise UnknownName(f"input of {where}", name, self.input_names)
        self.sizes = self._add_inputs(
            {name: shape for name, shape in shapes.items() if name in self.input_names}
        )
        self.known.keep_given(self.input_names)
        outer = {name for node in self.graph.node for name in node.output}
        self.unroll = Unroll(self.known, outer.union(self.tensors), self.used)
        self.unroll.declared.update(
            (entry.name, entry.type) for entry in (*self.graph.value_info, *self.graph.output)
        )
        self.declared = self.unroll.declared
        self.nodes: list[Any] = []  # without control flow and sequences
        for node in self.graph.node:
            self._check_inputs(node)
            for plain in self.unroll.plain(node):
                self._add_node(plain)
                self.nodes.append(plain)
        self.output_names = [
            name for entry in self.graph.output for name in self.unroll.tensor_names(entry.name)
        ]

    def call(self, node: Any, used: Container[str] = ()) -> OpCall:
        """A node with its input tensors and its used outputs."""
        kind = (_domain(node.domain), node.op_type)
        return OpCall(
            "packedattention" if kind == ("com.microsoft", "Attention") else node.op_type.lower(),
            self.known.attributes(node),
            tuple(self.tensors[name] if name else None for name in node.input),
            tuple(self.tensors[name] if name in used else None for name in node.output),
        )

    def label(self, node: Any) -> str:
        """The name of a node in errors."""
        return self.known.label(node)

    def _add_initializers(self) -> None:
        for tensor in self.graph.initializer:
            self.tensors[tensor.name] = self._tensor_of(tensor)
            self.known.keep(tensor.name, tensor)
        for sparse in self.graph.sparse_initializer:
            values = self._tensor_of(sparse.values)
            self.tensors[sparse.values.name] = Tensor(values.dtype, tuple(sparse.dims))

    def _tensor_of(self, tensor: Any) -> Tensor:
        return Tensor(self._dtype(tensor.data_type, tensor.name), tuple(tensor.dims))

    def _dtype(self, code: int, name: str) -> str:
        if code not in DTYPES:
            raise InputError(
                f"{self.where}: tensor {name!r} has no known type ({code}); save the model again"
            )
        return DTYPES[code]

    def _add_inputs(self, given: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Fix the shape of every input; returns the sizes of named dimensions."""
        types = {
            entry.name: _present(entry.type)
            for entry in self.graph.input
            if entry.name in self.input_names
        }
        for name, declared in types.items():
            if declared.WhichOneof("value") != "tensor_type":
                raise UnsupportedOp(
                    f"{self.where}: input {name!r} is not a tensor but a {_type_name(declared)}; "
                    "export a model that takes tensors"
                )
        shapes, sizes = fixed_shapes(
            {n: self._declared(t) for n, t in types.items()}, given, self.where
        )
        for name, shape in shapes.items():
            self.tensors[name] = Tensor(self._dtype(types[name].tensor_type.elem_type, name), shape)
        return sizes

    def _declared(self, declared: Any) -> Declared:
        tensor = declared.tensor_type
        return tuple(map(_dimension, tensor.shape.dim)) if tensor.HasField("shape") else None

    def _check_inputs(self, node: Any) -> None:
        for name in node.input:
            if name and name not in self.tensors and name not in self.unroll.sequences:
                raise InputError(
                    f"{self.where}: {self.label(node)} takes {name!r}, which no node before it "
                    "makes; the file is damaged or out of order, save it again"
                )

    def _add_node(self, node: Any) -> None:
        self._check_inputs(node)
        sequence = next((name for name in node.input if name in self.unroll.sequences), None)
        if sequence is not None:
            raise UnsupportedOp(
                f"{self.where}: {self.label(node)} takes {sequence!r}, a sequence and not a "
                "tensor; export the model without it"
            )
        if bodies(node) and node.op_type not in _onnx_contrib.WITH_BODY:
            raise UnsupportedOp(
                f"{self.where}: {self.label(node)} holds a graph, and Roost does not know how "
                "often that runs; export the model without it"
            )
        made = self._outputs_of(node)
        for name in filter(None, node.output):
            if name in self.tensors:
                raise InputError(
                    f"{self.where}: two nodes make {name!r}; the file is damaged, save it again"
                )
            if made.get(name) is not None:
                self.tensors[name] = made[name]
            elif name in self.used:
                raise InputError(self._unknown_shape(node, name))
        self.known.follow(node)
        self.known.keep_given([name for name in node.output if name in self.tensors])

    def _unknown_shape(self, node: Any, name: str) -> str:
        external = [
            tensor.name
            for tensor in self.graph.initializer
            if tensor.name in node.input
            and self.known.is_external(tensor)
            and self.tensors[tensor.name].dtype == "int64"
        ]
        why = "does not follow from the shapes of the inputs"
        if external:
            why = f"is in {external[0]!r}, whose data lies in another file, which is not read"
        advice = ""
        if deciding := next(self._deciding(), None):
            advice = f", or the value of an input that decides it: --input {deciding}==VALUE"
        return (
            f"{self.where}: the shape of {name!r}, made by {self.label(node)}, {why}; give it as "
            f"you give those of inputs: --input {name}=..., one number for each dimension{advice}"
        )

    def _deciding(self) -> Iterator[str]:
        """Inputs of a few whole numbers, such as axes and sizes."""
        for name in self.input_names:
            tensor = self.tensors[name]
            if name not in self.values and tensor.elements <= 8 and not tensor.is_float:
                yield name

    def _outputs_of(self, node: Any) -> dict[str, Tensor]:
        """The outputs: given, else inferred, else by our own rules, else as declared."""
        tensors = self._inferred(node)
        missing = [name for name in node.output if name and name not in tensors]
        by_rule = self._by_rule(node) if missing else {}
        for name in missing:
            tensor = by_rule.get(name) or self._as_declared(name)
            if tensor is not None:
                tensors[name] = tensor
        for name in node.output:
            if name in self.given:
                tensors[name] = self._as_given(node, name, tensors.get(name))
        return tensors

    def _by_rule(self, node: Any) -> dict[str, Tensor | None]:
        try:
            outputs = _onnx_contrib.outputs_of(self.call(node))
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.where}: {self.label(node)} does not fit its inputs: {error!r}"
            ) from error
        return dict(zip(node.output, outputs, strict=False))

    def _as_given(self, node: Any, name: str, inferred: Tensor | None) -> Tensor:
        declared = {name: None if inferred is None else inferred.shape}
        shapes, _ = fixed_shapes(declared, {name: self.given[name]}, self.where)
        return inferred or Tensor(self._known_dtype(node, name), shapes[name])

    def _known_dtype(self, node: Any, name: str) -> str:
        """The type of an output with a given shape: inferred, declared, or the first input's."""
        code = self._inferred_types(node).get(name, self.declared.get(name))
        if code is not None and code.tensor_type.elem_type:
            return self._dtype(code.tensor_type.elem_type, name)
        return self.tensors[node.input[0]].dtype if node.input and node.input[0] else "float32"

    def _inferred(self, node: Any) -> dict[str, Tensor]:
        tensors = {}
        for name, inferred in self._inferred_types(node).items():
            if not name:
                continue
            if inferred.WhichOneof("value") not in ("tensor_type", None):
                raise UnsupportedOp(
                    f"{self.where}: {self.label(node)} makes {name!r}, a {_type_name(inferred)} "
                    "and not a tensor; export the model without it"
                )
            declared = self._declared(inferred)
            if declared is not None and all(isinstance(dimension, int) for dimension in declared):
                dtype = self._dtype(inferred.tensor_type.elem_type, name)
                tensors[name] = Tensor(dtype, _ints(declared))
        return tensors

    def _inferred_types(self, node: Any) -> dict[str, Any]:
        schema = self._schema(node)
        if schema is None:
            return {}
        helper = self.onnx.helper
        types, data = {}, {}
        for name in filter(None, node.input):
            tensor, value = self.tensors[name], self.values.get(name)
            shape = tensor.shape
            if node.op_type == "Range" and shape == (1,):  # runtimes take it; inference does not
                shape = ()
            types[name] = helper.make_tensor_type_proto(_CODES[tensor.dtype], shape)
            if value is not None:
                data[name] = self.onnx.numpy_helper.from_array(value.reshape(shape), name)
        try:
            inferred: dict[str, Any] = self.onnx.shape_inference.infer_node_outputs(
                schema, _fitted(node, schema), types, data, opset_imports=self.opset_imports
            )
        except Exception as error:  # the C++ side raises several kinds, all about this node
            shapes = ", ".join(f"{name} {list(self.tensors[name].shape)}" for name in types)
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"{self.where}: {self.label(node)} does not fit its inputs ({shapes}): {reason}"
            ) from None
        return inferred

    def _schema(self, node: Any) -> Any | None:
        domain = _domain(node.domain)
        op = node.op_type
        if op.lower() in _onnx_contrib.ALIKE:
            domain = ""
            op = _onnx_contrib.ALIKE[op.lower()]
        try:
            return self.onnx.defs.get_schema(op, self.versions.get(domain, 1), domain)
        except self.onnx.defs.SchemaError:
            if domain in STANDARD and not _onnx_contrib.knows(op.lower()):
                raise InputError(
                    f"{self.where}: opset {self.versions.get('', 1)} has no op called {op!r} "
                    f"({self.label(node)}); export the model with another opset_version"
                ) from None
        return None

    def _as_declared(self, name: str) -> Tensor | None:
        """A tensor as the file declares it, if its named dimensions are known."""
        declared = self.declared.get(name)
        if declared is None or declared.WhichOneof("value") != "tensor_type":
            return None
        dimensions = self._declared(declared)
        if dimensions is None:
            return None
        shape = tuple(self.sizes.get(d) if isinstance(d, str) else d for d in dimensions)
        if any(size is None for size in shape):
            return None
        return Tensor(self._dtype(declared.tensor_type.elem_type, name), _ints(shape))


def _domain(domain: str) -> str:
    return "" if domain in STANDARD else domain


def _fitted(node: Any, schema: Any) -> Any:
    """The node without the attributes and last inputs that its schema lacks.

    Inference refuses them. They change no shape: a fused op has the schema of the op it extends.
    """
    fitted = type(node)()
    fitted.CopyFrom(node)
    del fitted.attribute[:]
    fitted.attribute.extend(each for each in node.attribute if each.name in schema.attributes)
    del fitted.input[schema.max_input :]
    return fitted


def _dimension(dimension: Any) -> Dimension:
    if dimension.HasField("dim_value") and dimension.dim_value >= 0:
        return int(dimension.dim_value)
    name = str(dimension.dim_param)
    return None if _NO_NAME.fullmatch(name) else name


def _ints(shape: tuple[Dimension, ...]) -> Shape:
    return tuple(int(size) for size in shape)  # type: ignore[arg-type]


def _present(declared: Any) -> Any:
    """The type of an input; an optional input counts as present."""
    while declared.WhichOneof("value") == "optional_type":
        declared = declared.optional_type.elem_type
    return declared


def _type_name(declared: Any) -> str:
    name = str(declared.WhichOneof("value") or "value of no type")
    return name.removesuffix("_type").replace("_", " ")
