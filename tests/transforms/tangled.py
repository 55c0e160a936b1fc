"""Small random problems with all that transforms must respect: groups, device kinds, views,
updates, odd phases."""

import numpy as np

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem

DEVICES = ("cpu", "cuda", "cuda")


def tangled(seed, kinds=True, groups=True):
    """A problem of 1 to 80 ops on a CPU and two GPUs."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder(f"tangled_{seed}")
    names, parameters = [], []
    num_groups = int(rng.integers(1, 8))
    choice = {group: _kinds(rng) if kinds else () for group in range(num_groups)}
    orderly = rng.random() < 0.5  # phases one after the other, as in a training step
    count = int(rng.integers(1, 80))
    for op in range(count):
        group = int(rng.integers(num_groups)) if groups and rng.random() < 0.3 else None
        rules = {
            "group": None if group is None else f"g{group}",
            "allowed": (_kinds(rng, 0.1) if kinds else ()) if group is None else choice[group],
            "module": ".".join(str(n) for n in rng.integers(0, 3, rng.integers(0, 3))),
        }
        if rng.random() < 0.25:
            parameters.append(builder.parameter(f"p{op}", int(rng.integers(0, 50)), **rules))
            continue
        inputs = [str(n) for n in rng.permutation(names)[: rng.poisson(1.5)]]
        inputs += [str(n) for n in rng.permutation(parameters)[: rng.poisson(0.6)]]
        phases = ("input", "forward", "backward", "update")
        phase = (
            phases[op * 4 // count] if orderly else str(rng.choice(phases, p=(0.1, 0.4, 0.4, 0.1)))
        )
        free = rng.random() < 0.4
        size = int(rng.integers(0, 4)) * 10
        names.append(
            builder.add(
                f"op{op}",
                str(rng.choice(["conv", "relu"])),
                inputs[:1] if free else inputs,
                flop=0.0 if free else float(rng.integers(0, 10)),
                bytes_read=0 if free else int(rng.integers(0, 10)),
                bytes_written=0 if free else int(rng.integers(0, 10)),
                output_bytes=size,
                workspace_bytes=0 if free else int(rng.integers(0, 3)) * 7,
                phase=phase,
                dtype=str(rng.choice(["float32", "float16"])),
                **rules,
            )
        )
    graph = builder.freeze()
    devices = tuple(Device(f"d{d}", kind, 10**6) for d, kind in enumerate(DEVICES))
    cluster = Cluster("three", devices, (Link("*", "*", 10.0, 0.5),))
    times = rng.random((graph.num_ops, len(devices)))
    times[graph.is_parameter] = 0
    return Problem(graph, cluster, times)


def _kinds(rng, chance=0.5):
    if rng.random() > chance:
        return ()
    return (("cpu",), ("cuda",), ("cuda", "cpu"))[int(rng.integers(3))]


def anywhere(problem, seed=0, **settings):
    """A random placement that respects groups and kinds."""
    rng = np.random.default_rng(seed)
    graph = problem.graph
    may = problem.allowed.copy()
    for group in range(graph.num_groups):
        members = graph.group == group
        may[members] = may[members].all(axis=0)
    device = np.array([rng.choice(np.flatnonzero(row)) for row in may])
    members = graph.group >= 0
    device[members] = device[problem.group_leader[graph.group[members]]]
    return problem.check(Placement(device, **settings))
