"""The few groups that a learned placer decides about: the co-location rules of the papers, then merged until few."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.placers._units import Units, numbered
from roost.transforms._unions import Unions
from roost.transforms.coarsen import Coarsen
from roost.transforms.colocate import Colocate

_EVERY_NAME = 1000  # of a module path

# The papers' rules (Mirhoseini et al. 2017): the ops of one call of a module, such as a cell of a recurrent layer at
# one time step, with their gradients. A parameter that one group alone reads goes with it; others go anywhere.
_RULES = Colocate(units=_EVERY_NAME, gradients_with_forward=True)


def groups_of(problem: Problem, most: int = 300) -> Units:
    """At most about so many groups, none of which splits a group of the graph."""
    kept = vars(problem).setdefault("_learned_groups", {})
    if most not in kept:
        kept[most] = _groups_of(problem, most)
    found: Units = kept[most]
    return found


def _groups_of(problem: Problem, most: int) -> Units:
    graph = _RULES.apply(problem.graph).graph
    units = joined(problem, graph.group)
    if units.num_units <= most:
        return units
    merged = Coarsen(most, count_ops=False).apply(graph, problem.op_time.mean(axis=1))
    # A group of the coarse graph, or a coarse op without one, is one decision.
    group = np.where(merged.graph.group >= 0, merged.graph.group, -1)
    number = np.where(group >= 0, group, group.max() + 1 + np.arange(merged.graph.num_ops))
    return joined(problem, number[merged.new_op])


def joined(problem: Problem, group: Array) -> Units:
    """Ops of one number [ops] as one unit; those below 0 each by itself. Never two that may share no device."""
    bits = 1 << np.arange(problem.cluster.num_devices, dtype=object)
    sets = Unions([int(mask) for mask in (problem.allowed * bits).sum(axis=1)])
    first: dict[int, int] = {}
    for groups in (problem.graph.group, group):  # the graph's own first: they hold whatever else does
        first.clear()
        for op, number in enumerate(groups.tolist()):
            if number >= 0:
                sets.join(first.setdefault(number, op), op)
    return Units(problem, numbered(problem.graph.is_parameter, sets.roots()))
