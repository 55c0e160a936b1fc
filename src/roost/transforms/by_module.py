"""One decision for each module that has weights, as a model that stays Python can carry it out.

A model that runs as written can be changed only where a module is called: its weights lie here or there, and it runs
here or there. Whatever is computed between such modules runs on the main device. So ops of one module are one group;
a large weight has a home of its own, from which it may be streamed; a small one lives where its module runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roost.core.graph import Graph
from roost.errors import InputError
from roost.transforms._transformed import Transformed
from roost.transforms._unions import Kinds, Unions


@dataclass(frozen=True)
class ByModule:
    """Sets the groups of a graph, and where ops may run; its ops stay as they are."""

    main: str = "cuda"  # kind of the devices on which everything runs that belongs to no module with weights
    small_bytes: int = 2**20  # a parameter with less than this lives where its module runs
    tied: Mapping[str, str] = field(default_factory=dict)  # other names of parameters -> their name in the graph

    def apply(self, graph: Graph) -> Transformed:
        if graph.phase.max() > 2:
            raise InputError("decisions by module are for inference: this graph has a backward pass or updates")
        readers = readers_of(graph)
        units = {module for modules in readers.values() for module in modules}
        allowed = [
            choice if parameter or plain(module) in units else self._on_main(choice, name)
            for choice, parameter, module, name in zip(
                graph.allowed, graph.is_parameter.tolist(), graph.modules, graph.op_names, strict=True
            )
        ]
        names = {name: [name] for name in graph.op_names}
        for other, name in self.tied.items():
            names.setdefault(name, []).append(other)
        for parameter, modules in readers.items():
            if not all(_may_hold(module, names[graph.op_names[parameter]]) for module in modules):
                allowed[parameter] = self._on_main(allowed[parameter], graph.op_names[parameter])
        limited = replace(graph, allowed=tuple(allowed))
        sets = self._joined(limited, readers, units)
        root = sets.roots()
        heads = [int(head) for head, size in enumerate(np.bincount(root, minlength=graph.num_ops)) if size > 1]
        number = np.full(graph.num_ops, -1, dtype=np.int32)
        number[heads] = np.arange(len(heads))
        said = tuple(f"{plain(graph.modules[head]) or graph.op_names[head]}#{head}" for head in heads)
        changed = replace(limited, group=number[root], group_names=said)
        return Transformed(graph, changed, np.arange(graph.num_ops), {"by_module.modules": len(units)})

    def _on_main(self, choice: tuple[str, ...], name: str) -> tuple[str, ...]:
        if choice and self.main not in choice:
            raise InputError(f"op {name!r} may only run on {', '.join(choice)}; between modules all run on {self.main}")
        return (self.main,)

    def _joined(self, graph: Graph, readers: dict[int, list[str]], units: set[str]) -> Unions:
        kinds = Kinds(graph)
        sets = Unions(kinds.masks(graph).tolist())
        head: dict[str, int] = {}
        for op, (module, parameter) in enumerate(zip(graph.modules, graph.is_parameter.tolist(), strict=True)):
            if not parameter and plain(module) in units:
                sets.join(head.setdefault(plain(module), op), op)
        leader: dict[int, int] = {}
        for op, group in enumerate(graph.group.tolist()):
            if group >= 0:
                sets.join(leader.setdefault(group, op), op)
        for parameter, modules in readers.items():
            if len(modules) == 1 and graph.output_bytes[parameter] < self.small_bytes:
                sets.join(head[modules[0]], parameter)
        return sets


def plain(module: str) -> str:
    """The path of a module without the number of the call."""
    return module.partition("@")[0]


def readers_of(graph: Graph) -> dict[int, list[str]]:
    """Each parameter, and the modules whose own ops read it, in program order."""
    consumers = graph.consumer_lists()
    return {
        op: list(dict.fromkeys(plain(graph.modules[reader]) for reader in consumers[op]))
        for op in np.flatnonzero(graph.is_parameter).tolist()
    }


def _may_hold(module: str, names: list[str]) -> bool:
    """Whether a parameter can be brought for a call of this module alone: it is its own, or of a module inside it."""
    return bool(module) and any(name.startswith(f"{module}.") for name in names)
