"""Contiguous: the best split of the chain of layers into consecutive parts, by dynamic programming.

After Tarnawski, Phanishayee, Devanur, Mahajan and Nina Paravecino, Efficient Algorithms for Device
Placement of DNN Graph Operators, NeurIPS 2020, and PipeDream (Narayanan et al., SOSP 2019). A part
takes its forward and its backward ops, parameters and updates. Devices that are alike are counted,
not named, so there are few states: the cut, how many of each kind are taken, and the kind of the
last.

There are three goals, each within the memory of every device:

1. The sum of the parts and of the transfers between them. Without microbatches, parts run one after
   another.
2. The same, with unawaited work (gradients of weights, updates) beside the backward pass of earlier
   parts, as in the order `rank`.
3. The slowest part, as in a pipeline. The steps of a recurrent model are one.

Differs in: one chain (by layer, then program order) where Tarnawski et al. cut the graph along any
of its ideals. Large graphs are cut at a few hundred places only. Memory is an estimate: the
capacity is lowered until the simulation agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._shared.fitting import best_reordered, fastest_allowed, fitted
from roost.placers._shared.orders import common_orders
from roost.placers._shared.units import Units
from roost.placers._splits.cheapest_cuts import (
    DeviceKinds,
    SectionBytes,
    SectionSeconds,
    cheapest_parts,
)
from roost.placers._splits.section_chain import SectionChain
from roost.placers._splits.unit_graph import accelerators

_SCALES = (1.0, 0.9, 0.8, 0.65)  # of the memory
_MOST_STATES = 256  # eight devices of which no two are alike, or many more that are
_MOST_WORK = 1e8  # parts to compare, a fraction of a second


@dataclass(frozen=True)
class Contiguous:
    """The best contiguous split, cut at no more than `most_cuts` places."""

    most_cuts: int = 500

    def __post_init__(self) -> None:
        if self.most_cuts < 1:
            raise InputError(f"most_cuts is {self.most_cuts}; it must be at least 1")

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """The best for any of the goals, each with as much memory as turns out to fit."""
        units = Units.of(problem)
        kinds = _kinds(units)
        states = int(np.prod([len(kind) + 1 for kind in kinds]))
        affordable = int(np.sqrt(2 * _MOST_WORK / (states * len(kinds) ** 2)))
        chain = SectionChain.of(units, max(2, min(self.most_cuts + 1, affordable)))
        trials: list[Trial] = []
        for splits in _splits(chain, kinds):
            for unit_device in splits:
                trials.append(best_of(evaluate(common_orders(problem, units.devices(unit_device)))))
                if trials[-1].feasible:
                    trials.append(best_reordered(problem, evaluate, trials[-1]))
                    break
        if not any(trial.feasible for trial in trials):
            nearest = best_of(trials).placement
            trials.append(fitted(units, evaluate, units.unit_devices(nearest.device)))
        return best_of(trials).placement


def _kinds(units: Units) -> list[list[int]]:
    """Devices that are alike, the quickest first; only so many that the states are few enough."""
    problem = units.problem
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, device in enumerate(problem.cluster.devices):
        op_time = problem.op_time[:, number].tobytes()
        key = (device.kind, device.host, device.memory, device.gap, op_time)
        alike.setdefault(key, []).append(number)
    seconds = np.where(units.allowed, units.time, 0.0).sum(axis=0)
    runs_nothing = np.asarray(~units.allowed.any(axis=0))
    by_speed = sorted(alike.values(), key=lambda kind: (runs_nothing[kind[0]], seconds[kind[0]]))
    kinds = []
    states = 1
    for kind in by_speed:
        room = min(len(kind), _MOST_STATES // states - 1)
        if room > 0:
            kinds.append(kind[:room])
            states *= room + 1
    return kinds


def _splits(chain: SectionChain, kinds: list[list[int]]) -> Iterator[Iterator[Array]]:
    """Devices of units [units]: for each goal, with less and less of the memory."""
    cluster = chain.units.problem.cluster
    num_ops = chain.units.problem.graph.num_ops
    firsts = [kind[0] for kind in kinds]
    unawaited = chain.unawaited()
    late = chain.late()
    everything = _seconds(chain, firsts, np.ones(num_ops, dtype=bool))
    backward = _seconds(chain, firsts, late & ~unawaited)
    beside, beside_late = (_seconds(chain, firsts, ops) for ops in (unawaited, unawaited & late))
    nbytes = SectionBytes(chain.held(), chain.passing(), chain.traffic())
    latency = _between(cluster.latency, kinds)
    rate = _between(cluster.seconds_per_byte, kinds)
    counts = np.array([len(kind) for kind in kinds])
    no_cpus = counts * np.isin(firsts, accelerators(chain.units.problem))
    # The quickest kind, without the others.
    alone = no_cpus * (np.arange(len(counts)) == np.argmax(no_cpus > 0))
    penalty = 1.0 + 10.0 * float(everything[-1].max())

    def split(pipelined: bool, counts: Array, seconds: SectionSeconds) -> Iterator[Array]:
        devices = DeviceKinds(counts, latency, rate)
        for scale in _SCALES:
            memory = cluster.memory[firsts] * scale
            parts = cheapest_parts(pipelined, seconds, nbytes, devices, memory, penalty)
            yield _devices(chain, kinds, parts)

    nothing = np.zeros_like(everything)
    one_by_one = SectionSeconds(everything, nothing, nothing, nothing)
    yield split(False, counts, one_by_one)
    yield split(False, counts, SectionSeconds(everything - beside, backward, beside, beside_late))
    if no_cpus.any():
        yield split(True, no_cpus, one_by_one)
    if (alone != no_cpus).any():
        yield split(True, alone, one_by_one)


def _seconds(chain: SectionChain, devices: list[int], ops: Array) -> Array:
    """[sections + 1, devices] seconds of some ops, added up over all sections before each.

    Where a unit may not run, its seconds are those of the fastest device.
    """
    units = chain.units
    total = np.zeros((units.num_units, units.problem.cluster.num_devices))
    np.add.at(total, units.unit[ops], units.problem.op_time[ops])
    fastest = np.where(units.allowed, total, np.inf).min(axis=1)
    return chain.add_up(np.where(units.allowed, total, fastest[:, None])[:, devices])


def _between(matrix: Array, kinds: list[list[int]]) -> Array:  # [kinds, kinds]
    """The mean over the links from devices of one kind to others of another."""

    def mean(sources: list[int], targets: list[int]) -> float:
        links = [matrix[one, other] for one in sources for other in targets if one != other]
        return float(np.mean(links)) if links else 0.0

    return np.array([[mean(sources, targets) for targets in kinds] for sources in kinds])


def _devices(chain: SectionChain, kinds: list[list[int]], parts: Array) -> Array:  # [units] i4
    """The device of each unit, from the ends and kinds of the parts, the last part first."""
    free = [iter(kind) for kind in kinds]
    device = np.zeros(chain.num_sections, dtype=np.int32)
    start = 0
    for end, kind in parts[::-1].tolist():
        device[start:end] = next(free[kind])
        start = end
    return fastest_allowed(chain.units, device[chain.section])
