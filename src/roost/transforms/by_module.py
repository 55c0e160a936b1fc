"""One decision for each module with weights, as a model that stays Python can carry it out.

A module runtime can change a model only where a module is called: it chooses where the module's
weights lie and where it runs. Computation between such modules runs on the main device.

- Ops of one module are one group. A large weight has a home of its own, from which it may be
  streamed. A small weight lives where its module runs.
- A few modules with little else between them are one group if they hand on much to each other. A
  pair of layers with an activation between then runs in one place. If they hand on next to nothing,
  as for a single token, each is decided by itself: smaller groups leave less waiting between a link
  that brings weights and a host that computes with others.
- Each call that runs elsewhere costs a transfer there and back, while the main device waits. So a
  module with little weight stays on the main device, and so does one with several inputs or outputs
  in a call. With `light`, modules of any weight may leave, and weightless ones too, each by itself.
  That is for models whose activations do not fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.graph import Graph
from roost.core.kinds import class_of
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds, Unions

_MOST_SHARE = 1 / 16  # of all weights, in one group of several modules
_LITTLE = 1 / 1000  # of the weights: modules that hand on less are decided one by one

Readers = Mapping[int, list[str]]  # parameter -> the modules whose own ops read it


@dataclass(frozen=True)
class ByModule:
    """Sets the groups of a graph, and where ops may run; its ops stay as they are."""

    main: str = "cuda"  # kind of the devices for all ops outside modules with weights
    others: tuple[str, ...] = ("cpu",)  # kinds on which modules with weights may run too
    small_bytes: int = 2**20  # a smaller parameter lives where its module runs
    tied: Mapping[str, str] = field(default_factory=dict)  # other names of parameters -> graph name
    light: bool = False  # modules with little weight or none may leave too, each by itself

    def apply(self, graph: Graph) -> Transformed:
        """The graph with a group for each module."""
        readers = readers_of(graph)
        modules = {module for names in readers.values() for module in names if module}
        if self.light:
            modules |= set(weightless(graph))
        joined = {} if self.light else self._joined_modules(graph, modules, readers)
        head = {module: joined.get(module, module) for module in {*modules, *joined}}
        limited = replace(graph, allowed=tuple(self._allowed(graph, readers, head)))
        group, names = _numbered(limited, self._groups(limited, readers, head))
        changed = replace(limited, group=group, group_names=names)
        counts = {"by_module.modules": len(modules)}
        return Transformed(graph, changed, np.arange(graph.num_ops), counts)

    def _allowed(
        self, graph: Graph, readers: Readers, head: Mapping[str, str]
    ) -> list[tuple[str, ...]]:
        """The device kinds of each op."""
        movable = self._movable(graph, head)
        kinds = tuple(dict.fromkeys((self.main, *self.others)))
        allowed = list(graph.allowed)
        for op in np.flatnonzero(~graph.is_parameter).tolist():
            if plain(graph.modules[op]) in movable:
                allowed[op] = allowed[op] or kinds
            else:
                allowed[op] = self._on_main(allowed[op])
        names = {name: [name] for name in graph.op_names}
        for other, name in self.tied.items():
            names.setdefault(name, []).append(other)
        for parameter, modules in readers.items():
            own = all(_may_hold(module, names[graph.op_names[parameter]]) for module in modules)
            if not own or (len(modules) > 1 and not may_be_brought(graph, parameter)):
                allowed[parameter] = self._on_main(allowed[parameter])
        for ops in _given_groups(graph):
            # A group that these rules would leave without a device keeps its own rules.
            if not _have_common_kind(allowed[op] for op in ops):
                for op in ops:
                    allowed[op] = graph.allowed[op]
        return allowed

    def _on_main(self, choice: tuple[str, ...]) -> tuple[str, ...]:
        """The main device, unless an op cannot run there."""
        return choice if choice and self.main not in choice else (self.main,)

    def _movable(self, graph: Graph, head: Mapping[str, str]) -> set[str]:
        """Modules that may run elsewhere: heavy ones with one input and one output in each call."""
        names = [head.get(plain(module), "") for module in graph.modules]
        numbers = [module.partition("@")[2].partition(".")[0] for module in graph.modules]
        calls = list(zip(names, numbers, strict=True))
        inputs = graph.input_lists()
        consumers = graph.consumer_lists()
        is_parameter: list[bool] = graph.is_parameter.tolist()
        weights: defaultdict[str, set[int]] = defaultdict(set)  # parameters of each module
        taken: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # inputs of each call
        made: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # outputs of each call
        for op, call in enumerate(calls):
            if not names[op] or is_parameter[op]:
                continue
            for source in inputs[op]:
                if is_parameter[source]:
                    weights[names[op]].add(source)
                elif calls[source] != call:
                    taken[call].add(source)
            if not consumers[op] or any(calls[reader] != call for reader in consumers[op]):
                made[call].add(op)
        several = {
            name for sets in (taken, made) for (name, _), ops in sets.items() if len(ops) > 1
        }
        least = 0 if self.light else self.small_bytes

        def is_heavy(name: str) -> bool:
            return int(graph.output_bytes[list(weights[name])].sum()) >= least

        return {m for m, name in head.items() if name not in several and is_heavy(name)}

    def _joined_modules(self, graph: Graph, modules: set[str], readers: Readers) -> dict[str, str]:
        """Modules that run together with others -> the module around them all."""
        size: Counter[str] = Counter()  # bytes of the weights of each module
        for parameter, names in readers.items():
            for module in names:
                size[module] += int(graph.output_bytes[parameter])
        modules = modules & size.keys()
        ops: defaultdict[str, list[int]] = defaultdict(list)  # of each module
        for op in np.flatnonzero(~graph.is_parameter).tolist():
            ops[plain(graph.modules[op])].append(op)
        joined: dict[str, str] = {}
        for around in {module.rpartition(".")[0] for module in modules} - {""} - modules:
            within = [name for name in ops if name == around or name.startswith(f"{around}.")]
            inside = [module for module in within if module in modules]
            between = [op for name in within if name not in modules for op in ops[name]]
            near = all(module.count(".") == around.count(".") + 1 for module in inside)
            cheap = all(class_of(graph.kinds[op]) == "other" for op in between)
            weight = sum(size[module] for module in inside)
            handed_on = int(graph.output_bytes[[op for name in within for op in ops[name]]].sum())
            few_weights = weight <= _MOST_SHARE * size.total()
            if len(inside) > 1 and near and cheap and few_weights and handed_on > _LITTLE * weight:
                joined |= dict.fromkeys(within, around)
        return joined

    def _groups(self, graph: Graph, readers: Readers, head: Mapping[str, str]) -> Unions:
        """The ops that share a device."""
        groups = Unions(Kinds(graph).masks(graph).tolist())
        for ops in _given_groups(graph):
            for op in ops:
                groups.join(ops[0], op)
        first: dict[str, int] = {}  # op of each module
        for op in np.flatnonzero(~graph.is_parameter).tolist():
            module = plain(graph.modules[op])
            if module in head:
                groups.join(first.setdefault(head[module], op), op)
        for parameter, modules in readers.items():
            small = graph.output_bytes[parameter] < self.small_bytes
            bound = small or not may_be_brought(graph, parameter)
            if len(modules) == 1 and modules[0] and bound:
                groups.join(first[head[modules[0]]], parameter)
        return groups


def _numbered(graph: Graph, groups: Unions) -> tuple[Array, tuple[str, ...]]:
    """The group of each op, -1 for none, and the names of the groups."""
    root = groups.roots()
    heads = np.flatnonzero(np.bincount(root, minlength=graph.num_ops) > 1)
    number = np.full(graph.num_ops, -1, dtype=np.int32)
    number[heads] = np.arange(len(heads))
    names = (f"{plain(graph.modules[op]) or graph.op_names[op]}#{op}" for op in heads.tolist())
    return number[root], tuple(names)


def _given_groups(graph: Graph) -> list[list[int]]:
    """The ops of each group that the graph has."""
    ops: defaultdict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(graph.group >= 0).tolist():
        ops[int(graph.group[op])].append(op)
    return list(ops.values())


def _have_common_kind(choices: Iterable[tuple[str, ...]]) -> bool:
    """Tell whether all choices allow some kind; an empty choice allows every kind."""
    limits = [set(choice) for choice in choices if choice]
    return not limits or bool(set.intersection(*limits))


def plain(module: str) -> str:
    """The path of a module without the number of the call."""
    return module.partition("@")[0]


def readers_of(graph: Graph) -> dict[int, list[str]]:
    """Parameter -> the modules whose own ops read it, in program order."""
    consumers = graph.consumer_lists()
    return {
        op: list(dict.fromkeys(plain(graph.modules[reader]) for reader in consumers[op]))
        for op in np.flatnonzero(graph.is_parameter).tolist()
    }


def may_be_brought(graph: Graph, parameter: int) -> bool:
    """Tell whether a parameter may be streamed; a buffer lives where its module runs."""
    return not graph.allowed[parameter] or MEMORY in graph.allowed[parameter]


def weightless(graph: Graph) -> list[str]:
    """Modules that compute, have no weights, and have no computing modules inside."""
    computing = {plain(graph.modules[op]) for op in np.flatnonzero(~graph.is_parameter).tolist()}
    around = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in computing)
        for count in range(1, len(parts))
    }
    weighty = {module for modules in readers_of(graph).values() for module in modules}
    return sorted(computing - around - weighty - {""})


def _may_hold(module: str, names: list[str]) -> bool:
    """Tell whether a parameter, by any of its names, is inside a module."""
    return bool(module) and any(name.startswith(f"{module}.") for name in names)
