"""The step of one microbatch inside an unrolled problem: its chain of elements and their costs.

The ops of copy 0, and the ops that exist once, are the base. An element is a place in the chain of
the forward pass: the forward op beside which an op stands. Work of an element has a kind: forward,
backward, or gradient of weights. The last kind leads to updates alone, so it may run later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, UPDATE
from roost.core.problem import Problem
from roost.placers._shared.layers import Layers
from roost.transforms.microbatch import SHARED, copies_of, late_sums

FORWARD_WORK, BACKWARD_WORK, WEIGHT_WORK, ONCE = range(4)  # kinds of work
NUM_KINDS = 3  # that tasks are made of


class TiedWeight(NamedTuple):
    """A weight that two elements read, such as an embedding that is the output layer too."""

    light: int  # the element with less work
    heavy: int
    nbytes: float
    bases: tuple[int, ...]  # that make gradients of it in neither element


class Moved(NamedTuple):
    """Weights or gradients that go between the element of their home and others."""

    home: int  # element
    others: tuple[int, ...]  # elements
    nbytes: float


@dataclass(frozen=True, eq=False)
class CopiedStep:
    """A problem as copies of a base step; a step that is not unrolled has one copy."""

    problem: Problem
    copy: Array  # [ops] the microbatch, or SHARED
    base: Array  # [ops] number of the base op; of a sum the one that it adds up
    is_sum: Array  # [ops] bool
    first: Array  # [bases] the op that stands for it: of copy 0, or the only one
    element: Array  # [bases] place in the chain
    kind: Array  # [bases] of work

    @staticmethod
    def of(problem: Problem) -> CopiedStep:
        """The view of a problem, made once for it."""
        kept: CopiedStep | None = vars(problem).get("_copied_step")
        if kept is None:
            kept = vars(problem)["_copied_step"] = _copied_step(problem)
        return kept

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return int(self.copy.max(initial=0)) + 1

    @property
    def num_bases(self) -> int:
        return len(self.first)

    @cached_property
    def num_elements(self) -> int:
        return int(self.element.max()) + 1

    @cached_property
    def op_time(self) -> Array:  # [bases, devices] seconds, infinite where it may not run
        return np.where(self.problem.allowed, self.problem.op_time, np.inf)[self.first]

    @cached_property
    def work(self) -> Array:  # [kinds, elements, devices] seconds of one microbatch
        found = np.zeros((NUM_KINDS, self.num_elements, self.problem.cluster.num_devices))
        times = np.where(np.isinf(self.op_time), self._fastest[:, None], self.op_time)
        for kind in range(NUM_KINDS):
            ops = self.kind == kind
            np.add.at(found[kind], self.element[ops], times[ops])
        return found

    @cached_property
    def _fastest(self) -> Array:  # [bases]
        return np.asarray(self.op_time.min(axis=1))

    @cached_property
    def resident_bytes(self) -> Array:  # [elements] of parameters and states
        graph = self.problem.graph
        found = np.zeros(self.num_elements)
        parameters = graph.is_parameter[self.first]
        size = graph.output_bytes[self.first]
        np.add.at(found, self.element[parameters], size[parameters])
        return found

    @cached_property
    def weight_reads(self) -> list[Moved]:
        """Weights, with the elements that read them."""
        graph = self.problem.graph
        source, target = self.edges
        read = graph.is_parameter[self.first[source]] & (self.kind[target] != ONCE)
        return self._moved(source[read], source[read], target[read])

    @cached_property
    def gradient_sends(self) -> list[Moved]:
        """Gradients, with the elements that make them; home is that of the update."""
        source, target = self.edges
        sent = (self.kind[source] != ONCE) & (self.kind[target] == ONCE)
        return self._moved(source[sent], target[sent], source[sent])

    def _moved(self, tensor: Array, home: Array, away: Array) -> list[Moved]:
        """Tensors with one home and the same other elements, put together."""
        elements: dict[tuple[int, int], set[int]] = {}
        for base, one, other in zip(tensor.tolist(), home.tolist(), away.tolist(), strict=True):
            elements.setdefault((base, int(self.element[one])), set()).add(int(self.element[other]))
        size = self.problem.graph.output_bytes[self.first]
        total: dict[tuple[int, tuple[int, ...]], float] = {}
        for (base, place), others in elements.items():
            key = place, tuple(sorted(others))
            total[key] = total.get(key, 0.0) + float(size[base])
        return [Moved(*key, nbytes) for key, nbytes in total.items()]

    @cached_property
    def straddling_bytes(self) -> Array:  # [elements]
        """Bytes of weights and gradients that cross behind each element, once in a step.

        Those of tied weights are left out: every cut has them.
        """
        tied = {each for pair in self.tied_weights for each in (pair.light, pair.heavy)}
        change = np.zeros(self.num_elements + 1)
        for moved in (*self.weight_reads, *self.gradient_sends):
            places = {moved.home, *moved.others}
            if len(places & tied) < 2:
                change[min(places)] += moved.nbytes
                change[max(places)] -= moved.nbytes
        return np.cumsum(change)[: self.num_elements]

    @cached_property
    def tied_weights(self) -> list[TiedWeight]:
        """The weights that several elements read, each with a light element."""
        graph = self.problem.graph
        source, target = self.edges
        read = graph.is_parameter[self.first[source]] & (self.kind[target] == FORWARD_WORK)
        pairs = np.stack([source[read], self.element[target[read]]])
        readers: dict[int, list[int]] = {}
        for parameter, element in np.unique(pairs, axis=1).T.tolist():
            readers.setdefault(parameter, []).append(element)
        work = self.work.sum(axis=0).min(axis=1)
        found = []
        for parameter, elements in readers.items():
            if len(elements) == 1:
                continue
            heavy = max(elements, key=lambda element: work[element])
            size = float(graph.output_bytes[self.first[parameter]])
            bases = [b for b in self._gradients_of(parameter) if self.element[b] not in elements]
            found += [
                TiedWeight(each, heavy, size, tuple(bases)) for each in elements if each != heavy
            ]
        return found

    def _gradients_of(self, parameter: int) -> list[int]:  # bases
        """The ops whose outputs are added up once to the gradient of a parameter."""
        graph = self.problem.graph
        updates = [
            op
            for op in graph.consumers_of(self.first[parameter]).tolist()
            if graph.phase[op] == UPDATE
        ]
        late = [op for update in updates for op in graph.inputs_of(update).tolist()]
        made: set[int] = set()
        while late:
            op = late.pop()
            if graph.phase[op] == BACKWARD:
                once = self.copy[op] == SHARED and not self.is_sum[op]
                late += graph.inputs_of(op).tolist() if once else []
                made |= set() if once else {int(self.base[op])}
        return sorted(made)

    @cached_property
    def saved_bytes(self) -> Array:  # [elements] of activations that wait for the backward pass
        graph = self.problem.graph
        source, target = self.edges
        held = (self.kind[source] == FORWARD_WORK) & np.isin(
            self.kind[target], (BACKWARD_WORK, WEIGHT_WORK)
        )
        ops = np.unique(source[held])
        found = np.zeros(self.num_elements)
        np.add.at(found, self.element[ops], graph.output_bytes[self.first[ops]])
        return found

    @cached_property
    def edges(self) -> tuple[Array, Array]:
        """Tensors of the base: makers and readers, [edges] bases each."""
        graph = self.problem.graph
        source = graph.input_op
        target = graph.edge_target
        inside = self._is_first[source] & self._is_first[target]
        return self.base[source[inside]], self.base[target[inside]]

    @cached_property
    def _is_first(self) -> Array:  # [ops] bool
        found = np.zeros(self.problem.graph.num_ops, dtype=bool)
        found[self.first] = True
        return found

    @cached_property
    def crossing_bytes(self) -> tuple[Array, Array]:
        """Bytes of forward and of backward tensors that cross behind each element, [elements]."""
        graph = self.problem.graph
        source, target = self.edges
        moving = ~graph.is_parameter[self.first[source]] & (self.kind[target] != ONCE)
        source = source[moving]
        target = target[moving]
        found = []
        for ahead in (True, False):
            here = self.element[source]
            there = self.element[target]
            goes = there > here if ahead else there < here
            # A tensor is sent once, as far as its farthest reader.
            far = np.full(self.num_bases, -1 if ahead else self.num_elements)
            (np.maximum if ahead else np.minimum).at(far, source[goes], there[goes])
            ops = np.unique(source[goes])
            low, high = self.element[ops], far[ops]
            if not ahead:
                low, high = high, low
            change = np.zeros(self.num_elements + 1)
            np.add.at(change, low, graph.output_bytes[self.first[ops]])
            np.add.at(change, high, -graph.output_bytes[self.first[ops]])
            found.append(np.cumsum(change)[: self.num_elements])
        return found[0], found[1]


def _copied_step(problem: Problem) -> CopiedStep:
    graph = problem.graph
    copy = copies_of(graph)
    if not (copy > 0).any():  # a step that is not unrolled
        copied = ~(graph.is_parameter | (graph.phase == UPDATE))
        copied[late_sums(graph, copied)] = False
        copy = np.where(copied, 0, SHARED)
    number: dict[str, int] = {}
    base = np.empty(graph.num_ops, dtype=np.int64)
    is_sum = np.zeros(graph.num_ops, dtype=bool)
    first = []
    for op, (name, which) in enumerate(zip(graph.op_names, copy.tolist(), strict=True)):
        plain, mark, tail = name.rpartition("#")
        added = mark and which == SHARED and (tail.startswith("sum") or tail == "mean")
        if added and plain in number:
            is_sum[op] = True
            base[op] = number[plain]
            continue
        key = plain if mark and which != SHARED else name
        if key not in number:
            number[key] = len(number)
            first.append(op)
        base[op] = number[key]
    leaders = np.array(first)
    element = _elements(problem, base, leaders)
    kind = _kinds(problem, base, leaders, copy, element)
    return CopiedStep(problem, copy, base, is_sum, leaders, element, kind)


def _elements(problem: Problem, base: Array, first: Array) -> Array:  # [bases]
    """The place of each base op in the chain: by layer, and within one by forward op."""
    layers = Layers.of(problem.graph)
    key = layers.layer[first] * len(first) + base[layers.position[first]]
    _, element = np.unique(key, return_inverse=True)
    return np.asarray(element.ravel())


# [bases].
def _kinds(problem: Problem, base: Array, first: Array, copy: Array, element: Array) -> Array:
    graph = problem.graph
    phase = graph.phase[first]
    kind = np.where(phase == BACKWARD, BACKWARD_WORK, FORWARD_WORK)
    kind[copy[first] == SHARED] = ONCE
    consumers = graph.consumer_lists()
    # True for updates and sums, and for ops of one element that lead to these alone.
    late = (copy == SHARED) & ~graph.is_parameter
    for op in first[::-1].tolist():
        here = base[op]
        readers = consumers[op]
        if phase[here] == BACKWARD and readers:
            late[op] = all(
                late[reader] and (copy[reader] == SHARED or element[base[reader]] == element[here])
                for reader in readers
            )
    kind[late[first] & (kind == BACKWARD_WORK)] = WEIGHT_WORK
    return kind
