"""One annealing chain: a problem under one order, ready to be annealed from any start."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._annealing.move_space import space_of
from roost.placers._annealing.proposals import KINDS
from roost.placers._annealing.single_moves import anneal_singly
from roost.placers._annealing.sixteen_moves import anneal
from roost.placers._annealing.state import (
    ChainState,
    Cooling,
    Scratch,
    Space,
    Tables,
    new_scratch,
)
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.vector import LANES


class Cost(NamedTuple):
    """The cost of a placement; the smaller tuple is the better placement."""

    excess: float  # memory beyond the capacities, as shares of them; 0 where it fits
    step_time: float  # seconds


def cost_of(problem: Problem, placement: Placement) -> Cost:
    """Simulate a placement."""
    step = Simulator.of(problem).simulate(placement)
    return Cost(float((step.missing / (step.capacity + 1.0)).sum()), step.step_time)


class Annealer:
    """Anneals placements of a problem's units, all under the order of one placement.

    `alone`: one move at a time, mostly of what the step waits for, also where several can be
    simulated at once.
    """

    def __init__(
        self,
        problem: Problem,
        units: Units,
        example: Placement,
        space: Space | None = None,
        alone: bool = False,
    ) -> None:
        self.problem = problem
        self.units = units
        self.example = example
        self.space = space or space_of(units)
        simulator = Simulator.of(problem)
        self.layout = simulator.layout(example)
        self.tables = Tables(
            number_of=simulator.numbers(self.layout),
            is_parameter=np.array(problem.graph.is_parameter),
            unit_of=units.unit[self.layout.op].astype(np.int32),
            capacity=problem.cluster.memory,
        )
        self._is_shared = problem.cluster.has_shared_buses
        self._alone = alone or self._may_fetch()
        self._by_critical = alone
        self._scratch: Scratch | None = None  # large, and fresh memory is slow
        self.measured = 0.0  # seconds a batch took lately: to end in time, and for nothing else

    def _may_fetch(self) -> bool:
        """True if an op and a parameter that it reads can be on different devices."""
        graph = self.problem.graph
        unit = self.units.unit
        reads = graph.is_parameter[graph.input_op]
        return bool((unit[graph.input_op[reads]] != unit[graph.edge_target[reads]]).any())

    def chain(self, unit_device: Array, seed: int) -> ChainState:
        """A chain that begins with these devices [units]."""
        placed = np.array(unit_device, dtype=np.int32)
        excess, step_time = self.cost(placed)
        return ChainState(
            placed=placed,
            best=placed.copy(),
            penalty=np.array([1000.0 if excess == 0 else 20.0]),
            best_step=np.array([step_time]),
            best_excess=np.array([excess]),
            step=np.array([step_time]),
            rng=np.array([seed], dtype=np.uint64),
        )

    def cost(self, unit_device: Array) -> Cost:
        """The cost of these devices [units]."""
        return cost_of(self.problem, self.placement(unit_device))

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices [units], in this annealer's order."""
        return replace(self.example, device=self.units.devices(unit_device))

    def run(self, chain: ChainState, num_batches: int, hot: float, cold: float) -> int:
        """Anneal from one temperature to another, as shares of the step time; simulations spent.

        A batch is as many simulations as the lanes hold, or one move where lanes cannot be used.
        """
        scratch = self._scratch = self._scratch or self._new_scratch()
        began = time.perf_counter()
        given = (self.layout, self.space, self.tables, chain, scratch)
        cooling = Cooling(num_batches, hot, cold)
        if self._alone:
            spent = anneal_singly(*given, cooling, self._by_critical)
        else:
            spent = anneal(*given, cooling, not self._is_shared)
        self.measured = (time.perf_counter() - began) / max(1, num_batches)
        return int(spent)

    @property
    def batch(self) -> int:
        """The most simulations in a batch."""
        return 1 if self._alone else LANES

    @property
    def seconds_per_batch(self) -> float:
        """About what a batch takes, for planning."""
        each = 80e-9 if self._alone else 120e-9 if self._is_shared else 60e-9
        return each * self.problem.graph.num_ops + 2e-6

    def _new_scratch(self) -> Scratch:
        window = np.broadcast_to(self.example.prefetch_bytes, self.problem.cluster.num_devices)
        return new_scratch(
            self.layout,
            self.tables,
            self.units.num_units,
            KINDS,
            np.array(window, dtype=np.int64),
            self._is_shared,
        )
