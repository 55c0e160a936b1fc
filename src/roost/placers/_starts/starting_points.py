"""Where a search begins: what other placers find, in the order of how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roost import catalog
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate, Round, several_of
from roost.placers._shared.groups import grouped, may_group
from roost.placers._starts.kept_or_streamed import mixed
from roost.placers._starts.offload import needs_offload, offloaded
from roost.placers.rules import best_placements, portfolio
from roost.simulator.order import dispatch_order

_ROOM = 0.9  # share of the memory that is left for activations, where parameters are fetched
_RULES, _KEPT = (
    64,
    4,
    # Rules that are tried on whole groups, or as if parameters weighed nothing, and how many are
    # kept.
)


def starting_points(
    problem: Problem, evaluate: Evaluate, placers: tuple[str, ...], groups: bool = True
) -> list[Placement]:
    """What these placers find, and the best so far, the best first; offloaded where little of it
    fits.

    With `groups` also what rules find that place whole groups.
    """
    found: list[Trial] = [] if evaluate.best is None else [evaluate.best]
    for name in placers:
        found += ask(name, problem, evaluate.named(name))
    found += whole_groups(problem, evaluate) if groups else []
    if needs_offload(problem) or not any(trial.feasible for trial in found):
        found += offloads(problem, evaluate)
    return [trial.placement for trial in distinct(found)]


def ask(name: str, problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """The trials of what a placer finds: one, or the best few where it has more to offer."""
    return evaluate(several_of(catalog.find("placers", name)(), problem, evaluate))


def whole_groups(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """The best of some rules that place whole groups, where there are such."""
    if not may_group(problem) or evaluate.simulations_left < 2 * _RULES:
        return []
    seed = int(evaluate.rng.integers(2**62))
    state = evaluate.round(
        lambda: _grouped_rules(problem, np.random.default_rng(seed), evaluate.simulations_left),
        "groups",
    )
    return evaluate(_placements(problem, state))


def _grouped_rules(problem: Problem, rng: np.random.Generator, most_simulations: float) -> Round:
    small = grouped(problem)
    rolled = portfolio(small, rng, _RULES, ("program", "rank"), most_simulations)
    kept = best_placements(rolled, _KEPT)
    return _round_of(problem, small, kept, sum(part.simulations for part in rolled))


def offloads(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """Good placements as if parameters weighed nothing; these are then moved to where there is
    room, and fetched."""
    # Drawn whether the round is run or taken from a journal: what is drawn after it must be the
    # same.
    seed = int(evaluate.rng.integers(2**62))
    state = evaluate.round(
        lambda: _as_if_weightless(problem, np.random.default_rng(seed), evaluate.simulations_left),
        "weightless",
    )
    seen = mixed(problem, evaluate)
    for placement in _placements(problem, state):
        seen += offloaded(problem, evaluate, placement)
    return seen


def _as_if_weightless(problem: Problem, rng: np.random.Generator, most_simulations: float) -> Round:
    graph, cluster = problem.graph, problem.cluster
    smaller = tuple(
        replace(device, memory=int(_ROOM * device.memory)) for device in cluster.devices
    )
    light = replace(graph, output_bytes=np.where(graph.is_parameter, 0, graph.output_bytes))
    relaxed = Problem(light, replace(cluster, devices=smaller), problem.costs)
    rolled = portfolio(relaxed, rng, _RULES, ("program", "rank"), most_simulations)
    kept = best_placements(rolled, _KEPT)
    return _round_of(problem, relaxed, kept, sum(part.simulations for part in rolled))


def _round_of(problem: Problem, other: Problem, kept: list[Placement], simulations: int) -> Round:
    """What was found on another problem, with its orders as they are there."""
    priorities = np.zeros((len(kept), problem.graph.num_ops))
    for row, placement in enumerate(kept):
        order = dispatch_order(other, placement)
        priorities[row, order] = -np.arange(len(order), dtype=np.float64)
    devices = np.stack([placement.device for placement in kept])
    first = problem.placement(devices[0], "priority", priorities[0])
    return Round([first], simulations, {"devices": devices, "priorities": priorities})


def _placements(problem: Problem, state: Mapping[str, Array]) -> list[Placement]:
    rows = zip(state["devices"], state["priorities"], strict=True)
    return [
        problem.placement(np.array(device), "priority", np.array(urgent)) for device, urgent in rows
    ]


def distinct(trials: list[Trial]) -> list[Trial]:
    """The trials, best first, each placement once."""
    ordered: list[Trial] = []
    for trial in trials:
        spot = next(
            (n for n, other in enumerate(ordered) if trial.better_than(other)), len(ordered)
        )
        ordered.insert(spot, trial)
    first_of = {trial.placement.digest: trial for trial in reversed(ordered)}
    return [trial for trial in ordered if first_of[trial.placement.digest] is trial]
