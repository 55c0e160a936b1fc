"""Unrolls a step into microbatches: one graph in which every copy of an op can go anywhere.

The graph given is the step of one microbatch, captured at batch B / M. In the unrolled graph

- parameters, optimizer states and updates exist once;
- inputs, forward and backward ops exist M times, and copy 2 of the op `mm` is called `mm#2`;
- the M gradients of a parameter are added up before its update, by the ops `mm_7#sum1`,
  `mm_7#sum2` and so on. Copies of one block are added up first, block by block, so a device that
  has a block to itself sends one sum. `Microbatched.arranged` fits the blocks to a placement.

A tied weight has a gradient from each of its layers. Their sum is made once, after all copies; with
`late_sums` false for each copy, as PyTorch does it.

A pipeline, data parallelism, offloading and every mixture of them are placements of this graph.
Program order is that of gradient accumulation on one device: the whole of copy 0, then copy 1.

The sum of gradients is exact where the loss of the step is that of its batch, divided by M. Two
kinds of models give other numbers in microbatches. BatchNorm takes its statistics from the
microbatch: such a graph is only unrolled with `batch_statistics`, and the new running statistics
are then the mean over the copies. A loss that is no mean over the batch, such as one that ignores
padding, weighs microbatches alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roost.core.arrays import Array, frozen
from roost.core.graph import BACKWARD, INPUT, PARAMETER, UPDATE, Graph
from roost.core.placement import Placement
from roost.errors import InputError
from roost.transforms._unrolling import SHARED as SHARED
from roost.transforms._unrolling import Blocks, Unroller

_MOST_COPIES = 4096
_MOST_DIGITS = 5  # of the number of a copy
_MOST_TIED = 4  # layers that share a weight


@dataclass(frozen=True)
class Microbatch:
    """Unrolls the step of one microbatch into a step of `count` microbatches."""

    count: int
    together: bool = False  # all copies of an op share a group
    # Gradients are added up in so many blocks of neighbouring copies first.
    blocks: int = 1
    shared_inputs: tuple[str, ...] = ()  # inputs that every copy reads whole, by op name
    batch_statistics: bool = False  # unroll graphs with BatchNorm too
    # Add up the gradients that a tied weight has from its layers once, after all copies.
    late_sums: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if self.count > _MOST_COPIES:
            raise InputError(f"count is {self.count}; at most {_MOST_COPIES} copies are made")

    def apply(self, graph: Graph) -> Microbatched:
        """The unrolled graph."""
        if not self.batch_statistics and self.count > 1:
            refuse_batch_statistics(graph)
        rows = np.array_split(np.arange(self.count), min(self.blocks, self.count))
        blocks: Blocks = tuple(tuple(row.tolist()) for row in rows)
        return _unrolled(graph, self, {}, blocks)


@dataclass(frozen=True, eq=False)
class Microbatched:
    """An unrolled graph: what each op is a copy of, and the way in and out for placements."""

    original: Graph
    graph: Graph
    settings: Microbatch
    origin: Array  # [ops] op of the original; of a sum, the op whose copies it adds up
    copy: Array  # [ops] the microbatch; SHARED for parameters, updates and sums
    is_sum: Array  # [ops] true for ops that the original does not have
    # Value that is added up, an op of the original -> its final sum in the graph.
    total: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.graph.num_ops
        for name in ("origin", "copy"):
            object.__setattr__(self, name, frozen(getattr(self, name), np.int64, (count,), name))

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return self.settings.count

    def expand(self, placement: Placement) -> Placement:
        """Every copy where a placement of the original has its op; one copy after the other."""
        if placement.num_ops != self.original.num_ops:
            raise InputError(
                f"the placement has {placement.num_ops} devices; the step of one microbatch has "
                f"{self.original.num_ops} ops"
            )
        if placement.graph and placement.graph != self.original.digest:
            raise InputError(
                f"the placement was made for graph {placement.graph}, not for "
                f"{self.original.digest}"
            )
        priority = placement.priority
        if priority is not None:
            later = float(np.ptp(priority)) + 1.0
            copy = self._latest_copies()
            priority = priority[self.origin] - later * copy
        return replace(
            placement,
            device=placement.device[self.origin],
            priority=priority,
            graph=self.graph.digest if placement.graph else "",
        )

    def _latest_copies(self) -> Array:  # [ops]
        """The copy of each op; of a sum its last input's, and after all copies what exists once."""
        copy = np.where(self.copy == SHARED, self.count, self.copy)
        for op in np.flatnonzero(self.is_sum).tolist():
            copy[op] = copy[self.graph.inputs_of(op)].max()
        return copy

    def op_time(self, original: Array, estimated: Array) -> Array:  # [ops, devices] seconds
        """Times of copies from `original` [original ops, devices], of sums from `estimated`."""
        if len(original) != self.original.num_ops or len(estimated) != self.graph.num_ops:
            raise InputError(
                f"op_time is of {len(original)} and {len(estimated)} ops; it must be of "
                f"{self.original.num_ops} and {self.graph.num_ops}"
            )
        return np.where(self.is_sum[:, None], estimated, np.asarray(original)[self.origin])

    def arranged(self, placement: Placement) -> tuple[Microbatched, Placement]:
        """The same step with sums that suit a placement, and the placement of that graph.

        Each device adds up the gradients it has; the device of the update adds up the sums, its own
        first.
        """
        home = self._homes(placement.device)
        device = placement.device
        by_value: dict[int, Blocks] = {}
        for value, copies in self._copies_of_values().items():
            where: defaultdict[int, list[int]] = defaultdict(list)
            for copy, op in enumerate(copies):
                where[int(device[op])].append(copy)
            own_first = sorted(where, key=lambda each: (each != home[value], where[each][0]))
            by_value[value] = tuple(tuple(where[each]) for each in own_first)
        other = _unrolled(self.original, self.settings, by_value, ())
        return other, self._moved_to(other, placement, home)

    def _homes(self, device: Array) -> dict[int, int]:
        """Value that is added up -> the device of the first op that reads its sum."""
        homes = {}
        for value, total in self.total.items():
            readers = self.graph.consumers_of(total)
            homes[value] = int(device[readers[0] if len(readers) else total])
        return homes

    def _copies_of_values(self) -> dict[int, list[int]]:
        """Value that is added up -> its copies in the graph."""
        copies: dict[int, list[int]] = {value: [] for value in self.total}
        for op in np.flatnonzero(self.copy != SHARED).tolist():
            if int(self.origin[op]) in copies:
                copies[int(self.origin[op])].append(op)
        return copies

    def _moved_to(
        self, other: Microbatched, placement: Placement, home: Mapping[int, int]
    ) -> Placement:
        """The placement for the same step with sums in another arrangement."""
        at = {name: op for op, name in enumerate(self.graph.op_names)}
        kept = ~other.is_sum
        names = other.graph.op_names
        old = np.array([at[name] for name, keep in zip(names, kept, strict=True) if keep])
        device = np.zeros(other.graph.num_ops, dtype=np.int32)
        device[kept] = placement.device[old]
        priority = None
        if placement.priority is not None:
            priority = np.zeros(other.graph.num_ops)
            priority[kept] = placement.priority[old]
        for op in np.flatnonzero(other.is_sum).tolist():
            inputs = other.graph.inputs_of(op)
            places = set(device[inputs].tolist())
            alone = len(places) == 1
            device[op] = places.pop() if alone else home[int(other.origin[op])]
            if priority is not None:
                priority[op] = priority[inputs].min()
        if priority is not None:  # equal priorities go in program order
            priority = _before_readers(other.graph, priority)
        digest = other.graph.digest if placement.graph else ""
        return replace(placement, device=device, priority=priority, graph=digest)

    def __repr__(self) -> str:
        return f"Microbatched({self.original!r} x {self.count} -> {self.graph.num_ops} ops)"


