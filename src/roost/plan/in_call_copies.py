"""Weights that are copied in the call of their module, not streamed ahead of it.

`module_search` uses them. A window takes memory for the whole step, at least as much as the largest
module needs. If activations leave no room for it, the largest modules get their weights in their
calls: a call waits for its weights and holds them, and they go when it ends.
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
    """Give for each module its parameters that can be brought: large ones of its own or inside."""
    loads: dict[str, list[int]] = {}
    for parameter, modules in readers_of(graph).items():
        module = modules[0] if len(modules) == 1 else ""
        if not module or not graph.op_names[parameter].startswith(f"{module}."):
            continue
        large = graph.output_bytes[parameter] >= ByModule.small_bytes
        if large and may_be_brought(graph, parameter):
            loads.setdefault(module, []).append(parameter)
    return loads


def at_once(graph: Graph) -> Graph:
    """Let the first op of a call read all weights that are brought for it: they come together."""
    several = {module: own for module, own in loads_of(graph).items() if len(own) > 1}
    inputs = [list(each) for each in graph.input_lists()]
    seen = set[str]()
    for op in np.flatnonzero(~graph.is_parameter).tolist():
        call = graph.modules[op]
        weights = several.get(plain(call), [])
        if weights and call not in seen:
            seen.add(call)
            known = set(inputs[op])
            inputs[op] += [weight for weight in weights if weight < op and weight not in known]
    if not seen:
        return graph
    starts = np.concatenate([[0], np.cumsum([len(each) for each in inputs])])
    return replace(graph, input_start=starts, input_op=np.concatenate(inputs))


def copied_in_calls(problem: Problem, main: str, modules: Collection[str]) -> Problem:
    """Change the problem: the weights of these modules are copied to the main device in calls."""
    if not modules:
        return problem
    graph = problem.graph
    cluster = problem.cluster
    hosts = [one.name for one in cluster.devices if one.name == STORE or one.kind == "cpu"]
    if not hosts:
        raise InputError("weights are to be copied in calls, but no device is a CPU to copy from")
    source = STORE if STORE in hosts else hosts[0]
    link = cluster.index_of(source), cluster.index_of(main)
    loads = {module: own for module, own in loads_of(graph).items() if module in modules}
    size = {module: int(graph.output_bytes[own].sum()) for module, own in loads.items()}
    held = {  # while a module is called: its own weights, and those of modules around it
        module: sum(size[around] for around in loads if f"{module}.".startswith(f"{around}."))
        for module in {plain(module) for module in graph.modules}
    }
    workspace = graph.workspace_bytes.copy()
    op_time = problem.op_time.copy()
    seen = set[str]()
    for op in np.flatnonzero(~graph.is_parameter).tolist():
        call = graph.modules[op]
        module = plain(call)
        workspace[op] += held[module]
        if module in loads and call not in seen:  # the first op of the call
            seen.add(call)
            copying = size[module] * cluster.seconds_per_byte[link]
            op_time[op, link[1]] += cluster.latency[link] + copying
    brought = np.zeros(graph.num_ops, dtype=bool)
    brought[[parameter for own in loads.values() for parameter in own]] = True
    kept = ~brought[graph.input_op]
    count = np.bincount(graph.edge_target[kept], minlength=graph.num_ops)
    in_store = brought if source == STORE else np.zeros_like(brought)
    changed = replace(
        graph,
        allowed=tuple(
            (MEMORY,) if here else kinds
            for kinds, here in zip(graph.allowed, in_store.tolist(), strict=True)
        ),
        workspace_bytes=workspace,
        input_start=np.concatenate([[0], np.cumsum(count)]),
        input_op=graph.input_op[kept],
    )
    return Problem(changed, cluster, Costs(op_time, problem.costs.source))
