"""The graph whose ops are sets of another graph's ops; `coarsen` calls it."""

from __future__ import annotations

from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import takewhile

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.transforms._transformed import Transformed
from roost.transforms.merging.unions import Kinds, Unions

MERGED = "merged"  # the kind of an op that stands for ops of several kinds


def merged_graph(
    graph: Graph, part: Array, unit: list[int], units: Unions, counts: dict[str, int]
) -> Transformed:
    """The graph with one op for each part [ops]: the sums of its ops, and the bytes that leave it.

    Ops of a part share a phase and a unit; `units` has the device kinds and the joined groups. The
    workspace of a new op is the memory that its part holds while it runs alone, beyond the output.
    """
    _, first, new_op = np.unique(part, return_index=True, return_inverse=True)
    order = _program_order(graph, new_op)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    new_op = place[new_op]
    first = first[order]
    start, source = _edges(graph, new_op)
    output, workspace = _memory(graph, new_op)
    root = np.array([units.find(unit[op]) for op in first.tolist()])
    kinds = Kinds(graph)
    group, group_names = _groups(graph, root)
    coarse = Graph(
        name=graph.name,
        op_names=_names(graph, new_op, first),
        kinds=_common(graph.kinds, new_op, first),
        dtypes=_dtypes(graph, new_op),
        modules=_modules(graph, new_op, len(first)),
        allowed=tuple(kinds.allowed(units.mask[item]) for item in root.tolist()),
        phase=graph.phase[first],
        flop=np.bincount(new_op, graph.flop),
        counted=2 * np.bincount(new_op, graph.flop * graph.counted)
        > np.bincount(new_op, graph.flop),
        bytes_read=_sums(graph.bytes_read, new_op),
        bytes_written=_sums(graph.bytes_written, new_op),
        output_bytes=output,
        workspace_bytes=workspace,
        group_names=group_names,
        group=group,
        input_start=start,
        input_op=source,
    )
    return Transformed(graph, coarse, new_op, counts)


def _sums(values: Array, new_op: Array) -> Array:
    sums = np.zeros(int(new_op.max()) + 1, dtype=np.int64)
    np.add.at(sums, new_op, values)
    return sums


def _program_order(graph: Graph, new_op: Array) -> Array:
    """Parts in a topological order close to the graph's.

    Of the parts that are ready, the one whose last op comes first is next. Parameters stand just
    before their first consumer.
    """
    count = int(new_op.max()) + 1
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, new_op, np.arange(graph.num_ops))
    pairs = np.unique(new_op[graph.input_op] * count + new_op[graph.edge_target])
    source = pairs // count
    target = pairs % count
    is_parameter = np.zeros(count, dtype=bool)
    is_parameter[new_op[graph.is_parameter]] = True
    computed = (source != target) & ~is_parameter[source]
    sorter = TopologicalSorter(dict.fromkeys(np.flatnonzero(~is_parameter).tolist(), ()))
    for part, other in zip(target[computed].tolist(), source[computed].tolist(), strict=True):
        sorter.add(part, other)
    sorter.prepare()
    keys: list[int] = last.tolist()
    ready: list[tuple[int, int]] = []
    place = np.full(count, -1, dtype=np.int64)  # parameters without readers come first
    for number in range(count - int(is_parameter.sum())):
        for part in sorter.get_ready():
            heappush(ready, (keys[part], part))
        _, part = heappop(ready)
        place[part] = number
        sorter.done(part)
    read = graph.is_parameter[graph.input_op]
    reader = np.full(count, count, dtype=np.int64)
    np.minimum.at(reader, new_op[graph.input_op[read]], place[new_op[graph.edge_target[read]]])
    place = np.where(is_parameter, np.where(reader < count, reader, -1), place)
    return np.lexsort((last, ~is_parameter, place))


