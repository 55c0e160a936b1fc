"""Costs corrected by whole steps, on each device alone and cut into pieces that alternate devices.

`roost profile --calibrate` calls it. Ops are timed one by one; in a step they find other caches,
other threads and other launches around them. All ops of a device are scaled by measured / predicted
time of a whole step on that device. Then steps in pieces show the cost of crossings among other
work: a probe sends tensors in a loop, where Python has all it needs at hand.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import RoostError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.simulator.compiled import simulate

log = logging.getLogger(__name__)

_WARM, _LEAST, _MOST = 2, 5, 30  # steps
_ODD = 5.0  # times: another program must have been at work
_PIECES = (3, 8, 20, 50)  # numbers of pieces
# Corrections of crossings to choose from: times the probed cost, and seconds more.
_TIMES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)
_MORE = (0.0, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4)
_BETTER = 0.9  # a correction must leave less than this share of the error


class Crossings(NamedTuple):
    """The cost of sending a tensor to another device, compared with the probed cost."""

    times: float = 1.0  # of latency, and of the time that either end is busy
    more: float = 0.0  # seconds: of the sender, or of latency if crossings keep no device busy


_AS_PROBED = Crossings()


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A problem with costs as in whole steps."""

    problem: Problem
    slower: dict[str, float]  # device that was run -> measured / predicted time of its step
    crossings: Crossings = _AS_PROBED


def calibrated(
    step: CapturedStep,
    problem: Problem,
    residents: Mapping[str, Tensor],
    inputs: Any,
    cores: Sequence[set[int]] | None = None,
    seconds: float = 1.0,
) -> Calibrated:
    """Run whole steps and scale the costs of each device, then of crossings.

    A device where the whole step does not fit, or fails, keeps its costs.

    - `residents`: by name; they are copied.
    - `inputs`: a tuple, a dict or a tensor.
    - `seconds`: for each placement, at least five steps.
    """
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

    def measured(placement: Placement, what: str) -> float | None:
        try:
            with GraphRuntime(
                step, problem, placement, residents, Optimizer(rate=0.0), cores
            ) as run:
                return _step_time(run, given, seconds)
        except (RoostError, RuntimeError) as error:
            log.warning(
                "the whole step could not be run %s: %s", what, str(error).partition("\n")[0]
            )
            return None

    slower: dict[str, float] = {}
    op_time = problem.op_time.copy()
    for number, name in enumerate(problem.cluster.device_names):
        alone = problem.placement(np.full(problem.graph.num_ops, number))
        expected = simulate(problem, alone)
        if not expected.feasible or expected.step_time <= 0:
            why = "takes no time" if expected.feasible else "does not fit"
            log.info("the whole step %s on %s: its costs stay as they are", why, name)
            continue
        took = measured(alone, f"on {name}")
        if took is None:
            continue
        slower[name] = took / expected.step_time
        if not 1 / _ODD < slower[name] < _ODD:
            log.warning(
                "a whole step on %s takes %.2g times what its ops take: time them anew, with "
                "nothing else at work",
                name,
                slower[name],
            )
        op_time[:, number] *= slower[name]
    source = (
        f"{problem.costs.source}, held against whole steps on {' and '.join(slower)}"
        if slower
        else ""
    )
    costs = Costs(op_time, source or problem.costs.source)
    scaled = Problem(problem.graph, problem.cluster, costs)
    if len(slower) < 2:
        return Calibrated(scaled, slower)
    runs: list[tuple[Placement, float]] = []
    for placement in _in_pieces(scaled, list(slower)):
        took = measured(placement, "in pieces")
        if took is not None:
            runs.append((placement, took))
    crossings = _fitted(scaled, runs)
    cluster = with_crossings(problem.cluster, crossings)
    return Calibrated(Problem(problem.graph, cluster, costs), slower, crossings)


def _in_pieces(problem: Problem, names: list[str]) -> list[Placement]:
    """Cut the program into pieces, each on the next device; parameters go to their first reader."""
    graph = problem.graph
    placements = list[Placement]()
    devices = np.array([problem.cluster.index_of(name) for name in names])
    consumers = graph.consumer_lists()
    members = np.flatnonzero(graph.group >= 0)
    computes = np.flatnonzero(~graph.is_parameter)
    for pieces in (count for count in _PIECES if count <= len(computes)):
        device = np.full(graph.num_ops, devices[0])
        device[computes] = devices[
            np.arange(len(computes)) * pieces // len(computes) % len(devices)
        ]
        for parameter in np.flatnonzero(graph.is_parameter).tolist():
            if consumers[parameter]:
                device[parameter] = device[consumers[parameter][0]]
        device[members] = device[problem.group_leader[graph.group[members]]]
        if problem.allowed[np.arange(graph.num_ops), device].all():
            placement = problem.placement(device)
            if simulate(problem, placement).feasible:
                placements.append(placement)
    return placements


def _fitted(problem: Problem, measured: Sequence[tuple[Placement, float]]) -> Crossings:
    """Choose the correction with the smallest error of predicted steps, if it is much smaller."""

    def error(crossings: Crossings) -> float:
        other = Problem(problem.graph, with_crossings(problem.cluster, crossings), problem.costs)
        return statistics.mean(
            abs(math.log(simulate(other, each).step_time / took)) for each, took in measured
        )

    if not measured:
        return _AS_PROBED
    errors = {
        crossings: error(crossings)
        for crossings in (Crossings(*each) for each in product(_TIMES, _MORE))
    }
    # Of equal errors the smallest correction.
    best = min(
        errors, key=lambda each: (round(errors[each], 6), abs(math.log(each.times)), each.more)
    )
    log.info("in pieces, steps are off by %.0f %% as probed, %.0f %% with %s", *(
        100 * each for each in (errors[_AS_PROBED], errors[best])), best)  # fmt: skip
    return best if errors[best] < _BETTER * errors[_AS_PROBED] else _AS_PROBED


def with_crossings(cluster: Cluster, crossings: Crossings) -> Cluster:
    """Correct the links of a cluster; crossings that keep no device busy take longer instead."""
    if crossings == _AS_PROBED:
        return cluster
    times, more = crossings
    links = []
    for link in cluster.links:
        busy = {name: getattr(link, name) * times for name in ("sender_busy", "receiver_busy")}
        late = max(link.latency, max(link.latency, link.send_latency) * times)
        if cluster.keeps_busy:
            busy["sender_busy"] += more
        else:
            late += more
        links.append(replace(link, send_latency=late, **busy))
    return replace(cluster, links=tuple(links))


def _step_time(run: GraphRuntime, inputs: Sequence[Any], seconds: float) -> float:
    for _ in range(_WARM):
        run.step(*inputs)
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < seconds and len(times) < _MOST):
        begun = time.perf_counter()
        run.step(*inputs)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
