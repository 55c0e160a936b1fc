"""Weights that are copied in the call of their module, not ahead of it.

A window for weights on their way takes room for as long as a step takes, at least as much as the
largest module needs. Where activations leave no room for that, the largest come on the spot: the
call waits for them and holds them, and when it is over they are gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from roost.core.cluster import MEMORY
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.errors import InputError
from roost.plan.clusters import STORE
from roost.transforms.by_module import ByModule, may_be_brought, plain, readers_of


def loads_of(graph: Graph) -> dict[str, list[int]]:
    """The parameters that could be brought for each module: its own, or of one inside it, and
    large."""
    found: dict[str, list[int]] = {}
    for parameter, modules in readers_of(graph).items():
        own = (
            len(modules) == 1
            and modules[0]
            and graph.op_names[parameter].startswith(f"{modules[0]}.")
        )
        if (
            own
            and graph.output_bytes[parameter] >= ByModule.small_bytes
            and may_be_brought(graph, parameter)
        ):
            found.setdefault(modules[0], []).append(parameter)
    return found


def at_once(graph: Graph) -> Graph:
    """The graph in which the first op of a call reads all weights that are brought for it: they
    come together."""
    several = {module: own for module, own in loads_of(graph).items() if len(own) > 1}
    inputs, seen = [list(each) for each in graph.input_lists()], set[str]()
    for op in np.flatnonzero(~graph.is_parameter).tolist():
        call = graph.modules[op]
        if plain(call) in several and call not in seen:
            seen.add(call)
            inputs[op] += [
                weight
                for weight in several[plain(call)]
                if weight < op and weight not in inputs[op]
            ]
    if not seen:
        return graph
    starts = np.concatenate([[0], np.cumsum([len(each) for each in inputs])])
    return replace(graph, input_start=starts, input_op=np.concatenate(inputs))


def on_the_spot(problem: Problem, main: str, modules: Collection[str]) -> Problem:
    """The problem as it is where the weights of these modules are copied to the main device in
    their calls."""
    if not modules:
        return problem
    graph, cluster = problem.graph, problem.cluster
    loads = {
        module: parameters for module, parameters in loads_of(graph).items() if module in modules
    }
    hosts = [one.name for one in cluster.devices if one.name == STORE or one.kind == "cpu"]
    if not hosts:
        raise InputError(
            "weights are to come on the spot, but no device is a CPU that they could come from"
        )
    there = STORE if STORE in hosts else hosts[0]
    way = cluster.index_of(there), cluster.index_of(main)
    space, op_time = graph.workspace_bytes.copy(), problem.op_time.copy()
    size = {
        module: int(graph.output_bytes[parameters].sum()) for module, parameters in loads.items()
    }
    held = {  # while a module is called: its own, and those of modules around it
        module: sum(size[around] for around in loads if f"{module}.".startswith(f"{around}."))
        for module in {plain(module) for module in graph.modules}
    }
    first: dict[str, int] = {}  # of each call
    for op in np.flatnonzero(~graph.is_parameter).tolist():
        space[op] += held[plain(graph.modules[op])]
        if plain(graph.modules[op]) in loads:
            first.setdefault(graph.modules[op], op)
    for call, op in first.items():
        op_time[op, way[1]] += (
            cluster.latency[way] + size[plain(call)] * cluster.seconds_per_byte[way]
        )
    brought = np.zeros(graph.num_ops, dtype=bool)
    brought[[parameter for parameters in loads.values() for parameter in parameters]] = True
    kept = ~brought[graph.input_op]
    count = np.bincount(graph.edge_target[kept], minlength=graph.num_ops)
    allowed = [
        (MEMORY,) if yes and there == STORE else kinds
        for kinds, yes in zip(graph.allowed, brought, strict=True)
    ]
    changed = replace(
        graph,
        allowed=tuple(allowed),
        workspace_bytes=space,
        input_start=np.concatenate([[0], np.cumsum(count)]),
        input_op=graph.input_op[kept],
    )
    return Problem(changed, cluster, Costs(op_time, problem.costs.source))
