"""The ops of an unrolled graph, written copy by copy; `microbatch.py` calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, INPUT, PARAMETER, UPDATE, Graph
from roost.errors import GraphError

SHARED = -1  # copy of an op that exists once
Blocks = tuple[tuple[int, ...], ...]  # the copies of a gradient, by the sum they go to first


@dataclass(frozen=True)
class Sum:
    """One op that adds up copies of a value."""

    name: str
    kind: str
    inputs: tuple[str, ...]  # op names
    after: int  # the copy whose value completes its inputs


class Unroller:
    """Writes the ops of one unrolled graph, column by column."""

    def __init__(
        self,
        graph: Graph,
        count: int,
        is_copied: Array,  # [ops] bool
        together: bool,
        by_value: Mapping[int, Blocks],
        otherwise: Blocks,
    ) -> None:
        """`by_value` has the blocks of some values that are added up, `otherwise` of the rest."""
        self.graph = graph
        self.count = count
        self.is_copied: list[bool] = is_copied.tolist()
        self.together = together
        self.by_value = by_value
        self.otherwise = otherwise
        self.inputs = graph.input_lists()
        self.is_buffer = self._values()  # value that is added up -> true for that of a buffer
        self.names: list[str] = []
        self.origin: list[int] = []  # [new ops] op of the original
        self.copy: list[int] = []  # [new ops] the microbatch, or SHARED
        self.kind_of_sum: dict[int, str] = {}  # new op -> its kind
        self.new_inputs: list[list[int]] = []
        self.index: dict[str, int] = {}
        self.final: dict[int, str] = {}  # value -> the name of what its updates read

    def made(self) -> Graph:
        """The unrolled graph; `origin`, `copy`, `kind_of_sum` and `final` then tell of its ops."""
        graph = self.graph
        copied = np.flatnonzero(self.is_copied).tolist()
        shared = np.flatnonzero(np.logical_not(self.is_copied)).tolist()
        sums = {value: self._sums(value) for value in self.is_buffer}
        at_end = [op for op in shared if graph.phase[op] not in (PARAMETER, INPUT)]
        for op in shared:
            if graph.phase[op] in (PARAMETER, INPUT):
                self._add(graph.op_names[op], op, SHARED, [])
        for copy in range(self.count):
            for op in copied:
                sources = [self._named(source, copy) for source in self.inputs[op]]
                self._add(self._name(op, copy), op, copy, sources)
                for each in sums.get(op, ()):
                    if each.after == copy:
                        new = self._add(each.name, op, SHARED, list(each.inputs))
                        self.kind_of_sum[new] = each.kind
        for op in at_end:
            finals = [self._final(source) for source in self.inputs[op]]
            self._add(graph.op_names[op], op, SHARED, finals)
        return self._graph()

    def _values(self) -> dict[int, bool]:
        """The copied ops that updates and late sums read; true for the new value of a buffer."""
        values: dict[int, bool] = {}
        for op in np.flatnonzero(np.logical_not(self.is_copied)).tolist():
            for source in self.inputs[op]:
                if self.is_copied[source]:
                    is_update = self.graph.phase[op] == UPDATE
                    values[source] = bool(is_update and self.graph.kinds[op] == "copy")
        return values

    def _sums(self, value: int) -> list[Sum]:
        """The ops that add up the copies of a value, in order."""
        count = self.count
        if self.is_buffer[value] and "float" not in self.graph.dtypes[value]:
            self.final[value] = self._name(value, count - 1)  # such as the number of batches seen
            return []
        sums: list[Sum] = []
        base = self.graph.op_names[value]

        def add(left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
            name = f"{base}#sum{len(sums) + 1}"
            after = max(left[1], right[1])
            sums.append(Sum(name, "add", (left[0], right[0]), after))
            return name, after

        partial = []
        for block in self.by_value.get(value, self.otherwise):
            partial.append((self._name(value, block[0]), block[0]))
            for copy in block[1:]:
                partial[-1] = add(partial[-1], (self._name(value, copy), copy))
        total = partial[0]
        for each in partial[1:]:
            total = add(total, each)
        if self.is_buffer[value]:
            mean = f"{base}#mean"
            sums.append(Sum(mean, "div", (total[0],), total[1]))
            total = mean, total[1]
        self.final[value] = total[0]
        return sums

    def _name(self, op: int, copy: int) -> str:
        name = self.graph.op_names[op]
        return f"{name}#{copy}" if self.is_copied[op] else name

    def _named(self, source: int, copy: int) -> str:
        if self.graph.phase[source] == UPDATE:
            raise GraphError(
                f"op {self.graph.op_names[source]!r} updates a parameter, and later ops of the "
                "same step read the new value; such a step cannot be cut into microbatches"
            )
        return self._name(source, copy)

    def _final(self, source: int) -> str:
        if self.is_copied[source]:
            return self.final[source]
        return self.graph.op_names[source]

    def _add(self, name: str, origin: int, copy: int, inputs: Sequence[str]) -> int:
        if name in self.index:
            raise GraphError(f"two ops of the unrolled graph are called {name!r}; rename one")
        new = self.index[name] = len(self.names)
        self.names.append(name)
        self.origin.append(origin)
        self.copy.append(copy)
        self.new_inputs.append([self.index[source] for source in dict.fromkeys(inputs)])
        return new

    def _graph(self) -> Graph:
        """The graph of all ops added, with the columns of their originals."""
        graph = self.graph
        origin = np.array(self.origin)
        columns: dict[str, Any] = {}
        for column in ("kinds", "dtypes", "modules", "allowed"):
            values = getattr(graph, column)
            columns[column] = [values[op] for op in self.origin]
        sizes = ("flop", "bytes_read", "bytes_written", "output_bytes", "workspace_bytes")
        for column in (*sizes, "phase", "counted"):
            columns[column] = getattr(graph, column)[origin].copy()
        size = self._resident_bytes()
        for new, kind in self.kind_of_sum.items():
            value = self.origin[new]
            nbytes = size[value]
            columns["kinds"][new] = kind
            columns["phase"][new] = BACKWARD
            columns["flop"][new] = nbytes / _bytes_each(graph.dtypes[value])
            columns["bytes_read"][new] = nbytes * len(self.new_inputs[new])
            columns["bytes_written"][new] = nbytes
            columns["output_bytes"][new] = nbytes
            columns["workspace_bytes"][new] = 0
            columns["counted"][new] = False
        group, group_names = self._groups()
        return Graph(
            name=graph.name,
            op_names=tuple(self.names),
            group=group,
            group_names=group_names,
            input_start=np.cumsum([0, *map(len, self.new_inputs)]),
            input_op=np.array([op for row in self.new_inputs for op in row], dtype=np.int32),
            **columns,
        )

    def _resident_bytes(self) -> dict[int, int]:
        """Bytes of each value that is added up: those of the parameter its update rewrites."""
        graph = self.graph
        size: dict[int, int] = {}
        for op in np.flatnonzero(graph.phase == UPDATE).tolist():
            residents = [source for source in self.inputs[op] if graph.is_parameter[source]]
            for value in self.inputs[op]:
                of = residents[0] if residents else value
                for added in self._added(value):
                    size[added] = int(graph.output_bytes[of])
        return size

    def _added(self, value: int) -> list[int]:
        """The copied ops that a value consists of: itself, or those of a sum made once."""
        if self.is_copied[value]:
            return [value]
        if self.graph.phase[value] != BACKWARD:
            return []
        return [each for source in self.inputs[value] for each in self._added(source)]

    def _groups(self) -> tuple[Array, tuple[str, ...]]:
        """The group of each new op, and the names of the groups.

        A group with a shared op keeps all its copies in one; any other becomes one for each copy.
        """
        graph = self.graph
        with_shared = {
            int(group)
            for op, group in enumerate(graph.group.tolist())
            if group >= 0 and not self.is_copied[op]
        }
        number: dict[str, int] = {}
        new_group = []
        for new, (origin, copy) in enumerate(zip(self.origin, self.copy, strict=True)):
            group = int(graph.group[origin])
            together = self.together and self.is_copied[origin]
            if new in self.kind_of_sum and not together:
                new_group.append(-1)
                continue
            if group < 0 and not together:
                new_group.append(-1)
                continue
            name = graph.group_names[group] if group >= 0 else f"{graph.op_names[origin]}#"
            if self.is_copied[origin] and not together and group not in with_shared:
                name = f"{name}#{copy}"
            new_group.append(number.setdefault(name, len(number)))
        return np.array(new_group, dtype=np.int32), tuple(number)


def _bytes_each(dtype: str) -> int:
    """Bytes of one number of a type, such as 4 for float32."""
    digits = re.search(r"\d+", dtype)
    return max(1, int(digits[0]) // 8) if digits else 1
