"""The modules of a graph, and which of them other tools must keep whole.

Tools that place modules move what a module is called with to the module's device, and nothing else.
So where the code of a module itself brings together what it was called with and what its parts
returned (a residual connection), its parts must be on one device with it: it is a *block*. Where it
brings together what only its parts returned, those parts must share a device: they *meet*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, INPUT, PARAMETER, Graph
from roost.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_CONSTANT = re.compile(r"(_?tensor_constant|lifted_tensor)_?\d*")


class Modules:
    """The tree of modules of a graph. With the model itself, tied weights, buffers and idle modules
    are known too."""

    def __init__(self, graph: Graph, model: nn.Module | None = None) -> None:
        self.graph = graph
        # [ops] without the number of the call.
        self.path = [re.sub(r"@\d+", "", module) for module in graph.modules]
        self.tensors: dict[str, list[str]] = {}  # module -> its own parameters and buffers
        self.op_of: dict[str, int] = {}  # tensor, by any of its names -> its op
        self.buffers: set[str] = set()
        self._read(model)
        names = dict.fromkeys(["", *(model_names(model)), *self.tensors, *self.path])
        self.children: dict[str, list[str]] = {"": []}
        for name in names:
            self._add(name)
        if model is None:
            self._guess_ties()
        self.is_block = dict.fromkeys(self.children, False)
        for op in self._own_ops():
            sources = self.data_inputs(op, also=INPUT)
            outside = [source for source in sources if not within(self.path[source], self.path[op])]
            if len(sources) > 1 and outside and self.path[op]:
                self.is_block[self.path[op]] = True

    def _read(self, model: nn.Module | None) -> None:
        graph = self.graph
        trained = np.flatnonzero(graph.phase == BACKWARD)
        if len(trained):
            raise InputError(
                f"exports are for inference, and graph {graph.name!r} is of a training step (op "
                f"{graph.op_names[int(trained[0])]!r}); place the model without training"
            )
        parameters = {
            name: op for op, name in enumerate(graph.op_names) if graph.phase[op] == PARAMETER
        }
        if model is None:
            for name, op in parameters.items():
                if not _CONSTANT.fullmatch(name):
                    self._tensor(name, op)
            return
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        first: dict[int, str] = {}
        for name, value in named.items():
            if name in parameters:
                first.setdefault(id(value), name)
        missing = next(
            (n for n in parameters if "." in n and n not in named and not _CONSTANT.fullmatch(n)),
            None,
        )
        known = set(model_names(model))
        strange = next((path for path in self.path if path not in known), None)
        if missing is not None or strange is not None:
            what = f"tensor {missing!r}" if missing is not None else f"module {strange!r}"
            raise InputError(f"graph {graph.name!r} is not of this model: the model has no {what}")
        for name, value in named.items():
            self._tensor(name, parameters[first[id(value)]] if id(value) in first else -1)

    def _guess_ties(self) -> None:
        """A module without a tensor of its own that reads another's has it too, by a name that no
        graph tells."""
        bare = {module for module, parts in self.children.items() if module and not parts} - set(
            self.tensors
        )
        owned = {op: name for name, op in self.op_of.items()}
        for op in self.forward_ops().tolist():
            for source in self.graph.inputs_of(op).tolist() if self.path[op] in bare else []:
                name = owned.get(source, "")
                if name and not within(self.path[op], name.rpartition(".")[0]):
                    self._tensor(f"{self.path[op]}.{name.rpartition('.')[2]}", source)

    def _tensor(self, name: str, op: int) -> None:
        known = self.tensors.setdefault(name.rpartition(".")[0], [])
        if name not in known:
            known.append(name)
        if op >= 0:
            self.op_of[name] = op

    def _add(self, name: str) -> None:
        if name and name not in self.children:
            parent = name.rpartition(".")[0]
            self._add(parent)
            self.children[parent].append(name)
        self.children.setdefault(name, [])

    def _own_ops(self) -> Iterator[int]:
        """Ops that the code of a module with parts runs itself."""
        for op in range(self.graph.num_ops):
            if self.graph.phase[op] == FORWARD and self.children[self.path[op]]:
                yield op

    def data_inputs(self, op: int, also: int = FORWARD) -> list[int]:
        """What an op reads of the phases `forward` and `also`; outputs of one op count once."""
        found: dict[int, None] = {}
        for source in self.graph.inputs_of(op).tolist():
            if self.graph.kinds[source] == "output":
                source = int(self.graph.inputs_of(source)[0])
            if self.graph.phase[source] in (FORWARD, also):
                found[source] = None
        return list(found)

    @cached_property
    def unit(self) -> list[str | None]:
        """[ops] the block, or the module without parts, that it runs with; None where it follows
        from no module."""
        found: list[str | None] = []
        for op in range(self.graph.num_ops):
            own = self.unit_of_module(self.path[op])
            if own is None and self.graph.phase[op] == FORWARD:
                sources = (found[source] for source in self.data_inputs(op))
                own = next((unit for unit in sources if unit is not None), None)
            found.append(own if self.graph.phase[op] == FORWARD else None)
        return found

    def unit_of_module(self, module: str) -> str | None:
        """The outermost block around a module, or itself where it has no parts."""
        for path in ancestors(module):
            if self.is_block.get(path):
                return path
        return module if not self.children.get(module) and module else None

    def meetings(self) -> Iterator[tuple[str, str, int]]:
        """Two units, and the op outside of both that reads from both, or a unit and an op that
        reads its weight."""
        unit = self.unit
        for op in self._own_ops():
            if self.unit_of_module(self.path[op]) is not None:
                continue
            units = list(
                dict.fromkeys(
                    unit[source] for source in self.data_inputs(op) if unit[source] is not None
                )
            )
            units += [owner for _, owner in self.foreign(op)]
            for other in units[1:]:
                assert units[0] is not None
                assert other is not None
                yield units[0], other, op
        for op in range(self.graph.num_ops):
            mine = unit[op]
            if mine is not None and self.unit_of_module(self.path[op]) is not None:
                for _, owner in self.foreign(op):
                    if owner != mine:
                        yield mine, owner, op

    def foreign(self, op: int) -> list[tuple[int, str]]:
        """Weights that an op reads although their module is not running, with the units that own
        them."""
        found = []
        for source in self.graph.inputs_of(op).tolist():
            names = self.names_of.get(source, ())
            if names and not any(within(self.path[op], name.rpartition(".")[0]) for name in names):
                owner = self.unit_of_module(names[0].rpartition(".")[0])
                if owner is not None:
                    found.append((source, owner))
        return found

    @cached_property
    def names_of(self) -> Mapping[int, list[str]]:
        """Op of a tensor -> its names."""
        found: dict[int, list[str]] = {}
        for name, op in self.op_of.items():
            found.setdefault(op, []).append(name)
        return found

    def forward_ops(self) -> Array:
        return np.flatnonzero(self.graph.phase == FORWARD)


def model_names(model: nn.Module | None) -> list[str]:
    return (
        [] if model is None else [name for name, _ in model.named_modules(remove_duplicate=False)]
    )


def within(path: str, module: str) -> bool:
    return path == module or not module or path.startswith(f"{module}.")


def ancestors(module: str) -> Iterable[str]:
    """From the outermost to the module itself; the model as a whole is none of them."""
    parts = module.split(".") if module else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
