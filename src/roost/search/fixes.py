"""Nothing fits: what is missing where, and the least that would mend it."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.core.trial import Result, Trial
from roost.core.units import show_bytes
from roost.errors import Infeasible


def nothing_found(problem: Problem, result: Result, proof: str = "") -> Infeasible:
    """The error for a search whose best try does not fit. It carries the result."""
    best = result.best
    missing = missing_bytes(problem, best)
    worst = int(np.argmax(missing))
    names = problem.cluster.device_names
    count = "1 trial" if result.num_trials == 1 else f"{result.num_trials:,} trials"
    found = f"nothing fits: {problem.graph.name!r} on {problem.cluster.name!r} in {count}"
    lacks = " and ".join(f"{show_bytes(missing[d])} more on {names[d]}" for d in np.flatnonzero(missing).tolist())
    message = proof or found
    if lacks:  # a measured try may fail for another reason
        message += f". The best try needs {lacks}"
    share = activation_share(problem, best)
    if share is not None:
        message += f", or activations of {share:.0%} of these, as a batch of {share:.2g} times this size has"
    error = Infeasible(message, names[worst], int(missing[worst]))
    error.result = result
    error.activation_share = share
    return error


def missing_bytes(problem: Problem, trial: Trial) -> Array:  # [devices]
    """Bytes beyond the capacity of each device."""
    return np.asarray(np.maximum(trial.peak_memory - problem.cluster.memory, 0))


def activation_share(problem: Problem, trial: Trial) -> float | None:
    """To what share activations must shrink for the placement to fit; None where that would not be enough.

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
