"""Times beside those of a placed training step: one device alone, and updates after the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.problem import Problem
from roost.cost_models import estimate
from roost.cost_models.profiled import profile
from roost.frontends.tracing.captured_step import CapturedStep, captured_step
from roost.search.microbatches import MicrobatchResult
from roost.simulator.compiled import simulate


def best_device(problems: Sequence[Problem]) -> tuple[str, float] | None:
    """The device that runs a step fastest alone, and its seconds; None if it fits on no device."""
    best: tuple[str, float] | None = None
    for problem in problems:
        for device, name in enumerate(problem.cluster.device_names):
            if not problem.allowed[:, device].all():
                continue
            alone = problem.placement(np.full(problem.graph.num_ops, device))
            timeline = simulate(problem, alone)
            if timeline.feasible and (best is None or timeline.step_time < best[1]):
                best = name, timeline.step_time
    return best


def update_times(
    step: CapturedStep, optimizer: str, cluster: Cluster, profiled: bool
) -> dict[str, Array]:
    """Op of a parameter -> the seconds of its update on each device, if it were part of a step."""
    plain = captured_step(step.program, step.graph.name, optimizer)
    costs = profile(plain, cluster) if profiled else estimate(plain.graph, cluster).costs
    return {
        update.resident: costs.op_time[plain.graph.index_of(op)]
        for op, update in plain.updates.items()
        if plain.graph.kinds[plain.graph.index_of(op)] == optimizer
    }


def slowest_updates(updates: Mapping[str, Array], found: MicrobatchResult) -> float:
    """Seconds of the device with most to update; each updates the parameters that live there."""
    graph = found.problem.graph
    device = found.problem.check(found.result.best.placement).device
    seconds = np.zeros(found.problem.cluster.num_devices)
    for op, times in updates.items():
        home = int(device[graph.index_of(op)])
        seconds[home] += times[home]
    return float(seconds.max())
