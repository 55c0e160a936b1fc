"""Small communication times (Hanen, Munier 1995; m-SCT of Baechi, Jeon et al., SoCC 2020).

A linear programme gives each op at most one favourite consumer, which should follow it on its
device. Then earliest task first, where an op with a favourite input goes to the device of that
input, and a device waits for the favourite of what it has run last as long as the tensor would need
to get elsewhere. Differs in: as in `etf`; the transfers of the programme are averaged over the
links, its times are those of the fastest device; a graph of many ops is coarsened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._listing.list_scheduler import SCALES, ListScheduler, device_choices, total_time
from roost.placers._shared.units import Units
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


def _schedule(problem: Problem, evaluate: Evaluate, expand: Any) -> Placement:
    """The best schedule of a problem that may stand for another: `expand` makes its placements
    those of the other."""
    units = Units.of(problem)
    scheduler = ListScheduler.all_of(units, ("rank",))[-1]
    favourite, parent = _favourites(units, scheduler.layout)
    found: list[Trial] = []
    for usable in device_choices(units):
        for scale in SCALES:
            made = scheduler.earliest_first(usable, scale, favourite, parent)
            trials = evaluate([expand(placement) for placement in made])
            found += trials
            if any(trial.feasible for trial in trials):
                break
    return best_of(found).placement


def _favourites(units: Units, layout: Layout) -> tuple[Array, Array]:
    """[ops] the favourite consumer of each op, and of which op it is the favourite; -1 where there
    is none."""
    num_ops = len(layout.op)
    source = layout.previous.astype(np.int64)
    target = np.repeat(np.arange(num_ops), layout.num_inputs)
    favourite, parent = np.full(num_ops, -1, np.int32), np.full(num_ops, -1, np.int32)
    if len(source) and units.problem.cluster.num_devices > 1:
        chosen = _relaxed(units, layout, source, target) < _FAVOURITE
        favourite[source[chosen]] = target[chosen]
        parent[target[chosen]] = source[chosen]
    return favourite, parent


def _relaxed(units: Units, layout: Layout, source: Array, target: Array) -> Array:
    """[edges] 0 where the consumer should follow the op, 1 where it need not, by the relaxed
    programme.

    Variables: the start of each op, that number for each edge, and the end of the step, which is
    made least. A consumer starts no earlier than its input ends, plus the transfer times that
    number; of all consumers of an op, and of all inputs of an op, the numbers but one add up to as
    many.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    cluster, num_ops, num_edges = units.problem.cluster, len(layout.op), len(source)
    width, edge, op = num_ops + num_edges + 1, np.arange(num_edges), np.arange(num_ops)
    time = layout.time.reshape(num_ops, -1)[:, int(total_time(units).argmin())]
    apart = ~np.eye(cluster.num_devices, dtype=bool)
    transfer = (
        cluster.latency[apart].mean()
        + layout.output[source] * cluster.seconds_per_byte[apart].mean()
    )
    # Figures near 1 for the solver.
    scale = max(float(time.sum() + transfer.sum()) / max(1, num_ops), 1e-300)

    def rows(count: int, *entries: tuple[Array, Array, Array]) -> Any:
        row, column, value = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return sparse.csr_array((value, (row, column)), shape=(count, width))

    one = np.ones(num_edges)
    waits = rows(
        num_edges,
        (edge, source, one),
        (edge, target, -one),
        (edge, num_ops + edge, transfer / scale),
    )
    ends = rows(
        num_ops, (op, op, np.ones(num_ops)), (op, np.full(num_ops, width - 1), -np.ones(num_ops))
    )
    of_source, of_target = (rows(num_ops, (end, num_ops + edge, -one)) for end in (source, target))
    limits = [
        -time[source] / scale,
        -time / scale,
        1.0 - np.maximum(1, np.bincount(source, minlength=num_ops)),
        1.0 - np.maximum(1, np.bincount(target, minlength=num_ops)),
    ]
    upper = np.concatenate([np.full(num_ops, np.inf), one, [np.inf]])
    found = linprog(
        np.eye(1, width, width - 1)[0],
        A_ub=sparse.vstack([waits, ends, of_source, of_target]),
        b_ub=np.concatenate(limits),
        bounds=np.stack([np.zeros(width), upper], axis=1),
        method="highs-ds",
    )
    return np.asarray(found.x[num_ops:-1]) if found.x is not None else one
