"""The graph: ops in program order and the tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from roost.core.arrays import Array, check_figures, digest, frozen
from roost.core.saved import Saved
from roost.errors import GraphError, InputError, UnknownName

PHASES = ("parameter", "input", "forward", "backward", "update")
PARAMETER, INPUT, FORWARD, BACKWARD, UPDATE = range(5)

# Sizes of several kinds are added up in int64: outputs, workspaces, copies, windows.
_MOST_BYTES = 2.0**59


@dataclass(frozen=True, eq=False)
class Graph(Saved):
    """A directed acyclic graph of ops, as arrays in program order: inputs before consumers.

    A parameter (a weight, a buffer, an optimizer state) is an op of phase `parameter`: it takes no
    time, its output is the weight, and it is resident for the whole step. An op of phase `update`
    rewrites every parameter it reads.
    """

    name: str
    op_names: tuple[str, ...]  # [ops] unique
    kinds: tuple[str, ...]  # [ops] operation, such as "conv2d"
    dtypes: tuple[str, ...]  # [ops] type of its numbers, such as "float32"
    # [ops] path of the module it came from, or ""; layer@3 is the fourth call of one.
    modules: tuple[str, ...]
    allowed: tuple[tuple[str, ...], ...]  # [ops] device kinds it may run on; () is any
    phase: Array  # [ops] index in PHASES
    flop: Array  # [ops] FLOP
    bytes_read: Array  # [ops] bytes
    bytes_written: Array  # [ops] bytes
    output_bytes: Array  # [ops] bytes held by its consumers' devices, and sent to them
    workspace_bytes: Array  # [ops] bytes held while it runs
    group_names: tuple[str, ...]  # [groups]
    group: Array  # [ops] index in group_names; -1 where the op may go anywhere
    input_start: Array  # [ops + 1] inputs of op i are input_op[input_start[i]:input_start[i + 1]]
    input_op: Array  # [edges] in the order the op takes them, without repeats
    # [ops] true where FLOP are a count of elements, for want of a formula; no part of the digest
    counted: Array = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for column in ("op_names", "kinds", "dtypes", "modules", "group_names"):
            object.__setattr__(self, column, tuple(getattr(self, column)))
        object.__setattr__(self, "allowed", tuple(map(tuple, self.allowed)))
        count = len(self.op_names)
        if count == 0:
            raise GraphError(f"graph {self.name!r} has no ops; add at least one")
        for column in ("kinds", "dtypes", "modules", "allowed"):
            if len(getattr(self, column)) != count:
                raise GraphError(
                    f"{column} has {len(getattr(self, column))} entries for {count} ops"
                )
        counted = np.zeros(count, dtype=bool)
        counted[:] = self.counted if len(self.counted) else False
        counted.flags.writeable = False
        object.__setattr__(self, "counted", counted)
        self._freeze("phase", np.int8, count)
        self._freeze("group", np.int32, count)
        self._freeze("flop", np.float64, count)
        for column in ("bytes_read", "bytes_written", "output_bytes", "workspace_bytes"):
            self._freeze(column, np.int64, count)
            check_figures(getattr(self, column), column, self.op_names)
            if getattr(self, column).sum(dtype=np.float64) > _MOST_BYTES:
                raise GraphError(f"{column} add up to more than 2**59; no machine holds that")
        check_figures(self.flop, "flop", self.op_names)
        self._freeze("input_start", np.int64, count + 1)
        if self.input_start[0] != 0 or (self.input_start[1:] < self.input_start[:-1]).any():
            raise GraphError("input_start must go up from 0")
        self._freeze("input_op", np.int32, int(self.input_start[-1]))
        self._check_names()
        self._number_groups()
        self._check_edges()

    def _freeze(self, column: str, dtype: type[np.generic], length: int) -> None:
        object.__setattr__(self, column, frozen(getattr(self, column), dtype, (length,), column))

    def _check_names(self) -> None:
        if len(set(self.op_names)) != self.num_ops:
            seen: set[str] = set()
            twice = next(n for n in self.op_names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
            raise GraphError(f"two ops are called {twice!r}; op names must differ")
        if "" in self.op_names:
            raise GraphError(f"op {self.op_names.index('')} has an empty name")
        if self.phase.min() < 0 or self.phase.max() >= len(PHASES):
            raise GraphError(f"a phase is none of {', '.join(PHASES)}")
        if self.group.min() < -1 or self.group.max() >= len(self.group_names):
            raise GraphError(f"a group is not among the {len(self.group_names)} of this graph")

    def _number_groups(self) -> None:
        """Number groups in the order of their first ops, as a file does."""
        if len(set(self.group_names)) != len(self.group_names):
            raise GraphError("two groups have the same name; group names must differ")
        used = list(dict.fromkeys(self.group[self.group >= 0].tolist()))
        if used != list(range(len(self.group_names))):
            number = np.full(len(self.group_names) + 1, -1, dtype=np.int32)
            number[used] = np.arange(len(used))
            object.__setattr__(self, "group_names", tuple(self.group_names[old] for old in used))
            object.__setattr__(
                self, "group", frozen(number[self.group], np.int32, (self.num_ops,), "group")
            )

    def _check_edges(self) -> None:
        if len(self.input_op) and (self.input_op.min() < 0 or self.input_op.max() >= self.num_ops):
            raise GraphError(f"an edge starts at no op; ops are 0 to {self.num_ops - 1}")
        backwards = np.flatnonzero(self.input_op >= self.edge_target)
        if len(backwards):
            source = int(self.input_op[backwards[0]])
            target = int(self.edge_target[backwards[0]])
            if source == target:
                raise GraphError(f"op {self.op_names[source]!r} takes its own output as an input")
            if cycle := self._find_cycle():
                shown = [repr(self.op_names[op]) for op in cycle]
                if len(shown) > 12:
                    shown[6:-5] = [f"... {len(shown) - 11} more ..."]
                path = " -> ".join(shown)
                raise GraphError(f"the graph has a cycle: {path}; remove one of these edges")
            raise GraphError(
                f"op {self.op_names[target]!r} comes before its input {self.op_names[source]!r}; "
                "list the ops in the order they run, inputs first"
            )
        pairs = self.edge_target.astype(np.int64) * self.num_ops + self.input_op
        if len(np.unique(pairs)) != len(pairs):
            repeated, counts = np.unique(pairs, return_counts=True)
            op = int(repeated[counts > 1][0]) // self.num_ops
            raise GraphError(f"op {self.op_names[op]!r} has the same input twice; mention it once")
        fed = np.flatnonzero((self.phase == PARAMETER) & (np.diff(self.input_start) > 0))
        if len(fed):
            raise GraphError(
                f"parameter {self.op_names[fed[0]]!r} has inputs; only other phases take any"
            )

    def _find_cycle(self) -> list[int]:
        """Ops along one cycle, the first repeated at the end; empty if there is no cycle."""
        waiting = np.diff(self.input_start)
        ready = np.flatnonzero(waiting == 0).tolist()
        waiting = waiting.tolist()
        while ready:
            for target in self.consumers_of(ready.pop()).tolist():
                waiting[target] -= 1
                if waiting[target] == 0:
                    ready.append(target)
        left = {op for op, count in enumerate(waiting) if count > 0}
        if not left:
            return []
        path: dict[int, None] = {}
        op = min(left)
        while op not in path:
            path[op] = None
            op = next(source for source in self.inputs_of(op).tolist() if source in left)
        return [op, *reversed(list(path)[list(path).index(op) :])]

    @property
    def num_ops(self) -> int:
        return len(self.op_names)

    @property
    def num_edges(self) -> int:
        return len(self.input_op)

    @property
    def num_groups(self) -> int:
        return len(self.group_names)

    @cached_property
    def is_parameter(self) -> Array:  # [ops]
        return np.equal(self.phase, PARAMETER)

    @cached_property
    def edge_target(self) -> Array:  # [edges] the consumer; input_op is the producer
        return np.repeat(np.arange(self.num_ops, dtype=np.int32), np.diff(self.input_start))

    @cached_property
    def consumer_start(self) -> Array:  # [ops + 1] as input_start, for consumer_op
        counts = np.bincount(self.input_op, minlength=self.num_ops)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def consumer_op(self) -> Array:  # [edges] in program order
        return self.edge_target[np.argsort(self.input_op, kind="stable")]

    def inputs_of(self, op: int) -> Array:
        return self.input_op[self.input_start[op] : self.input_start[op + 1]]

    def consumers_of(self, op: int) -> Array:
        return self.consumer_op[self.consumer_start[op] : self.consumer_start[op + 1]]

    def input_lists(self) -> list[list[int]]:
        """The inputs of every op as plain lists, for loops in Python."""
        return _lists(self.input_start, self.input_op)

    def consumer_lists(self) -> list[list[int]]:
        """The consumers of every op as plain lists."""
        return _lists(self.consumer_start, self.consumer_op)

    def index_of(self, op_name: str) -> int:
        """The index of an op; raises UnknownName with the nearest."""
        if op_name not in self._index:
            raise UnknownName(f"op of graph {self.name!r}", op_name, self.op_names)
        return self._index[op_name]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: op for op, name in enumerate(self.op_names)}

    @cached_property
    def digest(self) -> str:
        """A short name that differs if any field but `counted` differs."""
        names = [field.name for field in fields(self) if field.name != "counted"]
        return digest(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {self.num_ops} ops, {self.num_edges} edges)"


def _lists(start: Array, flat: Array) -> list[list[int]]:
    values = flat.tolist()
    return [values[first:beyond] for first, beyond in pairwise(start.tolist())]


class GraphBuilder:
    """A graph in the making: add ops one by one, then `freeze` it."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._index: dict[str, int] = {}
        self._columns: dict[str, list[Any]] = {}  # fields of Graph that have an entry for each op
        self._inputs: list[list[int]] = []
        self._groups: dict[str, int] = {}

    def add(
        self,
        name: str,
        kind: str = "op",
        inputs: Iterable[str] = (),
        *,
        flop: float = 0.0,
        output_bytes: int = 0,
        bytes_read: int = 0,
        bytes_written: int = 0,
        workspace_bytes: int = 0,
        counted: bool = False,
        phase: str = "forward",
        dtype: str = "float32",
        module: str = "",
        group: str | None = None,
        allowed: Sequence[str] = (),
    ) -> str:
        """Add an op after the inputs it takes, and return its name."""
        if name in self._index:
            raise GraphError(f"two ops are called {name!r}; op names must differ")
        if phase not in PHASES:
            raise GraphError(
                f"op {name!r} has phase {phase!r}; it must be one of {', '.join(PHASES)}"
            )
        if isinstance(inputs, str):
            raise InputError(
                f"inputs of op {name!r} must be a list of names, not the text {inputs!r}"
            )
        sources = [self._source(name, source) for source in dict.fromkeys(inputs)]
        row = {
            "kinds": kind,
            "dtypes": dtype,
            "modules": module,
            "allowed": tuple(allowed),
            "phase": PHASES.index(phase),
            "flop": flop,
            "bytes_read": bytes_read,
            "bytes_written": bytes_written,
            "output_bytes": output_bytes,
            "workspace_bytes": workspace_bytes,
            "counted": counted,
            "group": -1 if group is None else self._groups.setdefault(group, len(self._groups)),
        }
        self._index[name] = len(self._index)
        for column, value in row.items():
            self._columns.setdefault(column, []).append(value)
        self._inputs.append(sources)
        return name

    def parameter(self, name: str, output_bytes: int, **settings: Any) -> str:
        """Add a resident op: a weight, a buffer or an optimizer state of so many bytes."""
        return self.add(name, "parameter", output_bytes=output_bytes, phase="parameter", **settings)

    def _source(self, name: str, source: str) -> int:
        if source not in self._index:
            raise GraphError(f"input {source!r} of op {name!r} has not been added; add it first")
        return self._index[source]

    def freeze(self) -> Graph:
        """The graph of all the ops added so far."""
        if not self._index:
            raise GraphError(f"graph {self.name!r} has no ops; add at least one")
        return Graph(
            name=self.name,
            op_names=tuple(self._index),
            **self._columns,  # type: ignore[arg-type]
            group_names=tuple(self._groups),
            input_start=np.cumsum([0, *map(len, self._inputs)]),
            input_op=np.array([op for sources in self._inputs for op in sources], dtype=np.int32),
        )
