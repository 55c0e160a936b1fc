"""Drops what does nothing: dead ops, and free ops such as views, which become one with what they
look at.

A *free* op has one input, no FLOP, moves no bytes, needs no workspace, and is of phase forward or
backward. It is folded where its output has as many bytes as what it looks at: then its consumers
read that instead, and no transfer grows. A slice, which is smaller, is kept, since it is the slice
that should be sent. Folding a view of an activation puts it with the op that made the activation;
on one device the step takes as long as before, and no more memory, since a view no longer counts as
a second tensor. On several devices the tensor is sent as soon as it exists, not when its view is
reached. A view of a parameter goes with its first consumer, so that its consumers fetch the
parameter, as resident tensors are; it is kept where an update reads it, which would rewrite a
parameter it does not rewrite now.

A *dead* op is free, has no output bytes, at most one input and no consumer that is not dead.
Results of a model have no consumers either, so an op with an output is never dead. A parameter
without consumers takes memory, and is kept unless `drop_unused_parameters`.

Ops are only folded where their device rules allow the device they then share: same group or none,
and kinds no fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE, Graph
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds


@dataclass(frozen=True)
class Prune:
    """Folds free ops into what they look at, and drops dead ones."""

    drop_unused_parameters: bool = False

    def apply(self, graph: Graph) -> Transformed:
        work = _Work(graph)
        folded = work.fold()
        dead = work.drop(self.drop_unused_parameters)
        host = work.hosts()
        kept = np.flatnonzero(host == np.arange(graph.num_ops))
        number = np.full(graph.num_ops, -1)
        number[kept] = np.arange(len(kept))
        counts = {"prune.folded": folded, "prune.dropped": dead}
        return Transformed(
            graph, _subset(graph, kept, number, np.array(work.value)), number[host], counts
        )


class _Work:
    """One pruning of one graph, in plain lists: every loop here goes over all ops once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = graph.num_ops
        works = (
            (graph.flop > 0)
            | (graph.bytes_read > 0)
            | (graph.bytes_written > 0)
            | (graph.workspace_bytes > 0)
        )
        self.is_free: list[bool] = (~works & np.isin(graph.phase, (FORWARD, BACKWARD))).tolist()
        self.inputs, self.consumers = graph.input_lists(), graph.consumer_lists()
        self.is_parameter: list[bool] = graph.is_parameter.tolist()
        self.is_update: list[bool] = (graph.phase == UPDATE).tolist()
        self.output: list[int] = graph.output_bytes.tolist()
        self.group: list[int] = graph.group.tolist()
        self.mask: list[int] = Kinds(graph).masks(graph).tolist()
        self.value = list(range(count))  # the op whose output it is, after folding
        self.host = list(range(count))  # the op that stands for it

    def fold(self) -> int:
        """Fold every free op that may be, and say how many."""
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
                self.host[op] = source
            else:
                continue
            self.value[op] = source
            folded += 1
        return folded

    def _may_join(self, op: int, host: int) -> bool:
        """Whether an op may be wherever the host is, and binds the host to nothing new."""
        return self.group[op] in (-1, self.group[host]) and not self.mask[host] & ~self.mask[op]

    def _may_view_parameter(self, op: int) -> bool:
        readers = self.consumers[op]
        bound = self.group[op] >= 0 or bool(self.graph.allowed[op])
        return bool(readers) and not bound and not any(self.is_update[reader] for reader in readers)

    def drop(self, unused_parameters: bool) -> int:
        """Drop every dead op, last first, and say how many."""
        readers = self._readers()
        anchor = self._anchor()
        dropped = 0
        for op in range(self.graph.num_ops - 1, -1, -1):
            if self.value[op] != op or readers[op] or self._does_something(op, unused_parameters):
                continue
            sources = [self.value[source] for source in self.inputs[op]]
            near = [
                source
                for source in sources
                if not self.is_parameter[source] and self._may_join(op, source)
            ]
            bound = self.group[op] >= 0 or bool(self.graph.allowed[op])
            host = near[0] if near else -1 if bound else anchor
            if host < 0:
                continue
            self.host[op] = host
            dropped += 1
            for source in sources:
                readers[source] -= 1
        return dropped

    def _readers(self) -> list[int]:
        """How many ops read each value."""
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
        """An op that is never dropped, to stand for those that have no other; -1 where there is
        none."""
        for op in range(self.graph.num_ops):
            if (
                self.value[op] == op
                and not self.is_parameter[op]
                and self._does_something(op, True)
            ):
                return op
        return -1

    def hosts(self) -> Array:  # [ops]
        """The kept op that stands for each op."""
        for op in range(self.graph.num_ops - 1, -1, -1):
            # A view of a parameter goes with its first consumer.
            if self.value[op] != op and self.host[op] == op:
                self.host[op] = self.host[self.consumers[op][0]]
        # An activation's view may be of an op that is dropped itself.
        for op in range(self.graph.num_ops):
            while self.host[self.host[op]] != self.host[op]:
                self.host[op] = self.host[self.host[op]]
        return np.array(self.host)


def _subset(graph: Graph, kept: Array, number: Array, value: Array) -> Graph:
    """The graph of the kept ops, which read the values that folding has left."""
    ops = kept.tolist()
    numbers, values, inputs = number.tolist(), value.tolist(), graph.input_lists()
    rows = [list(dict.fromkeys(numbers[values[source]] for source in inputs[op])) for op in ops]
    return replace(
        graph,
        op_names=tuple(graph.op_names[op] for op in ops),
        kinds=tuple(graph.kinds[op] for op in ops),
        dtypes=tuple(graph.dtypes[op] for op in ops),
        modules=tuple(graph.modules[op] for op in ops),
        allowed=tuple(graph.allowed[op] for op in ops),
        phase=graph.phase[kept],
        flop=graph.flop[kept],
        bytes_read=graph.bytes_read[kept],
        bytes_written=graph.bytes_written[kept],
        output_bytes=graph.output_bytes[kept],
        workspace_bytes=graph.workspace_bytes[kept],
        group=graph.group[kept],
        input_start=np.cumsum([0, *map(len, rows)]),
        input_op=np.array([source for row in rows for source in row], dtype=np.int32),
    )
