"""The inputs of an exported program: residents, each once, then the inputs of the caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram

from roost.errors import InputError


class Residents:
    """The tensors of an exported program that stay from step to step, each once.

    A tied weight has several names; `names` has the first, `tied` the others.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        signature = exported.graph_signature
        owned = signature.inputs_to_parameters | signature.inputs_to_buffers
        lifted = signature.inputs_to_lifted_tensor_constants
        tensors = {**dict(exported.named_parameters()), **dict(exported.named_buffers())}
        self.names: list[str] = []
        self.fakes: list[Tensor] = []
        self.trainable: list[bool] = []
        self.tied: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        # [placeholders of the exported graph] index among residents, then inputs.
        self.slots: list[int] = []
        index: dict[int, int] = {}  # id of a tensor -> its resident
        inputs = 0
        for node in _placeholders(exported):
            name = owned.get(node.name) or lifted.get(node.name)
            if name is None:
                self.slots.append(-1 - inputs)
                inputs += 1
                continue
            constant = node.name in lifted or name not in tensors
            tensor = exported.constants[name] if constant else tensors[name]
            if id(tensor) in index:
                self.tied[name] = self.names[index[id(tensor)]]
            else:
                index[id(tensor)] = len(self.names)
                self.names.append(name)
                self.fakes.append(node.meta["val"])
                learns = node.name in signature.inputs_to_parameters and tensor.requires_grad
                self.trainable.append(learns)
                if node.name in lifted:
                    self.constants[name] = tensor
            self.slots.append(index[id(tensor)])
        self.slots = [slot if slot >= 0 else len(self.names) - 1 - slot for slot in self.slots]


def user_inputs(exported: ExportedProgram) -> list[fx.Node]:
    """The placeholders of the caller's inputs."""
    signature = exported.graph_signature
    residents = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    return [node for node in _placeholders(exported) if node.name not in residents]


def check_fixed_shapes(exported: ExportedProgram) -> None:
    """Raise if an input has a dynamic shape."""
    for node in _placeholders(exported):
        shape = getattr(node.meta.get("val"), "shape", ())
        if not all(isinstance(size, int) for size in shape):
            raise InputError(
                f"input {node.name!r} has the dynamic shape {list(shape)}; export with fixed shapes"
            )


def drop_flags(
    module: fx.GraphModule, exported: ExportedProgram, num_residents: int
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Remove the inputs that are no tensors; return the names of the others, and their values.

    Tracing has read a flag once and for all, so the program holds for its value only.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    names = []
    flags = {}
    for node, given in zip(placeholders[num_residents:], user_inputs(exported), strict=True):
        if isinstance(given.meta.get("val"), Tensor):
            names.append(given.name)
        elif not node.users:
            module.graph.erase_node(node)
            flags[given.name] = given.meta.get("val")
        else:
            raise InputError(
                f"input {given.name!r} is not a tensor, and the model computes with it; make it a "
                "tensor"
            )
    return tuple(names), flags


def _placeholders(exported: ExportedProgram) -> list[fx.Node]:
    return [node for node in exported.graph.nodes if node.op == "placeholder"]
