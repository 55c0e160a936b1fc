"""Groups of ops that belong together: the co-location rules of Mirhoseini et al. 2017, and more.

Rules only ever join groups, in turn until none joins any more. So applying twice equals applying
once. Groups of the graph are kept. Two groups whose ops allow no common device kind never join.

Differs in: `single_consumer` leaves parameters alone, which have rules of their own. So a weight
may still live on one device and be used on another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
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

    # Forward ops share a group if their module paths begin alike, and so do backward ops. Give the
    # number of names to compare, or regular expressions whose match ends the part to compare:
    # r"Mixed_[^.]*\.[^.]*" gives one group for each conv.
    units: int | str | tuple[str, ...] = ()
    # Backward ops join the forward ops of their unit, or of their module.
    gradients_with_forward: bool = False
    # An update joins every parameter and optimizer state that it reads.
    updates_with_parameter: bool = True
    # An update joins the parameters that only updates read, so that weights stay free.
    updates_with_state: bool = True
    # X joins Y if only Y consumes it; groups count as ops (the paper's second rule).
    single_consumer: bool = False
    # A parameter joins its forward and backward consumers if they are one group.
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
        """The graph with larger groups."""
        groups = _GrowingGroups(graph, self._unit_names(graph))
        rules: dict[str, Callable[[], int]] = {
            "units": groups.join_units,
            "gradients_with_forward": groups.join_gradients,
            "updates_with_parameter": groups.join_updates,
            "updates_with_state": groups.join_states,
            "single_consumer": groups.join_single_consumers,
            "parameters_with_consumer": groups.join_parameters,
        }
        joined = {name: 0 for name in rules if getattr(self, name)}
        while True:
            more = {name: rules[name]() for name in joined}
            if not any(more.values()):
                break
            joined = {name: count + more[name] for name, count in joined.items()}
        group, names = groups.numbered()
        counts = {f"colocate.{name}": count for name, count in joined.items()}
        changed = replace(graph, group=group, group_names=names)
        return Transformed(graph, changed, np.arange(graph.num_ops), counts)

    def _patterns(self) -> list[re.Pattern[str]]:
        if isinstance(self.units, int):
            return []
        return list(map(re.compile, [self.units] if isinstance(self.units, str) else self.units))

    def _unit_names(self, graph: Graph) -> list[str]:  # [ops] "" for no unit
        patterns = self._patterns()

        def unit_name(module: str) -> str:
            if isinstance(self.units, int):
                return ".".join(module.split(".")[: self.units])
            matches = (pattern.search(module) for pattern in patterns)
            ends = (match.end() for match in matches if match is not None)
            return module[: next(ends, 0)]

        names = {module: unit_name(module) for module in dict.fromkeys(graph.modules)}
        return [names[module] for module in graph.modules]


class _GrowingGroups:
    """The groups of one graph while they grow; each rule returns the number of its joins."""

    def __init__(self, graph: Graph, unit_names: list[str]) -> None:
        self.graph = graph
        self.unit_names = unit_names
        self.phase: list[int] = graph.phase.tolist()
        self.inputs = graph.input_lists()
        self.consumers = graph.consumer_lists()
        kinds = Kinds(graph)
        self.sets = Unions(kinds.masks(graph).tolist())
        leader: dict[int, int] = {}
        units_of(graph, kinds)  # raises if a group can go nowhere
        for op, group in enumerate(graph.group.tolist()):
            if group >= 0:
                self.sets.join(leader.setdefault(group, op), op)

    def join_units(self) -> int:
        """Join ops of one unit and phase."""
        rows = self._by_name_and_phase(self.unit_names)
        return sum(self._join_all(ops) for (name, _), ops in rows.items() if name)

    def join_gradients(self) -> int:
        """Join backward ops with the forward ops of their unit or module, if they are one group."""
        pairs = zip(self.unit_names, self.graph.modules, strict=True)
        rows = self._by_name_and_phase([unit or module for unit, module in pairs])
        joined = 0
        for (name, phase), backward in rows.items():
            forward = rows.get((name, FORWARD), [])
            if phase == BACKWARD and name and self._are_one(forward):
                joined += sum(self.sets.join(forward[0], op) for op in backward)
        return joined

    def _by_name_and_phase(self, names: list[str]) -> dict[tuple[str, int], list[int]]:
        rows: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for op, (name, phase) in enumerate(zip(names, self.phase, strict=True)):
            if phase in (FORWARD, BACKWARD):
                rows[name, phase].append(op)
        return dict(rows)

    def _are_one(self, ops: list[int]) -> bool:
        return len({self.sets.find(op) for op in ops}) == 1

    def _join_all(self, ops: list[int]) -> int:
        """Join each op to the first earlier op that it may share a device with."""
        joined = 0
        heads = ops[:1]
        for op in ops[1:]:
            head = next((head for head in heads if self.sets.may_join(head, op)), None)
            if head is None:
                heads.append(op)
            else:
                joined += self.sets.join(head, op)
        return joined

    def join_updates(self) -> int:
        """Join updates with all the parameters they read."""
        return self._join_updates(lambda parameter: True)

    def join_states(self) -> int:
        """Join updates with the parameters that only updates read."""

        def is_state(parameter: int) -> bool:
            return all(self.phase[reader] == UPDATE for reader in self.consumers[parameter])

        return self._join_updates(is_state)

    def _join_updates(self, wanted: Callable[[int], bool]) -> int:
        joined = 0
        for op in np.flatnonzero(self.graph.phase == UPDATE).tolist():
            for source in self.inputs[op]:
                if self.phase[source] == PARAMETER and wanted(source):
                    joined += self.sets.join(op, source)
        return joined

    def join_parameters(self) -> int:
        """Join parameters with their forward and backward consumers, if those are one group."""
        joined = 0
        for op in np.flatnonzero(self.graph.is_parameter).tolist():
            readers = [
                each for each in self.consumers[op] if self.phase[each] in (FORWARD, BACKWARD)
            ]
            if self._are_one(readers):
                joined += self.sets.join(op, readers[0])
        return joined

    def join_single_consumers(self) -> int:
        """Join groups with their only consumer, again and again."""
        sets = self.sets
        graph = self.graph
        root = sets.roots()
        consumers: dict[int, set[int]] = {int(item): set() for item in np.unique(root)}
        producers: dict[int, set[int]] = {item: set() for item in consumers}
        edges = root[graph.input_op].tolist(), root[graph.edge_target].tolist()
        for source, target in zip(*edges, strict=True):
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
            # The set with fewer neighbours moves, so that no neighbour changes often.
            neighbours = {
                each: len(consumers[each]) + len(producers[each]) for each in (item, other)
            }
            few, many = sorted((item, other), key=lambda each: (neighbours[each], each))
            changed = _merge_neighbours(few, many, consumers, producers)
            computes.add(many)
            waiting.extend(sorted(changed & computes, reverse=True))
        return joined

    def numbered(self) -> tuple[Array, tuple[str, ...]]:
        """The group of each op, and the names; a single op has no group unless it came with one."""
        root = self.sets.roots()
        size = np.bincount(root, minlength=self.graph.num_ops)
        given: dict[int, int] = {}  # root -> the first group of the graph in its set
        for item, group in zip(root.tolist(), self.graph.group.tolist(), strict=True):
            if group >= 0:
                given[item] = min(group, given.get(item, group))
        names = {item: self.graph.group_names[group] for item, group in given.items()}
        taken = set(names.values())
        for item in np.flatnonzero(size > 1).tolist():
            if item not in names:
                names[item] = _unique(self.unit_names[item] or self.graph.op_names[item], taken)
                taken.add(names[item])
        number = np.full(self.graph.num_ops, -1, dtype=np.int32)
        order = sorted(names)  # a root is the first op of its set
        number[order] = np.arange(len(order))
        return number[root], tuple(names[item] for item in order)


def _merge_neighbours(
    few: int, many: int, consumers: dict[int, set[int]], producers: dict[int, set[int]]
) -> set[int]:
    """Move the neighbours of one set to another; return the sets whose consumers have changed."""
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
    unique = name
    number = 2
    while unique in taken:
        unique = f"{name}#{number}"
        number = number + 1
    return unique
