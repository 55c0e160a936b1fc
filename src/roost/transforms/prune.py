"""Drops ops that do nothing: dead ops, and free ops such as views.

A *free* op has one input, no FLOP, moves no bytes, needs no workspace, and has the phase forward or
backward. It is folded if its output has as many bytes as its source: its consumers then read the
source, and no transfer grows. A slice is smaller, and it is kept because the slice should be sent.

- A view of an activation goes to the op that made the activation. On one device the step takes as
  long as before and no more memory, since a view no longer counts as a second tensor. On several
  devices the tensor is sent as soon as it exists.
- A view of a parameter goes to its first consumer, so its consumers fetch the parameter. It is kept
  if an update reads it, because the update would then rewrite the parameter.

A *dead* op is free, has no output bytes, at most one input, and only dead consumers. Results of a
model have no consumers either, so an op with an output is never dead. A parameter without consumers
takes memory, and is kept unless `drop_unused_parameters`.

An op is folded only if its device rules allow all devices of its source: the same group or none,
and no fewer kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE, Graph
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds


@dataclass(frozen=True)
class Prune:
    """Folds free ops into their sources, and drops dead ops."""

    drop_unused_parameters: bool = False

    def apply(self, graph: Graph) -> Transformed:
        """The graph without its free and dead ops."""
        pruning = _Pruning(graph)
        counts = {
            "prune.folded": pruning.fold(),
            "prune.dropped": pruning.drop(self.drop_unused_parameters),
        }
        keeper = pruning.keepers()
        kept = np.flatnonzero(keeper == np.arange(graph.num_ops))
        number = np.full(graph.num_ops, -1)
        number[kept] = np.arange(len(kept))
        smaller = _subset(graph, kept, number, np.array(pruning.value))
        return Transformed(graph, smaller, number[keeper], counts)


class _Pruning:
    """The pruning of one graph, in plain lists: every loop goes over all ops once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = graph.num_ops
        sizes = (graph.flop, graph.bytes_read, graph.bytes_written, graph.workspace_bytes)
        works = np.logical_or.reduce([size > 0 for size in sizes])
        self.is_free: list[bool] = (~works & np.isin(graph.phase, (FORWARD, BACKWARD))).tolist()
        self.inputs = graph.input_lists()
        self.consumers = graph.consumer_lists()
        self.is_parameter: list[bool] = graph.is_parameter.tolist()
        self.is_update: list[bool] = (graph.phase == UPDATE).tolist()
        self.output: list[int] = graph.output_bytes.tolist()
        self.group: list[int] = graph.group.tolist()
        self.mask: list[int] = Kinds(graph).masks(graph).tolist()
        self.value = list(range(count))  # the op whose output it is, after folding
        self.keeper = list(range(count))  # the op that stands for it

    def fold(self) -> int:
        """Fold every free op that may be folded; return their number."""
        folded = 0
        for op in range(self.graph.num_ops):
            if not self.is_free[op] or len(self.inputs[op]) != 1:
                continue
            source = self.value[self.inputs[op][0]]
            if self.output[op] != self.output[source]:
                continue
            if self.is_parameter[source]:
                if not self._may_view_parameter(op):
                    continue
            elif self._may_join(op, source):
                self.keeper[op] = source
            else:
                continue
            self.value[op] = source
            folded += 1
        return folded

    def _may_join(self, op: int, keeper: int) -> bool:
        """Tell whether an op may run wherever the keeper may."""
        return self.group[op] in (-1, self.group[keeper]) and not self.mask[keeper] & ~self.mask[op]

    def _may_view_parameter(self, op: int) -> bool:
        readers = self.consumers[op]
        bound = self.group[op] >= 0 or bool(self.graph.allowed[op])
        return bool(readers) and not bound and not any(self.is_update[reader] for reader in readers)

    def drop(self, unused_parameters: bool) -> int:
        """Drop every dead op, last first; return their number."""
        readers = self._readers()
        anchor = self._anchor()
        dropped = 0
        for op in range(self.graph.num_ops - 1, -1, -1):
            if self.value[op] != op or readers[op] or self._does_something(op, unused_parameters):
                continue
            sources = [self.value[source] for source in self.inputs[op]]
            computed = [source for source in sources if not self.is_parameter[source]]
            bound = self.group[op] >= 0 or bool(self.graph.allowed[op])
            near = (source for source in computed if self._may_join(op, source))
            keeper = next(near, -1 if bound else anchor)
            if keeper < 0:
                continue
            self.keeper[op] = keeper
            dropped += 1
            for source in sources:
                readers[source] -= 1
        return dropped

    def _readers(self) -> list[int]:
        """The number of ops that read each value."""
        readers = [0] * self.graph.num_ops
        for op, sources in enumerate(self.inputs):
            if self.value[op] == op:
                for source in {self.value[source] for source in sources}:
                    readers[source] += 1
        return readers

    def _does_something(self, op: int, unused_parameters: bool) -> bool:
        if self.is_parameter[op]:
            return not unused_parameters
        return not self.is_free[op] or self.output[op] > 0 or len(self.inputs[op]) > 1

    def _anchor(self) -> int:
        """An op that is never dropped, to stand for ops without another keeper; -1 for none."""
        for op, value in enumerate(self.value):
            if value == op and not self.is_parameter[op] and self._does_something(op, True):
                return op
        return -1

    def keepers(self) -> Array:  # [ops]
        """The kept op that stands for each op."""
        keeper = self.keeper
        for op in range(self.graph.num_ops - 1, -1, -1):
            # A view of a parameter goes to its first consumer.
            if self.value[op] != op and keeper[op] == op:
                keeper[op] = keeper[self.consumers[op][0]]
        # An activation's view may view an op that is dropped itself.
        for op in range(self.graph.num_ops):
            while keeper[keeper[op]] != keeper[op]:
                keeper[op] = keeper[keeper[op]]
        return np.array(keeper)


def _subset(graph: Graph, kept: Array, number: Array, value: Array) -> Graph:
    """The graph of the kept ops, which read the values left after folding."""
    ops = kept.tolist()
    numbers = number.tolist()
    values = value.tolist()
    inputs = graph.input_lists()
    rows = [list(dict.fromkeys(numbers[values[source]] for source in inputs[op])) for op in ops]
    texts = ("op_names", "kinds", "dtypes", "modules", "allowed")
    arrays = ("phase", "flop", "bytes_read", "bytes_written", "output_bytes", "workspace_bytes")
    columns: dict[str, Any] = {
        name: tuple(getattr(graph, name)[op] for op in ops) for name in texts
    }
    columns |= {name: getattr(graph, name)[kept] for name in (*arrays, "counted", "group")}
    return replace(
        graph,
        **columns,
        input_start=np.cumsum([0, *map(len, rows)]),
        input_op=np.array([source for row in rows for source in row], dtype=np.int32),
    )
