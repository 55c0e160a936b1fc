"""Whether a placed step gives the numbers of the same step on one device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import RuntimeDevice
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from support.numerics import distance


def virtual_problem(step: CapturedStep, num_devices: int = 2) -> Problem:
    """A captured step on several devices that are threads of this machine; every op takes as long
    as any other."""
    return mixed_problem(step, *(f"cpu:{number}" for number in range(num_devices)))


def any_placement(problem: Problem, rng: np.random.Generator) -> Placement:
    """A random device for each op, groups kept together, some of the parameters away from where
    they are read."""
    graph = problem.graph
    device = rng.integers(0, problem.cluster.num_devices, graph.num_ops)
    members = np.flatnonzero(graph.group >= 0)
    device[members] = device[problem.group_leader[graph.group[members]]]
    window = int(rng.integers(0, 1 + int(graph.output_bytes[graph.is_parameter].sum())))
    return problem.placement(device, str(rng.choice(["program", "rank"])), prefetch_bytes=window)


def mixed_problem(step: CapturedStep, *names: str) -> Problem:
    """A captured step on devices of these names, such as `cpu` and `cuda:0`; every op takes as long
    as any other."""
    devices = tuple(Device(name, name.partition(":")[0], 2**60) for name in names)
    seconds = np.where(step.graph.is_parameter, 0.0, 1e-3)[:, None].repeat(len(names), axis=1)
    return Problem(step.graph, Cluster("mixed", devices, (Link("*", "*", 1e10),)), Costs(seconds))


def streamed(problem: Problem, rng: np.random.Generator, on: int = 1) -> Placement:
    """Every op on one device, some of the residents on others, and any window."""
    graph = problem.graph
    away = graph.is_parameter & (rng.random(graph.num_ops) < 0.7)
    device = np.where(away, rng.integers(0, problem.cluster.num_devices, graph.num_ops), on)
    window = int(rng.integers(0, 1 + int(graph.output_bytes[graph.is_parameter].sum())))
    return problem.placement(device, str(rng.choice(["program", "rank"])), prefetch_bytes=window)


def run_steps(
    step: CapturedStep,
    problem: Problem,
    placement: Placement,
    model: nn.Module,
    inputs: tuple[Any, ...],
    count: int = 2,
    devices: Sequence[RuntimeDevice] | None = None,
    graphs: bool = False,
    one_thread: bool | None = None,
) -> tuple[list[list[Tensor]], Mapping[str, Tensor]]:
    """What some steps in a row return, and all residents after them."""
    own = sorted(os.sched_getaffinity(0))
    cores = [{own[device % len(own)]} for device in range(problem.cluster.num_devices)]
    rate = Optimizer(rate=0.01)
    how: dict[str, Any] = {"graphs": graphs, "one_thread": one_thread}
    with GraphRuntime(
        step, problem, placement, residents_of(model), rate, cores, devices=devices, **how
    ) as run:
        returned = [
            [value.to("cpu", copy=True) for value in run.step(*inputs)] for _ in range(count)
        ]
        return returned, {
            name: value.to("cpu", copy=True) for name, value in run.residents().items()
        }


def differences(one: tuple[Any, Any], other: tuple[Any, Any]) -> dict[str, float]:
    """What differs between two runs, and by how much."""
    found = {
        f"result {number} of step {step}": distance(mine, theirs)
        for step, (ours, others) in enumerate(zip(one[0], other[0], strict=True))
        for number, (mine, theirs) in enumerate(zip(ours, others, strict=True))
    }
    found |= {name: distance(value, other[1][name]) for name, value in one[1].items()}
    return {name: value for name, value in found.items() if value > 0.0}