def copies_of(graph: Graph) -> Array:  # [ops]
    """The microbatch of each op by its name; SHARED for ops that exist once.

    `mul#2` is a copy if `mul#0` and all others are there too. A captured graph may have an op of
    such a name: the second one that is called `mul`.
    """
    found: dict[str, dict[int, int]] = {}  # name without its number -> copy -> op
    for op, name in enumerate(graph.op_names):
        base, mark, tail = name.rpartition("#")
        if mark and tail.isascii() and tail.isdecimal() and len(tail) <= _MOST_DIGITS:
            found.setdefault(base, {})[int(tail)] = op
    whole = {base: ops for base, ops in found.items() if set(ops) == set(range(len(ops)))}
    count = max(map(len, whole.values()), default=0)
    copies = np.full(graph.num_ops, SHARED, dtype=np.int64)
    for ops in whole.values():
        if len(ops) == count:
            copies[list(ops.values())] = list(ops)
    return copies


def refuse_batch_statistics(graph: Graph) -> None:
    """Raise if what a layer does depends on the batch, which microbatches change."""
    layers = batch_norms(graph)
    if layers:
        raise InputError(
            f"BatchNorm in {_shown(layers)} takes its statistics from the batch: in microbatches "
            "the model trains a little differently, as it does under data parallelism; allow it "
            "with batch_statistics"
        )
    buffers = changed_buffers(graph)
    if buffers:
        raise InputError(
            f"each call of the model changes {_shown(buffers)}: several microbatches under way all "
            "see the old value, and the new one is their mean; allow it with batch_statistics"
        )


