"""The few groups that a learned placer decides about.

Mirhoseini et al. 2017 make a group of each call of a module, such as a cell of a recurrent layer at
one time step, with its gradients. That binds a step of time to a device, and the weights of the
layer have to follow it. Here a parameter goes with all the ops that read it and with the ops that
make its gradient; only the other ops go by module call. The best placement of such groups is a
third faster than that of as many cells on RNNLM, and a tenth on NMT.

A gradient that takes long is a group of its own. Where there are too many groups, module paths are
cut shorter, and what is then within one module is one group; where that is not enough, the lightest
are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, UPDATE, Graph
from roost.core.problem import Problem
from roost.placers._shared.units import Units, numbered
from roost.transforms.coarsen import Coarsen
from roost.transforms.merging.unions import Unions

_MOST = 300
_FEWER = 0.5  # groups for each unit that is moved otherwise, at most, to be worth it
_LONG = 0.02  # of all the work: a gradient that takes longer is a group of its own


def groups_of(problem: Problem, most: int = _MOST) -> Units:
    """At most about so many groups, none of which splits a group of the graph."""
    kept = vars(problem).setdefault("_learned_groups", {})
    if most not in kept:
        kept[most] = _groups_of(problem, most)
    found: Units = kept[most]
    return found


def may_group(problem: Problem) -> bool:
    """True if groups are whole, far fewer than units, and made by modules.

    What has to be merged by weight is of little use to begin with, and merging takes long on large
    graphs.
    """
    kept = vars(problem).get("_may_group")
    if kept is None and _by_module(problem, _MOST) is None:
        kept = vars(problem)["_may_group"] = False
    if kept is None:
        units = groups_of(problem)
        fine = Units.of(problem)
        # What is moved op by op afterwards are the units: no group may split one.
        whole = bool((units.unit == units.unit[fine.leader[fine.unit]]).all())
        kept = vars(problem)["_may_group"] = whole and units.num_units <= _FEWER * fine.num_units
    return bool(kept)


def grouped(problem: Problem) -> Problem:
    """The problem with these groups as those of its graph."""
    units = groups_of(problem)
    names = tuple(str(number) for number in range(units.num_units))
    graph = replace(problem.graph, group=units.unit.astype(np.int32), group_names=names)
    return Problem(graph, problem.cluster, problem.costs)


def _groups_of(problem: Problem, most: int) -> Units:
    found = _by_module(problem, most)
    if found is not None:
        return found
    role, is_long = _roles(problem)
    *_, shortest = _shorter_and_shorter(problem.graph.modules)
    return merged_units(_joined(problem, role, shortest, is_long), most)


def _by_module(problem: Problem, most: int) -> Units | None:
    """At most so many groups by role and module; None where the shortest paths leave more."""
    role, is_long = _roles(problem)
    for module in _shorter_and_shorter(problem.graph.modules):
        found = _joined(problem, role, module, is_long)
        if found.num_units <= most:
            return found
    return None


def _roles(problem: Problem) -> tuple[Array, Array]:
    """For each op the unit of its parameters, or -1, and if it is part of a long gradient."""
    graph = problem.graph
    units = Units.of(problem)
    with_parameter = np.zeros(units.num_units, dtype=bool)
    with_parameter[units.unit[graph.is_parameter]] = True
    role = np.where(with_parameter[units.unit], units.unit, -1)
    updated = _only_update(graph)
    gradient = (updated >= 0) & (graph.phase == BACKWARD) & (role < 0)
    role[gradient] = role[updated[gradient]]
    gradient &= role >= 0
    seconds = np.where(np.isfinite(problem.op_time), problem.op_time, np.inf).min(axis=1)
    spent = np.zeros(graph.num_ops)
    np.add.at(spent, updated[gradient], seconds[gradient])
    return role, gradient & (spent[updated] > _LONG * seconds.sum())


def _only_update(graph: Graph) -> Array:
    """For each op the one update that anything of it ends in, or a number below 0."""
    found = np.full(graph.num_ops, -1)
    consumers = graph.consumer_lists()
    for op in range(graph.num_ops - 1, -1, -1):
        if graph.phase[op] == UPDATE:
            found[op] = op
        elif consumers[op]:
            ends = {int(found[consumer]) for consumer in consumers[op]}
            found[op] = ends.pop() if len(ends) == 1 else -2
    return found


def _shorter_and_shorter(modules: tuple[str, ...]) -> Iterator[Array]:
    """A number for each op's module path [ops], cut to fewer and fewer names; -1 for no path."""
    deepest = max(path.count(".") + 1 if path else 0 for path in modules)
    for depth in range(max(deepest, 1), 0, -1):
        names: dict[str, int] = {}
        cut = {path: ".".join(path.split(".")[:depth]) for path in set(modules)}
        yield np.array(
            [names.setdefault(cut[path], len(names)) if path else -1 for path in modules]
        )


def _joined(problem: Problem, role: Array, module: Array, is_long: Array) -> Units:
    """Units of ops of one role; ops join by module if they have no role, or one in that module."""
    graph = problem.graph
    bits = 1 << np.arange(problem.cluster.num_devices, dtype=object)
    sets = Unions([int(mask) for mask in (problem.allowed * bits).sum(axis=1)])
    one_module = _one_module(role, module, graph.num_ops)
    own = np.where(is_long, graph.num_ops + _only_update(graph), role)
    at_home = np.where(role >= 0, one_module[role] & ~is_long, True)
    for number in (graph.group, own, np.where(at_home, module, -1)):
        first: dict[int, int] = {}
        for op in np.flatnonzero(number >= 0).tolist():
            sets.join(first.setdefault(int(number[op]), op), op)
    return Units(problem, numbered(graph.is_parameter, sets.roots()))


def _one_module(role: Array, module: Array, num_ops: int) -> Array:  # [ops] bool, for parameters
    """For each parameter: True if all ops of its role are in one module."""
    least = np.full(num_ops, np.iinfo(np.int64).max)
    most = np.full(num_ops, -1)
    placed = role >= 0
    np.minimum.at(least, role[placed], module[placed])
    np.maximum.at(most, role[placed], module[placed])
    return np.asarray((least == most) & (least >= 0))


def merged_units(units: Units, most: int) -> Units:
    """The lightest of them merged until there are few enough."""
    problem = units.problem
    names = tuple(str(number) for number in range(units.num_units))
    graph = replace(problem.graph, group=units.unit.astype(np.int32), group_names=names)
    merged = Coarsen(most, count_ops=False).apply(graph, problem.op_time.mean(axis=1))
    group = merged.graph.group.astype(np.int64)
    number = np.where(group >= 0, group, group.max() + 1 + np.arange(merged.graph.num_ops))[
        merged.new_op
    ]
    return Units(problem, numbered(problem.graph.is_parameter, _first_of(number)))


def _first_of(number: Array) -> Array:
    """For each op the first with the same number."""
    _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.ravel()])
