"""Problems that do not fit: the bytes that are missing, and the smaller batch that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import missing_memory
from roost.core.trial import Result, Trial
from roost.core.units import show_bytes
from roost.errors import Infeasible
from roost.simulator.compiled import Simulator


def nothing_found(problem: Problem, result: Result, proof: str = "") -> Infeasible:
    """The error for a search whose best trial does not fit. It carries the result."""
    best = result.best
    missing = missing_memory(best.peak_memory, problem.cluster.memory)
    worst = int(np.argmax(missing))
    names = problem.cluster.device_names
    count = "1 trial" if result.num_trials == 1 else f"{result.num_trials:,} trials"
    where = f"{problem.graph.name!r} on {problem.cluster.name!r}"
    message = proof or f"nothing fits: {where} in {count}"
    short = np.flatnonzero(missing).tolist()
    lacks = [f"{show_bytes(missing[device])} more on {names[device]}" for device in short]
    if lacks:  # a measured trial may fail for another reason
        message += f". The best try needs {' and '.join(lacks)}"
    roomy = roomiest(problem, result)
    share = None if roomy is None else roomy[0]
    if share is not None:
        message += f", or activations of {share:.0%} of these"
        message += f": a batch of {share:.2g} times this size surely fits"
    error = Infeasible(message, names[worst], int(missing[worst]))
    error.result = result
    error.activation_share = share
    return error


def no_run(result: Result) -> str:
    """A message if the best trial failed as it ran; "" if it lacks memory."""
    best = result.best
    failed = best.why and not best.missing_bytes
    return f"nothing runs: the best try of {result.num_trials} failed: {best.why}" if failed else ""


def roomiest(problem: Problem, result: Result) -> tuple[float, Placement] | None:
    """The largest share of the activations that fits, and its placement.

    Looks at the best trial, the baselines and each device alone. The trial that lacks least may
    need the smallest batch: a little is missing, on a device that is full of parameters.
    """
    trials = [result.best, *result.baselines.values(), *_alone(problem)]
    shares = [(activation_share(problem, trial), trial.placement) for trial in trials]
    fitting = [(share, placement) for share, placement in shares if share is not None]
    return max(fitting, key=lambda each: each[0], default=None)


def _alone(problem: Problem) -> Iterator[Trial]:
    """A trial of each device that may run all ops."""
    for d in np.flatnonzero(problem.allowed.all(axis=0)).tolist():
        placement = problem.placement(np.full(problem.graph.num_ops, d))
        step = Simulator.of(problem).simulate(placement)
        yield Trial.simulated(placement, step)


def shrunk(problem: Problem, share: float) -> Problem:
    """The problem with a share of its activations, much like a smaller batch.

    Gradients of parameters keep their size.
    """
    graph = problem.graph
    fixed = graph.is_parameter.copy()
    fixed[graph.input_op[graph.phase[graph.edge_target] == UPDATE]] = True
    size, space = (
        np.ceil(each * share).astype(np.int64)
        for each in (graph.output_bytes, graph.workspace_bytes)
    )
    smaller = replace(
        graph, output_bytes=np.where(fixed, graph.output_bytes, size), workspace_bytes=space
    )
    return Problem(smaller, problem.cluster, problem.costs)


def activation_share(problem: Problem, trial: Trial) -> float | None:
    """The share of its activations with which a placement fits; None if none is small enough.

    Activations grow with the batch; residents do not.
    """
    graph = problem.graph
    cluster = problem.cluster
    resident = np.zeros(cluster.num_devices, dtype=np.int64)
    parameters = graph.is_parameter
    device = problem.check(trial.placement).device
    np.add.at(resident, device[parameters], graph.output_bytes[parameters])
    moving = np.asarray(trial.peak_memory) - resident
    room = cluster.memory - resident
    over = np.asarray(trial.peak_memory) > cluster.memory
    if (room[over] <= 0).any() or not over.any():
        return None
    return float((room[over] / moving[over]).min())