def batch_statistics(graph: Graph) -> list[str]:
    """The modules and buffers through which a sample depends on others."""
    return batch_norms(graph) or changed_buffers(graph)


def batch_norms(graph: Graph) -> list[str]:
    """The modules that take statistics from the batch."""
    marks = ("batch_norm", "batchnorm")
    layers = [
        module or name
        for kind, module, name in zip(graph.kinds, graph.modules, graph.op_names, strict=True)
        if any(mark in kind.lower() for mark in marks) and "no_training" not in kind
    ]
    return list(dict.fromkeys(layers))


def changed_buffers(graph: Graph) -> list[str]:
    """The buffers that a step overwrites."""
    found = []
    for op in np.flatnonzero(graph.phase == UPDATE).tolist():
        if graph.kinds[op] == "copy":
            residents = [each for each in graph.inputs_of(op).tolist() if graph.is_parameter[each]]
            found += [graph.op_names[each] for each in residents[:1]]
    return list(dict.fromkeys(found))


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def late_sums(graph: Graph, copied: Array) -> list[int]:
    """The ops that add up the gradients a weight has from a few unlike modules, for updates alone.

    Parts of one gradient, such as those of stacked experts, and those of the steps of an RNN are
    added up in each copy: each has the size of the whole. `copied` [ops]: the ops of which each
    microbatch has one.
    """
    found: set[int] = set()
    consumers = graph.consumer_lists()
    inputs = graph.input_lists()

    def parts(op: int) -> list[str]:
        """The modules whose gradients an op adds up."""
        sources = inputs[op]
        adds = graph.kinds[op] == "add" and len(sources) == 2
        if not adds or bool((graph.phase[sources] != BACKWARD).any()) or not copied[op]:
            return [graph.modules[op]]
        return parts(sources[0]) + parts(sources[1])

    for op in reversed([op for op, kind in enumerate(graph.kinds) if kind == "add"]):
        sources = inputs[op]
        readers = consumers[op]
        whole = len(sources) == 2 and bool(copied[sources].all())
        gradients = whole and bool((graph.phase[[op, *sources]] == BACKWARD).all())
        last = all(reader in found or graph.phase[reader] == UPDATE for reader in readers)
        if gradients and readers and last:
            modules = parts(op)
            if len(set(modules)) == len(modules) <= _MOST_TIED:
                found.add(op)
    return sorted(found)


def _before_readers(graph: Graph, priority: Array) -> Array:
    """Priorities no higher than those of the inputs of each op."""
    lowered = priority.tolist()
    for op, sources in enumerate(graph.input_lists()):
        for source in sources:
            if not graph.is_parameter[source] and lowered[source] < lowered[op]:
                lowered[op] = lowered[source]
    return np.array(lowered)


def _unrolled(
    graph: Graph, settings: Microbatch, by_value: Mapping[int, Blocks], otherwise: Blocks
) -> Microbatched:
    """The unrolled graph whose gradients are added up in the given blocks."""
    is_copied = _is_copied(graph, settings)
    if settings.count == 1:
        every = np.arange(graph.num_ops)
        copy = np.where(is_copied, 0, SHARED)
        return Microbatched(graph, graph, settings, every, copy, np.zeros(graph.num_ops, bool))
    unroller = Unroller(graph, settings.count, is_copied, settings.together, by_value, otherwise)
    unrolled = unroller.made()
    is_sum = np.zeros(unrolled.num_ops, dtype=bool)
    is_sum[list(unroller.kind_of_sum)] = True
    total = {value: unrolled.index_of(name) for value, name in unroller.final.items()}
    origin = np.array(unroller.origin)
    copies = np.array(unroller.copy)
    return Microbatched(graph, unrolled, settings, origin, copies, is_sum, total)


def _is_copied(graph: Graph, settings: Microbatch) -> Array:  # [ops] bool
    for name in settings.shared_inputs:
        if graph.phase[graph.index_of(name)] != INPUT:
            raise InputError(f"shared_inputs has {name!r}, which is no input of the graph")
    copied = ~np.isin(graph.phase, (PARAMETER, UPDATE))
    copied[[graph.index_of(name) for name in settings.shared_inputs]] = False
    if settings.late_sums:
        copied[late_sums(graph, copied)] = False
    return copied
