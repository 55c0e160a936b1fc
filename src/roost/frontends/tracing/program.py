"""A traced step as one functional program: every value is made once and never changed.

`trace` makes it; `captured_step` turns it into a graph, and the runtimes execute it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

BACKWARD = "@roost_backward"  # a mark among the modules of a node that the backward pass made


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step. Placeholders are the residents, in this order, then the inputs."""

    module: fx.GraphModule
    # [residents] names of parameters, buffers and constants, each tensor once.
    residents: tuple[str, ...]
    trainable: tuple[bool, ...]  # [residents]
    tied: Mapping[str, str]  # other names of residents -> the name in `residents`
    constants: Mapping[str, Tensor]  # values of residents that belong to no module
    inputs: tuple[str, ...]  # [inputs]
    results: tuple[fx.Node, ...]  # the outputs of the model
    gradients: Mapping[str, fx.Node]  # resident -> its gradient
    new_values: Mapping[str, fx.Node]  # buffer -> its value after the step
    flags: Mapping[str, Any] = field(default_factory=dict)  # input that is no tensor -> its value

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of residents and inputs."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def resident_nodes(self) -> dict[str, fx.Node]:
        """The placeholder of each resident."""
        return dict(zip(self.residents, self.placeholders, strict=False))

    @property
    def input_nodes(self) -> dict[str, fx.Node]:
        """The placeholder of each input."""
        return dict(zip(self.inputs, self.placeholders[len(self.residents) :], strict=True))

    def run(
        self, residents: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """Execute on one device: the results, and gradients and new buffer values by resident."""
        with torch.no_grad():
            outputs = iter(self.module(*residents, *inputs))
        results = [next(outputs) for _ in self.results]
        changed = {f"gradient of {name}": next(outputs) for name in self.gradients}
        return results, changed | {name: next(outputs) for name in self.new_values}


def is_getitem(node: fx.Node) -> bool:
    """Tell whether a node takes one of the outputs of another."""
    return node.op == "call_function" and node.target is operator.getitem
