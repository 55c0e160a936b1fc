"""Times beside those of a placed training step: one device alone, and updates after the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.cost_models import estimate
from roost.cost_models.profiled import profile
from roost.frontends.tracing.captured_step import CapturedStep, captured_step
from roost.search.microbatches import (
    MicrobatchResult,
    PlainPlacement,
    single_device,
    unrolled_problem,
)
from roost.transforms.microbatch import Microbatch, Microbatched


@dataclass(frozen=True, eq=False)
class DeviceAlone:
    """A training step on one device, in as few microbatches as fit there."""

    device: int
    name: str
    seconds: float
    microbatched: Microbatched
    problem: Problem  # of the unrolled graph
    trial: Trial

    @property
    def plain(self) -> PlainPlacement:
        return PlainPlacement(self.microbatched, self.problem, self.trial)


def best_device(
    problem_of: Callable[[int], Problem], counts: Sequence[int], settings: Microbatch
) -> DeviceAlone | None:
    """The device that runs a step fastest alone; None if it fits on no device."""
    for count in sorted(counts):
        made = replace(settings, count=count).apply(problem_of(count).graph)
        problem = unrolled_problem(problem_of(count), made)
        trial = single_device(problem)
        if trial is not None:
            device = int(trial.placement.device[0])
            name = problem.cluster.device_names[device]
            return DeviceAlone(device, name, trial.step_time, made, problem, trial)
    return None


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
