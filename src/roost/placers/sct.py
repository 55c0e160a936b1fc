"""Small communication times (Hanen, Munier 1995; m-SCT of Baechi, Jeon et al., SoCC 2020).

A linear programme gives each op at most one favourite consumer, which should follow it on its
device. Then earliest task first, where an op with a favourite input goes to the device of that
input. A device waits for the favourite of the op it has run last, as long as a transfer of the
tensor elsewhere would take. Differs in: as in `etf`; the transfers of the programme are averaged
over the links, its times are those of the fastest device; a graph of many ops is coarsened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import ListScheduler, total_time
from roost.placers._shared.links import mean_link
from roost.placers._shared.units import Units
from roost.placers.etf import earliest_first_trial
from roost.simulator.kernels.base import Layout
from roost.transforms.coarsen import Coarsen

_FAVOURITE = 0.5  # a consumer is a favourite where the programme says less than this


@dataclass(frozen=True)
class Sct:
    """Earliest task first, with favourite consumers from a linear programme."""

    most_ops: int = 8000  # a graph of more is coarsened
    num_groups: int = 2000  # to so many ops

    def __post_init__(self) -> None:
        if min(self.most_ops, self.num_groups) < 1:
            raise InputError(
                f"most_ops and num_groups are {self.most_ops} and {self.num_groups}; both must be "
                f"above 0"
            )

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        if problem.graph.num_ops <= self.most_ops:
            return _schedule(problem, evaluate, lambda placement: placement)
        coarse = Coarsen(self.num_groups).apply(problem.graph, problem.op_time.mean(axis=1))

        def expand(placement: Placement) -> Placement:
            whole = coarse.expand(placement, keep_order=False)
            return replace(whole, graph=problem.graph.digest, prefetch_bytes=0)

        return _schedule(coarse.problem(problem), evaluate, expand)


def _schedule(
    problem: Problem, evaluate: Evaluate, expand: Callable[[Placement], Placement]
) -> Placement:
    units = Units.of(problem)
    scheduler = ListScheduler.all_of(units, ("rank",))[-1]
    favourites = _favourites(units, scheduler.layout)
    return earliest_first_trial(scheduler, evaluate, favourites, expand).placement


def _favourites(units: Units, layout: Layout) -> tuple[Array, Array]:
    """[ops] the favourite consumer of each op, and the op whose favourite it is; -1 if none."""
    num_ops = len(layout.op)
    source = layout.previous.astype(np.int64)
    target = np.repeat(np.arange(num_ops), layout.num_inputs)
    favourite = np.full(num_ops, -1, np.int32)
    parent = np.full(num_ops, -1, np.int32)
    if len(source) and units.problem.cluster.num_devices > 1:
        chosen = _relaxed(units, layout, source, target) < _FAVOURITE
        favourite[source[chosen]] = target[chosen]
        parent[target[chosen]] = source[chosen]
    return favourite, parent


def _relaxed(units: Units, layout: Layout, source: Array, target: Array) -> Array:
    """[edges] 0 where the consumer should follow the op, 1 where it need not.

    The relaxed programme has a variable for the start of each op, that number for each edge, and
    the end of the step, which is made least. A consumer starts no earlier than its input ends, plus
    the transfer times that number. Of all consumers of an op, and of all inputs of an op, the
    numbers add up to at least as many less one.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    num_ops = len(layout.op)
    num_edges = len(source)
    op = np.arange(num_ops)
    edge = np.arange(num_edges)
    number, end = num_ops + edge, num_ops + num_edges  # columns; that of a start is the op
    time = layout.time.reshape(num_ops, -1)[:, int(total_time(units).argmin())]
    transfer = mean_link(units.problem.cluster).seconds(layout.output[source])
    # Figures near 1 for the solver.
    scale = max(float(time.sum() + transfer.sum()) / max(1, num_ops), 1e-300)
    # Rows: a consumer waits for its input, an op ends before the step, consumers, inputs.
    ends = num_edges + op
    consumers = end + source
    inputs = end + num_ops + target
    entries: list[tuple[Any, Any, Any]] = [
        (edge, source, 1.0),
        (edge, target, -1.0),
        (edge, number, transfer / scale),
        (ends, op, 1.0),
        (ends, end, -1.0),
        (consumers, number, -1.0),
        (inputs, number, -1.0),
    ]
    columns = zip(*(np.broadcast_arrays(*entry) for entry in entries), strict=True)
    row, column, value = (np.concatenate(parts) for parts in columns)
    limits = [
        -time[source] / scale,
        -time / scale,
        1.0 - np.maximum(1, np.bincount(source, minlength=num_ops)),
        1.0 - np.maximum(1, np.bincount(target, minlength=num_ops)),
    ]
    upper = np.full(end + 1, np.inf)
    upper[number] = 1.0
    cost = np.zeros(end + 1)
    cost[end] = 1.0
    solution = linprog(
        cost,
        A_ub=sparse.csr_array((value, (row, column)), shape=(end + 2 * num_ops, end + 1)),
        b_ub=np.concatenate(limits),
        bounds=np.stack([np.zeros(end + 1), upper], axis=1),
        method="highs-ds",
    )
    return np.ones(num_edges) if solution.x is None else np.asarray(solution.x[number])
