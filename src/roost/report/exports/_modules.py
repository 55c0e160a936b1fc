"""The modules of a graph, and which of them other tools must keep whole; exporters use it.

Tools that place modules move the inputs of a module to its device, and nothing else. Two things
follow:

- A module is a *block* if its own code combines its inputs with outputs of its parts, as in a
  residual connection. All its parts must share its device.
- Parts *meet* if the code of the module around them combines only their outputs. These parts must
  share a device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, INPUT, PARAMETER, Graph
from roost.core.problem import Problem
from roost.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_CONSTANT = re.compile(r"(_?tensor_constant|lifted_tensor)_?\d*")


class Modules:
    """The tree of modules of a graph; the model itself adds ties, buffers and idle modules."""

    def __init__(self, graph: Graph, model: nn.Module | None = None) -> None:
        self.graph = graph
        # [ops] module, without the number of the call.
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
        weights = (n for n in parameters if "." in n and not _CONSTANT.fullmatch(n))
        missing = [f"tensor {name!r}" for name in weights if name not in named]
        known = set(model_names(model))
        missing += [f"module {path!r}" for path in self.path if path not in known]
        if missing:
            raise InputError(
                f"graph {graph.name!r} is not of this model: the model has no {missing[0]}"
            )
        for name, value in named.items():
            self._tensor(name, parameters[first[id(value)]] if id(value) in first else -1)

    def _guess_ties(self) -> None:
        """Give a leaf module without tensors a name for the other module's tensor that it reads."""
        leaves = {module for module, parts in self.children.items() if module and not parts}
        bare = leaves - self.tensors.keys()
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
        """The ops that the code of a module with parts runs itself."""
        for op in range(self.graph.num_ops):
            if self.graph.phase[op] == FORWARD and self.children[self.path[op]]:
                yield op

    def data_inputs(self, op: int, also: int = FORWARD) -> list[int]:
        """The ops of the phases `forward` and `also` that an op reads from, each once."""
        sources: dict[int, None] = {}
        for source in self.graph.inputs_of(op).tolist():
            if self.graph.kinds[source] == "output":
                source = int(self.graph.inputs_of(source)[0])
            if self.graph.phase[source] in (FORWARD, also):
                sources[source] = None
        return list(sources)

    @cached_property
    def unit(self) -> list[str | None]:
        """[ops] the block or the leaf module that an op runs with, or None."""
        units: list[str | None] = []
        for op in range(self.graph.num_ops):
            own = self.unit_of_module(self.path[op])
            if own is None and self.graph.phase[op] == FORWARD:
                sources = (units[source] for source in self.data_inputs(op))
                own = next((unit for unit in sources if unit is not None), None)
            units.append(own if self.graph.phase[op] == FORWARD else None)
        return units

    def unit_of_module(self, module: str) -> str | None:
        """The outermost block around a module, else the module itself if it has no parts."""
        for path in ancestors(module):
            if self.is_block.get(path):
                return path
        return module if not self.children.get(module) and module else None

    def meetings(self) -> Iterator[tuple[str, str, int]]:
        """Two units that meet, and the op that reads from both, or that reads a weight of one."""
        unit = self.unit
        for op in self._own_ops():
            if self.unit_of_module(self.path[op]) is not None:
                continue
            sources = dict.fromkeys(unit[source] for source in self.data_inputs(op))
            units = [source for source in sources if source is not None]
            units += [owner for _, owner in self.foreign(op)]
            for other in units[1:]:
                yield units[0], other, op
        for op in range(self.graph.num_ops):
            mine = unit[op]
            if mine is not None and self.unit_of_module(self.path[op]) is not None:
                for _, owner in self.foreign(op):
                    if owner != mine:
                        yield mine, owner, op

    def foreign(self, op: int) -> list[tuple[int, str]]:
        """Weights that an op reads while their module is not running, and the units of these."""
        weights = []
        for source in self.graph.inputs_of(op).tolist():
            names = self.names_of.get(source, ())
            if names and not any(within(self.path[op], name.rpartition(".")[0]) for name in names):
                owner = self.unit_of_module(names[0].rpartition(".")[0])
                if owner is not None:
                    weights.append((source, owner))
        return weights

    @cached_property
    def names_of(self) -> Mapping[int, list[str]]:
        """Op of a tensor -> its names."""
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, op in self.op_of.items():
            names[op].append(name)
        return dict(names)

    def forward_ops(self) -> Array:
        """The ops of the phase `forward`."""
        return np.flatnonzero(self.graph.phase == FORWARD)


Seconds = Mapping[int, float]  # device -> seconds of computing


def seconds_by_unit(
    problem: Problem, device: Array, unit: Sequence[str | None]
) -> dict[str, Seconds]:
    """The computing of each unit on each device; `unit` has the unit of each op, or None."""
    seconds: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for op in np.flatnonzero(problem.graph.phase == FORWARD).tolist():
        name = unit[op]
        on = int(device[op])
        if name is not None:
            seconds[name][on] += float(problem.op_time[op, on]) + 1e-12
    return dict(seconds)


def busiest(seconds: Seconds) -> int:
    """The device with the most computing, or the first of several."""
    return max(seconds, key=lambda device: (seconds[device], -device))


def model_names(model: nn.Module | None) -> list[str]:
    """The paths of all modules of a model."""
    if model is None:
        return []
    return [name for name, _ in model.named_modules(remove_duplicate=False)]


def within(path: str, module: str) -> bool:
    """Tell whether a path is a module's or inside it."""
    return path == module or not module or path.startswith(f"{module}.")


def ancestors(module: str) -> Iterable[str]:
    """The modules around a module and itself, outermost first, without the whole model."""
    return accumulate(module.split("."), "{}.{}".format) if module else ()
