"""Nothing fits: what is missing where, and the least that would mend it."""

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
    """The error for a search whose best try does not fit. It carries the result."""
    best = result.best
    missing = missing_memory(best.peak_memory, problem.cluster.memory)
    worst = int(np.argmax(missing))
    names = problem.cluster.device_names
    count = "1 trial" if result.num_trials == 1 else f"{result.num_trials:,} trials"
    found = f"nothing fits: {problem.graph.name!r} on {problem.cluster.name!r} in {count}"
    lacks = " and ".join(
        f"{show_bytes(missing[d])} more on {names[d]}" for d in np.flatnonzero(missing).tolist()
    )
    message = proof or found
    if lacks:  # a measured try may fail for another reason
        message += f". The best try needs {lacks}"
    roomy = roomiest(problem, result)
    share = None if roomy is None else roomy[0]
    if share is not None:
        message += f", or activations of {share:.0%} of these"
        message += f": a batch of {share:.2g} times this size surely fits"
    error = Infeasible(message, names[worst], int(missing[worst]))
    error.result = result
    error.activation_share = share
    return error


def roomiest(problem: Problem, result: Result) -> tuple[float, Placement] | None:
    """The largest share of the activations that fits, and where: of the best try, the baselines,
    and each device alone.

    The try that lacks least may be the one that needs the smallest batch: a little is missing, on a
    device that is full of parameters.
    """
    tried = [result.best, *result.baselines.values(), *_alone(problem)]
    shares = [(activation_share(problem, trial), trial.placement) for trial in tried]
    found = [(share, placement) for share, placement in shares if share is not None]
    return max(found, key=lambda each: each[0], default=None)


def _alone(problem: Problem) -> Iterator[Trial]:
    """Everything on each device that may have it."""
    for d in np.flatnonzero(problem.allowed.all(axis=0)).tolist():
        placement = problem.placement(np.full(problem.graph.num_ops, d))
        step = Simulator.of(problem).simulate(placement)
        yield Trial.simulated(placement, step)


def shrunk(problem: Problem, share: float) -> Problem:
    """The problem with so much smaller activations, about as with a smaller batch: gradients of
    parameters stay."""
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
    """To what share activations must shrink for the placement to fit; None where that would not be
    enough.

    Activations grow with the batch, and what is resident does not.
    """
    graph, cluster = problem.graph, problem.cluster
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
