"""Puts ops that belong together into groups: the co-location rules of Mirhoseini et al. 2017, and a
few more.

Rules only ever join groups, and are applied in turn until none joins any more, so applying twice
equals applying once. Groups of the graph are kept. Two groups whose ops allow no common device kind
are never joined.

Differs in: `single_consumer` leaves parameters alone, which have rules of their own, so that a
weight may still live on one device and be used on another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, PARAMETER, UPDATE, Graph
from roost.errors import InputError
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds, Unions, units_of


@dataclass(frozen=True)
class Colocate:
    """Sets the groups of a graph; its ops stay as they are."""

    # Ops of one phase, forward or backward, share a group where their module path has the same
    # first part: so many names of it, or all up to the end of what a regular expression finds.
    # r"Mixed_[^.]*\.[^.]*" is one conv each.
    units: int | str | tuple[str, ...] = ()
    # Backward ops join the forward ops of their unit, or of their module.
    gradients_with_forward: bool = False
    # An update joins every parameter and optimizer state that it reads.
    updates_with_parameter: bool = True
    # An update joins those that only updates read, so that weights stay free.
    updates_with_state: bool = True
    # X joins Y where Y alone consumes it; groups count as ops (the paper's second rule).
    single_consumer: bool = False
    # A parameter joins its forward and backward consumers, where they are one.
    parameters_with_consumer: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.units, bool) or (isinstance(self.units, int) and self.units < 0):
            raise InputError(
                f"units is {self.units!r}; it must be a number of names, or regular expressions"
            )
        try:
            self._patterns()
        except re.error as error:
            raise InputError(
                f"units: {error.pattern!r} is no regular expression: {error}"
            ) from None

    def apply(self, graph: Graph) -> Transformed:
        work = _Work(graph, self._unit_names(graph))
        rules: dict[str, Callable[[], int]] = {
            "units": work.join_units,
            "gradients_with_forward": work.join_gradients,
            "updates_with_parameter": work.join_updates,
            "updates_with_state": work.join_states,
            "single_consumer": work.join_single_consumers,
            "parameters_with_consumer": work.join_parameters,
        }
        joined = {name: 0 for name in rules if getattr(self, name)}
        while True:
            before = sum(joined.values())
            for name in joined:
                joined[name] += rules[name]()
            if sum(joined.values()) == before:
                break
        group, names = work.groups()
        counts = {f"colocate.{name}": count for name, count in joined.items()}
        changed = replace(graph, group=group, group_names=names)
        return Transformed(graph, changed, np.arange(graph.num_ops), counts)

    def _patterns(self) -> list[re.Pattern[str]]:
        if isinstance(self.units, int):
            return []
        return [
            re.compile(p) for p in ([self.units] if isinstance(self.units, str) else self.units)
        ]

    def _unit_names(self, graph: Graph) -> list[str]:  # [ops] "" where an op is in none
        found = dict.fromkeys(graph.modules, "")
        patterns = self._patterns()
        for module in found:
            if isinstance(self.units, int):
                found[module] = ".".join(module.split(".")[: self.units])
            elif matches := [match for pattern in patterns if (match := pattern.search(module))]:
                found[module] = module[: matches[0].end()]
        return [found[module] for module in graph.modules]


class _Work:
    """The groups of one graph while they grow. Each rule says how many joins it has made."""

    def __init__(self, graph: Graph, unit_names: list[str]) -> None:
        self.graph = graph
        self.unit_names = unit_names
        self.phase: list[int] = graph.phase.tolist()
        self.inputs, self.consumers = graph.input_lists(), graph.consumer_lists()
        kinds = Kinds(graph)
        self.sets = Unions(kinds.masks(graph).tolist())
        leader: dict[int, int] = {}
        units_of(graph, kinds)  # raises where a group can go nowhere
        for op, group in enumerate(graph.group.tolist()):
            if group >= 0:
                self.sets.join(leader.setdefault(group, op), op)

    def join_units(self) -> int:
        """Ops of one unit and phase."""
        return sum(self._join_all(ops) for (name, _), ops in self._by_name(self.unit_names) if name)

    def join_gradients(self) -> int:
        """Backward ops with the forward ops of their unit, or of their module, where these are in
        one group."""
        names = [
            unit or module for unit, module in zip(self.unit_names, self.graph.modules, strict=True)
        ]
        rows = dict(self._by_name(names))
        joined = 0
        for (name, phase), backward in rows.items():
            forward = rows.get((name, FORWARD), [])
            if phase == BACKWARD and name and len({self.sets.find(op) for op in forward}) == 1:
                joined += sum(self.sets.join(forward[0], op) for op in backward)
        return joined

    def _by_name(self, names: list[str]) -> Iterator[tuple[tuple[str, int], list[int]]]:
        rows: dict[tuple[str, int], list[int]] = {}
        for op, (name, phase) in enumerate(zip(names, self.phase, strict=True)):
            if phase in (FORWARD, BACKWARD):
                rows.setdefault((name, phase), []).append(op)
        yield from rows.items()

    def _join_all(self, ops: list[int]) -> int:
        """Join each op to the first of those before it that it may share a device with."""
        joined, heads = 0, ops[:1]
        for op in ops[1:]:
            head = next((head for head in heads if self.sets.may_join(head, op)), None)
            if head is None:
                heads.append(op)
            else:
                joined += self.sets.join(head, op)
        return joined

    def join_updates(self) -> int:
        """Updates with all the parameters they read."""
        return self._join_updates(lambda parameter: True)

    def join_states(self) -> int:
        """Updates with the parameters that nothing but updates reads."""
        return self._join_updates(
            lambda p: all(self.phase[reader] == UPDATE for reader in self.consumers[p])
        )

    def _join_updates(self, wanted: Callable[[int], bool]) -> int:
        joined = 0
        for op in np.flatnonzero(self.graph.phase == UPDATE).tolist():
            for source in self.inputs[op]:
                if self.phase[source] == PARAMETER and wanted(source):
                    joined += self.sets.join(op, source)
        return joined

    def join_parameters(self) -> int:
        """Parameters with their forward and backward consumers, where these are in one group."""
        joined = 0
        for op in np.flatnonzero(self.graph.is_parameter).tolist():
            readers = [
                reader for reader in self.consumers[op] if self.phase[reader] in (FORWARD, BACKWARD)
            ]
            if len({self.sets.find(reader) for reader in readers}) == 1:
                joined += self.sets.join(op, readers[0])
        return joined

    def join_single_consumers(self) -> int:
        """Groups with the one other group that consumes what they make, again and again."""
        sets, graph = self.sets, self.graph
        root = sets.roots()
        consumers: dict[int, set[int]] = {int(item): set() for item in np.unique(root)}
        producers: dict[int, set[int]] = {item: set() for item in consumers}
        for source, target in zip(
            root[graph.input_op].tolist(), root[graph.edge_target].tolist(), strict=True
        ):
            if source != target:
                consumers[source].add(target)
                producers[target].add(source)
        computes = set(np.unique(root[~graph.is_parameter]).tolist())
        waiting = sorted(computes, reverse=True)
        joined = 0
        while waiting:
            item = waiting.pop()
            if item not in consumers or item not in computes or len(consumers[item]) != 1:
                continue
            (other,) = consumers[item]
            if not sets.join(item, other):
                continue
            joined += 1
            # The set with fewer neighbours is renamed, so that no neighbour is renamed often.
            few, many = sorted(
                (item, other), key=lambda i: (len(consumers[i]) + len(producers[i]), i)
            )
            changed = _rename(few, many, consumers, producers)
            computes.add(many)
            waiting.extend(sorted(changed & computes, reverse=True))
        return joined

    def groups(self) -> tuple[Array, tuple[str, ...]]:
        """The group of each op, and their names; an op alone is in none, unless it came with
        one."""
        root = self.sets.roots()
        size = np.bincount(root, minlength=self.graph.num_ops)
        given: dict[int, int] = {}
        for op, group in enumerate(self.graph.group.tolist()):
            if group >= 0:
                given[int(root[op])] = min(group, given.get(int(root[op]), group))
        names: dict[int, str] = {
            item: self.graph.group_names[group] for item, group in given.items()
        }
        taken = set(names.values())
        for item in np.flatnonzero(size > 1).tolist():
            if item not in names:
                names[item] = _unique(self.unit_names[item] or self.graph.op_names[item], taken)
                taken.add(names[item])
        number = np.full(self.graph.num_ops, -1, dtype=np.int32)
        order = sorted(names)  # a root is the first op of its set
        number[order] = np.arange(len(order))
        return number[root], tuple(names[item] for item in order)


def _rename(
    few: int, many: int, consumers: dict[int, set[int]], producers: dict[int, set[int]]
) -> set[int]:
    """Make one set into a part of another; those whose consumers have changed."""
    changed = {many} | producers[few]
    for ahead, behind in ((consumers, producers), (producers, consumers)):
        for neighbour in ahead.pop(few):
            behind[neighbour].discard(few)
            if neighbour != many:
                behind[neighbour].add(many)
                ahead[many].add(neighbour)
    changed.discard(few)
    return changed


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    found = name
    while found in taken:
        found, number = f"{name}#{number}", number + 1
    return found
