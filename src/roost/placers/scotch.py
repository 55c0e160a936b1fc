"""Scotch: static mapping of the graph onto the topology of the devices, with the CPU.

A baseline of Mirhoseini et al., ICML 2017 (arXiv 1706.04972); the library is Pellegrini and Roman,
HPCN Europe 1996. Units are the vertices of the graph, weighed by their seconds. The bytes between
them are its edges. The devices are a complete graph: a vertex weighs as much as its device is fast,
an edge is as long as its link takes for a byte.

Differs in: seconds of the cost model where the paper has FLOP; units, with parameters where they
are read, where the paper has single ops. Scotch ignores memory, allowed devices and the order of
ops. So units are moved to a device that may run them, and from devices that overflow. Scotch always
starts from the same seed, on one thread: that is also ten times faster than many threads.
"""

from __future__ import annotations

import contextlib
import io
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import MissingExtra
from roost.placers import Evaluate
from roost.placers._shared.fitting import fitted
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import MOST_WEIGHT, mean_seconds, speeds, unit_graph, whole

_FARTHEST = 1000  # length of the slowest link beside the fastest: beyond that they are all alike
_FASTEST = 1000  # weight of all devices together
_DETERMINISTIC = 0  # SCOTCH_OPTIONNUMDETERMINISTIC


@dataclass(frozen=True)
class Scotch:
    """The library's own mapping onto all devices."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Map, make it fit, and take the best order."""
        units = Units.of(problem)
        mapped = mapping(units, list(range(problem.cluster.num_devices)))
        return fitted(units, evaluate, mapped).placement


def mapping(units: Units, devices: list[int]) -> Array:  # [units] device
    """The device of each unit in Scotch's mapping onto some of the devices."""
    chosen = np.array(devices)
    speed = speeds(units, devices)
    if len(devices) == 1 or units.num_units == 1:
        return np.full(units.num_units, chosen[speed.argmax()])
    scotch = _library()
    distance = _distances(units.problem, devices)
    graph = unit_graph(units)
    edge_weight = whole(graph.size, MOST_WEIGHT // int(distance.max()))
    with contextlib.ExitStack() as stack:
        scotch.random_reset()
        machine = _graph(scotch, stack, *_complete(distance), whole(speed, _FASTEST))
        target = _architecture(scotch, stack, machine, len(devices))
        seconds = whole(mean_seconds(units, devices))
        source = _graph(scotch, stack, graph.start, graph.neighbour, edge_weight, seconds)
        part = _on_one_thread(scotch, stack, source).map(target)
    return np.asarray(chosen[part])


def _distances(problem: Problem, devices: list[int]) -> Array:  # [devices, devices] i8
    """The lengths of the links, the fastest 1, the same in both directions as Scotch needs it."""
    rate = problem.cluster.seconds_per_byte[np.ix_(devices, devices)]
    rate = (rate + rate.T) / 2
    fastest = rate[~np.eye(len(devices), dtype=bool)].min()
    return np.asarray(np.clip(np.rint(rate / fastest), 1, _FARTHEST), dtype=np.int64)


def _complete(distance: Array) -> tuple[Array, Array, Array]:
    """A complete graph as starts, neighbours and edge weights."""
    count = len(distance)
    apart = ~np.eye(count, dtype=bool)
    neighbour = np.nonzero(apart)[1]
    return np.arange(count + 1) * (count - 1), neighbour, distance[apart]


def _library() -> Any:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it greets on standard error
            import pyscotch
            import pyscotch.libscotch
    except ImportError as error:
        raise MissingExtra("pyscotch", "partition") from error
    return pyscotch


def _graph(
    scotch: Any,
    stack: contextlib.ExitStack,
    start: Array,
    neighbour: Array,
    edge_weight: Array,
    weight: Array,
) -> Any:
    graph = stack.enter_context(scotch.Graph())
    graph.build(start, neighbour, weight, edge_weight)
    return graph


def _architecture(scotch: Any, stack: contextlib.ExitStack, machine: Any, count: int) -> Any:
    """A target of any shape, by the C library: its Python wrapper has regular shapes only."""
    library = scotch.libscotch
    target = stack.enter_context(scotch.Architecture())
    with scotch.Strategy()._materialized_mapping(count) as strategy:
        failed = library.SCOTCH_archBuild(
            byref(target._arch), byref(machine._graph), library.SCOTCH_Num(0), None, byref(strategy)
        )
    if failed:
        raise library.scotch_error("Scotch refuses the graph of the devices", failed)
    return target


def _on_one_thread(scotch: Any, stack: contextlib.ExitStack, graph: Any) -> Any:
    """The graph, bound to one thread: with more, equal calls give unequal mappings."""
    library = scotch.libscotch
    context = stack.enter_context(scotch.Context())
    if failed := library.SCOTCH_contextThreadSpawn(byref(context._ctx), 1, None):
        raise library.scotch_error("cannot hold Scotch to one thread", failed)
    context.option_set(_DETERMINISTIC, 1)
    context.random_reset()
    return stack.enter_context(context.bind_graph(graph))
