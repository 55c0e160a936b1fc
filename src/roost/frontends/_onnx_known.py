"""Everything known so far about the tensors of one ONNX model: types, shapes and small values.

`_onnx_shapes` fills it node by node, and `_onnx_unroll` reads conditions and trip counts from it.
Small values are constants, values that follow from shapes, and values that the caller gave.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError
from roost.frontends.tracing.tensors import Tensor

log = logging.getLogger(__name__)

STANDARD = ("", "ai.onnx")
# The types of values that are followed. Scales and ranges need floats.
_FOLLOWED = frozenset(("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"))
_MOST_ELEMENTS = 1024
_RANDOM = frozenset(("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"))


@dataclass
class Known:
    """The types, shapes and small values of the tensors of a model, by name."""

    onnx: Any
    where: str  # the file, for errors
    versions: dict[str, int]  # opset of each domain
    given: dict[str, Array]  # values from the caller
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)

    def label(self, node: Any) -> str:
        """The name of a node in errors."""
        return f"node {node_name(node)!r} ({node.op_type})"

    def attributes(self, node: Any) -> dict[str, Any]:
        """The numbers and texts among the attributes of a node."""
        plain = ("INT", "INTS", "FLOAT", "FLOATS", "STRING")
        types = self.onnx.AttributeProto.AttributeType
        values = {}
        for attribute in node.attribute:
            if types.Name(attribute.type) in plain:
                value = self.onnx.helper.get_attribute_value(attribute)
                is_text = isinstance(value, bytes)
                values[attribute.name] = value.decode(errors="replace") if is_text else value
        return values

    def keep(self, name: str, tensor: Any) -> None:
        """Note the value of a small tensor, unless its data lies in another file."""
        if self.is_external(tensor) or not _is_small(self.tensors[name]):
            return
        try:
            self.values[name] = self.onnx.numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:  # fewer or more bytes than its shape needs
            raise InputError(
                f"{self.where}: tensor {name!r} is damaged ({error}); save the model again"
            ) from None

    def is_external(self, tensor: Any) -> bool:
        return bool(tensor.data_location == self.onnx.TensorProto.EXTERNAL)

    def keep_given(self, names: Sequence[str]) -> None:
        """Note the values that the caller gave for these tensors."""
        for name in names:
            if name in self.given:
                tensor = self.tensors[name]
                if not _is_small(tensor):
                    raise InputError(
                        f"{self.where}: the value of {name!r} cannot be given: it must have at "
                        f"most {_MOST_ELEMENTS} numbers, of a plain type and not {tensor.dtype}"
                    )
                self.values[name] = self.given[name].astype(np.dtype(tensor.dtype))

    def follow(self, node: Any) -> None:
        """Note the values of a node's outputs if they are small and follow from known values."""
        outputs = [self.tensors[name] for name in node.output if name in self.tensors]
        names = [name for name in node.input if name]
        if (
            node.domain not in STANDARD
            or not all(map(_is_small, outputs))
            or node.op_type in _RANDOM
        ):
            return
        if node.op_type == "Shape":
            bounds = self.attributes(node)
            shape = self.tensors[names[0]].shape[bounds.get("start", 0) : bounds.get("end")]
            self.values[node.output[0]] = np.array(shape, dtype=np.int64)
        elif node.op_type == "Size":
            self.values[node.output[0]] = np.array(self.tensors[names[0]].elements, dtype=np.int64)
        elif node.op_type == "Constant":
            for attribute in node.attribute:
                self._follow_constant(node, attribute)
        elif names and all(name in self.values for name in names):
            self._evaluate(node, names)

    def _follow_constant(self, node: Any, attribute: Any) -> None:
        name = node.output[0]
        if attribute.name == "value":
            self.keep(name, attribute.t)
        elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
            dtype = np.dtype(self.tensors[name].dtype)
            self.values[name] = np.array(
                self.onnx.helper.get_attribute_value(attribute), dtype=dtype
            )

    def _evaluate(self, node: Any, names: list[str]) -> None:
        helper = self.onnx.helper
        outputs = [name for name in node.output if name]
        empty = helper.make_empty_tensor_value_info
        graph = helper.make_graph(
            [node], "fold", [*map(empty, dict.fromkeys(names))], [*map(empty, outputs)]
        )
        try:
            evaluator = import_module("onnx.reference").ReferenceEvaluator(
                graph, opsets=self.versions
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a division by zero, say
                values = evaluator.run(None, {name: self.values[name] for name in names})
        except Exception as error:  # an op that the reference does not run: its value stays unknown
            log.debug("%s: %s could not be evaluated: %s", self.where, self.label(node), error)
            return
        for name, value in zip(outputs, values, strict=True):
            # A value of another shape than inferred would lead to wrong shapes.
            is_array = isinstance(value, np.ndarray | np.generic)
            if is_array and name in self.tensors and np.shape(value) == self.tensors[name].shape:
                self.values[name] = np.asarray(value, dtype=np.dtype(self.tensors[name].dtype))


def node_name(node: Any) -> str:
    """The name of a node, else of its first output."""
    return str(node.name or next(filter(None, node.output), node.op_type))


def _is_small(tensor: Tensor) -> bool:
    return tensor.elements <= _MOST_ELEMENTS and tensor.dtype in _FOLLOWED
