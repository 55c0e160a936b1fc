"""Placements that a search begins from: those of other placers, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roost import catalog
from roost.core.arrays import Array, taken, taken_devices
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate, Round, several_of
from roost.placers._shared.groups import grouped, may_group
from roost.placers._starts.kept_or_streamed import streamed_placements
from roost.placers._starts.offload import needs_offload, offloaded
from roost.placers.rules import portfolio
from roost.simulator.order import dispatch_order

_ROOM = 0.9  # share of the memory that is left for activations, where parameters are fetched
_RULES = 64  # tried on whole groups, or as if parameters weighed nothing
_KEPT = 4  # of these rules


def starting_points(
    problem: Problem, evaluate: Evaluate, placers: tuple[str, ...], groups: bool = True
) -> list[Placement]:
    """The placements of these placers and the best so far, the best first.

    With `groups` also those of rules that place whole groups. Where little fits, parameters are
    offloaded.
    """
    trials: list[Trial] = [] if evaluate.best is None else [evaluate.best]
    for name in placers:
        trials += ask(name, problem, evaluate.named(name))
    trials += whole_groups(problem, evaluate) if groups else []
    if needs_offload(problem) or not any(trial.feasible for trial in trials):
        trials += offloads(problem, evaluate)
    return [trial.placement for trial in distinct(trials)]


def ask(name: str, problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """The trials of a placer's placement, or of its best few where it offers several."""
    return evaluate(several_of(catalog.find("placers", name)(), problem, evaluate))


def whole_groups(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """The best of some rules that place whole groups; none if the problem has no useful groups."""
    if not may_group(problem) or evaluate.simulations_left < 2 * _RULES:
        return []
    return evaluate(_rules_on(problem, evaluate, "groups"))


def offloads(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """Placements made as if parameters weighed nothing, then with parameters moved and fetched."""
    placements = _rules_on(problem, evaluate, "weightless")
    trials = streamed_placements(problem, evaluate)
    for placement in placements:
        trials += offloaded(problem, evaluate, placement)
    return trials


def _rules_on(problem: Problem, evaluate: Evaluate, what: str) -> list[Placement]:
    """The best placements of some rules on a variant of the problem: "groups" or "weightless"."""
    # Drawn even if a journal has the round: later random numbers must be the same.
    seed = int(evaluate.rng.integers(2**62))

    def run() -> Round:
        variant = grouped(problem) if what == "groups" else _weightless(problem)
        rng = np.random.default_rng(seed)
        simulations_left = evaluate.simulations_left
        made = portfolio(variant, rng, _RULES, most_simulations=simulations_left)
        return _round_of(problem, variant, made.best(_KEPT), made.simulations)

    return _placements(problem, evaluate.round(run, what))


def _weightless(problem: Problem) -> Problem:
    """The problem with parameters of no bytes, and a little less memory."""
    graph = problem.graph
    cluster = problem.cluster
    smaller = tuple(
        replace(device, memory=int(_ROOM * device.memory)) for device in cluster.devices
    )
    light = replace(graph, output_bytes=np.where(graph.is_parameter, 0, graph.output_bytes))
    return Problem(light, replace(cluster, devices=smaller), problem.costs)


def _round_of(
    problem: Problem, variant: Problem, placements: list[Placement], simulations: int
) -> Round:
    """A round with placements of a variant of the problem, in the orders that they have there."""
    priorities = np.zeros((len(placements), problem.graph.num_ops))
    for row, placement in enumerate(placements):
        order = dispatch_order(variant, placement)
        priorities[row, order] = -np.arange(len(order), dtype=np.float64)
    devices = np.stack([placement.device for placement in placements])
    first = problem.placement(devices[0], "priority", priorities[0])
    return Round([first], simulations, {"devices": devices, "priorities": priorities})


def _placements(problem: Problem, state: Mapping[str, Array]) -> list[Placement]:
    devices = taken_devices(state, "devices", problem.allowed, (None,))
    priorities = taken(state, "priorities", devices.shape)
    return [
        problem.placement(device, "priority", priority)
        for device, priority in zip(devices, priorities, strict=True)
    ]


def distinct(trials: list[Trial]) -> list[Trial]:
    """The trials, best first, each placement once."""
    ordered: list[Trial] = []
    for trial in trials:
        worse = (number for number, other in enumerate(ordered) if trial.better_than(other))
        ordered.insert(next(worse, len(ordered)), trial)
    first_of = {trial.placement.digest: trial for trial in reversed(ordered)}
    return [trial for trial in ordered if first_of[trial.placement.digest] is trial]
