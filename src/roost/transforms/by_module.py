"""One decision for each module that has weights, as a model that stays Python can carry it out.

A model that runs as written can be changed only where a module is called: its weights lie here or
there, and it runs here or there. Whatever is computed between such modules runs on the main device.
So ops of one module are one group; a large weight has a home of its own, from which it may be
streamed; a small one lives where its module runs. A module of a few such, with little else in it,
is one group where much is handed on inside: a pair of layers with an activation between runs in one
place. Where that is next to nothing, as for a single token, each part is decided by itself: smaller
pieces leave less waiting between a link that brings weights and a host that computes with others.

What runs elsewhere costs a way there and back for each call, in which the main device waits. So a
module with little weight stays on the main device, and so does one that takes or gives several
tensors, for which its caller would wait. With `light` modules of any weight may leave, and those of
none, each for itself: it is for models whose activations do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roost.core.cluster import MEMORY
from roost.core.graph import Graph
from roost.core.kinds import class_of
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds, Unions

_SHARE = 1 / 16  # of all weights: a module of modules with more than this is not one decision
# Of its weights: where less than this is handed on inside a module of modules, it need not be one.
_LITTLE = 1 / 1000


@dataclass(frozen=True)
class ByModule:
    """Sets the groups of a graph, and where ops may run; its ops stay as they are."""

    # Kind of the devices on which everything runs that belongs to no module with weights.
    main: str = "cuda"
    others: tuple[str, ...] = ("cpu",)  # kinds on which modules with weights may run too
    small_bytes: int = 2**20  # a parameter with less than this lives where its module runs
    # Other names of parameters -> their name in the graph.
    tied: Mapping[str, str] = field(default_factory=dict)
    # Modules with little weight or none may run on other devices too, and all by themselves.
    light: bool = False

    def apply(self, graph: Graph) -> Transformed:
        readers = readers_of(graph)
        units = {module for modules in readers.values() for module in modules if module}
        if self.light:
            units |= set(weightless(graph))
        together = {} if self.light else self._together(graph, units, readers)
        movable = self._movable(
            graph, {module: together.get(module, module) for module in {*units, *together}}
        )
        kinds = tuple(dict.fromkeys((self.main, *self.others)))
        allowed = [
            choice
            if parameter
            else (choice or kinds)
            if plain(module) in movable
            else self._on_main(choice)
            for choice, parameter, module in zip(
                graph.allowed, graph.is_parameter.tolist(), graph.modules, strict=True
            )
        ]
        names = {name: [name] for name in graph.op_names}
        for other, name in self.tied.items():
            names.setdefault(name, []).append(other)
        for parameter, modules in readers.items():
            brought = all(_may_hold(module, names[graph.op_names[parameter]]) for module in modules)
            if not brought or (len(modules) > 1 and not may_be_brought(graph, parameter)):
                allowed[parameter] = self._on_main(allowed[parameter])
        for members in _groups(graph):
            # What must be together and cannot be so: as it was.
            if not _common(allowed[op] for op in members):
                for op in members:
                    allowed[op] = graph.allowed[op]
        limited = replace(graph, allowed=tuple(allowed))
        sets = self._joined(
            limited,
            readers,
            {module: together.get(module, module) for module in {*units, *together}},
        )
        root = sets.roots()
        heads = [
            int(head)
            for head, size in enumerate(np.bincount(root, minlength=graph.num_ops))
            if size > 1
        ]
        number = np.full(graph.num_ops, -1, dtype=np.int32)
        number[heads] = np.arange(len(heads))
        said = tuple(
            f"{plain(graph.modules[head]) or graph.op_names[head]}#{head}" for head in heads
        )
        changed = replace(limited, group=number[root], group_names=said)
        return Transformed(
            graph, changed, np.arange(graph.num_ops), {"by_module.modules": len(units)}
        )

    def _on_main(self, choice: tuple[str, ...]) -> tuple[str, ...]:
        """The main device, unless an op cannot run there."""
        return choice if choice and self.main not in choice else (self.main,)

    def _movable(self, graph: Graph, units: dict[str, str]) -> set[str]:
        """Modules that may run elsewhere: heavy ones with one tensor in and one out in each
        call."""
        weight: dict[str, int] = {}
        # A call of a module -> what it takes from outside.
        given: dict[tuple[str, str], set[int]] = {}
        # What it makes that is read outside, or returned.
        made: dict[tuple[str, str], set[int]] = {}
        unit = [units.get(plain(module), "") for module in graph.modules]
        call = [module.partition("@")[2].partition(".")[0] for module in graph.modules]
        is_parameter, inputs, consumers = (
            graph.is_parameter.tolist(),
            graph.input_lists(),
            graph.consumer_lists(),
        )
        seen: set[tuple[str, int]] = set()
        for op in (op for op, name in enumerate(unit) if name and not is_parameter[op]):
            key = unit[op], call[op]
            given.setdefault(key, set()), made.setdefault(key, set())
            for source in inputs[op]:
                if is_parameter[source]:
                    if (unit[op], source) not in seen:
                        seen.add((unit[op], source))
                        weight[unit[op]] = weight.get(unit[op], 0) + int(graph.output_bytes[source])
                elif (unit[source], call[source]) != key:
                    given[key].add(source)
            if not consumers[op] or any(
                (unit[reader], call[reader]) != key for reader in consumers[op]
            ):
                made[key].add(op)
        several = {key[0] for sets in (given, made) for key, ops in sets.items() if len(ops) > 1}
        least = 0 if self.light else self.small_bytes
        return {
            m for m, unit in units.items() if weight.get(unit, 0) >= least and unit not in several
        }

    def _together(
        self, graph: Graph, units: set[str], readers: dict[int, list[str]]
    ) -> dict[str, str]:
        """Modules that run with those beside them -> the module around them all."""
        size: dict[str, int] = {}
        for parameter, modules in readers.items():
            for module in modules:
                size[module] = size.get(module, 0) + int(graph.output_bytes[parameter])
        units = units & size.keys()
        ops: dict[str, list[int]] = {}
        for op in np.flatnonzero(~graph.is_parameter).tolist():
            ops.setdefault(plain(graph.modules[op]), []).append(op)
        found: dict[str, str] = {}
        for around in {module.rpartition(".")[0] for module in units} - {""} - units:
            within = [
                module for module in ops if module == around or module.startswith(f"{around}.")
            ]
            inside = [module for module in within if module in units]
            between = [op for module in within if module not in units for op in ops[module]]
            near = all(module.count(".") == around.count(".") + 1 for module in inside)
            cheap = all(class_of(graph.kinds[op]) == "other" for op in between)
            weight = sum(size[module] for module in inside)
            handed_on = int(
                graph.output_bytes[[op for module in within for op in ops[module]]].sum()
            )
            little = handed_on <= _LITTLE * weight
            if (
                len(inside) > 1
                and near
                and cheap
                and not little
                and weight <= _SHARE * sum(size.values())
            ):
                found |= dict.fromkeys(within, around)
        return found

    def _joined(self, graph: Graph, readers: dict[int, list[str]], units: dict[str, str]) -> Unions:
        kinds = Kinds(graph)
        sets = Unions(kinds.masks(graph).tolist())
        for members in _groups(graph):
            for op in members:
                sets.join(members[0], op)
        head: dict[str, int] = {}
        for op, (module, parameter) in enumerate(
            zip(graph.modules, graph.is_parameter.tolist(), strict=True)
        ):
            if not parameter and plain(module) in units:
                sets.join(head.setdefault(units[plain(module)], op), op)
        for parameter, modules in readers.items():
            small = graph.output_bytes[parameter] < self.small_bytes or not may_be_brought(
                graph, parameter
            )
            if len(modules) == 1 and modules[0] and small:
                sets.join(head[units[modules[0]]], parameter)
        return sets


def _groups(graph: Graph) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for op in np.flatnonzero(graph.group >= 0).tolist():
        found.setdefault(int(graph.group[op]), []).append(op)
    return list(found.values())


def _common(choices: Iterable[tuple[str, ...]]) -> bool:
    """Whether there is a kind that all allow."""
    limits = [set(choice) for choice in choices if choice]
    return not limits or bool(set.intersection(*limits))


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


def may_be_brought(graph: Graph, parameter: int) -> bool:
    """Whether a parameter may lie in memory from which it is streamed; as a buffer it lives where
    its module runs."""
    return not graph.allowed[parameter] or MEMORY in graph.allowed[parameter]


def weightless(graph: Graph) -> list[str]:
    """Modules that compute, have no weights, and have no modules inside that compute."""
    of = {
        plain(module)
        for module, parameter in zip(graph.modules, graph.is_parameter.tolist(), strict=True)
        if not parameter
    }
    around = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in of)
        for count in range(1, len(parts))
    }
    weighty = {module for modules in readers_of(graph).values() for module in modules}
    return sorted(of - around - weighty - {""})


def _may_hold(module: str, names: list[str]) -> bool:
    """Whether a parameter can be brought for a call of this module alone: it is its own, or of a
    module inside it."""
    return bool(module) and any(name.startswith(f"{module}.") for name in names)