def _edges(graph: Graph, new_op: Array) -> tuple[Array, Array]:
    """Inputs of each new op, each once, in the order its ops take them."""
    count = int(new_op.max()) + 1
    source = new_op[graph.input_op]
    target = new_op[graph.edge_target]
    outside = source != target
    source = source[outside]
    target = target[outside]
    pairs, first = np.unique(target * count + source, return_index=True)
    order = np.lexsort((first, pairs // count))
    start = np.searchsorted(pairs // count, np.arange(count + 1))
    return start, (pairs % count)[order]


def _memory(graph: Graph, new_op: Array) -> tuple[Array, Array]:
    """Bytes that leave each new op, and bytes it holds besides while its ops run in turn."""
    count = int(new_op.max()) + 1
    num_ops = graph.num_ops
    source = graph.input_op
    target = graph.edge_target
    outside = new_op[source] != new_op[target]
    leaves = graph.is_parameter.copy()  # a parameter is resident even if nobody reads it
    leaves[source[outside]] = True
    leaving = _sums(np.where(leaves, graph.output_bytes, 0), new_op)
    place = np.empty(num_ops, dtype=np.int64)
    order = np.argsort(new_op, kind="stable")
    place[order] = np.arange(num_ops)
    last = place.copy()  # place of the last consumer inside
    np.maximum.at(last, source[~outside], place[target[~outside]])
    freed = np.zeros(num_ops, dtype=np.int64)
    np.add.at(freed, last[~leaves], graph.output_bytes[~leaves])
    # At its end a part has freed all that does not leave it. So the bytes left over have left
    # earlier parts.
    held = np.cumsum(graph.output_bytes[order]) - np.concatenate([[0], np.cumsum(freed)[:-1]])
    held += graph.workspace_bytes[order]
    starts = np.searchsorted(new_op[order], np.arange(count))
    before = np.concatenate([[0], np.cumsum(leaving)[:-1]])
    peak = np.maximum.reduceat(held, starts) - before
    parameter = np.zeros(count, dtype=bool)
    parameter[new_op[graph.is_parameter]] = True
    alone = np.bincount(new_op, minlength=count) == 1
    # A single op keeps its output, even if nobody reads it.
    output = np.where(alone, _sums(graph.output_bytes, new_op), leaving)
    own = _sums(graph.workspace_bytes, new_op)
    return output, np.where(parameter, own, np.maximum(0, peak - output))


def _groups(graph: Graph, root: Array) -> tuple[Array, tuple[str, ...]]:
    """The group of each op and the names of groups; joined groups keep the first name."""
    kept = np.unique(root[root < graph.num_groups])
    number = np.full(graph.num_groups + graph.num_ops, -1)
    number[kept] = np.arange(len(kept))
    return number[root], tuple(graph.group_names[group] for group in kept.tolist())


def _names(graph: Graph, new_op: Array, first: Array) -> tuple[str, ...]:
    """The name of the first op of each part, with the number of its other ops."""
    more = np.bincount(new_op) - 1
    taken = {graph.op_names[op] for op in first[more == 0].tolist()}
    names = []
    for op, others in zip(first.tolist(), more.tolist(), strict=True):
        name = f"{graph.op_names[op]}+{others}" if others else graph.op_names[op]
        while others and name in taken:
            name += "+"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _common(texts: tuple[str, ...], new_op: Array, first: Array) -> tuple[str, ...]:
    """The text that all ops of a part have in common, else `MERGED`."""
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    values = np.array([number[text] for text in texts])
    mixed = np.zeros(len(first), dtype=bool)
    mixed[new_op[values != values[first][new_op]]] = True
    pairs = zip(mixed.tolist(), first.tolist(), strict=True)
    return tuple(MERGED if mix else texts[op] for mix, op in pairs)


def _dtypes(graph: Graph, new_op: Array) -> tuple[str, ...]:
    """The dtype of the op with the most FLOP in each part."""
    order = np.lexsort((-graph.flop, new_op))
    starts = np.searchsorted(new_op[order], np.arange(int(new_op.max()) + 1))
    return tuple(graph.dtypes[op] for op in order[starts].tolist())


def _modules(graph: Graph, new_op: Array, count: int) -> tuple[str, ...]:
    """The module path that all ops of a part have in common."""
    paths: list[set[str]] = [set() for _ in range(count)]
    for part, module in zip(new_op.tolist(), graph.modules, strict=True):
        paths[part].add(module)
    return tuple(map(_common_path, paths))


def _common_path(paths: set[str]) -> str:
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))
