"""One annealing chain: a problem under one order, ready to be annealed from any start."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._annealing import single_moves, sixteen_moves
from roost.placers._annealing.move_space import space_of
from roost.placers._annealing.proposals import KINDS, Draft, Space
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.lanes import new_lanes
from roost.simulator.kernels.vector import LANES


@dataclass
class Chain:
    """Where one annealing stands."""

    placed: Array  # [units] i4
    best: Array  # [units] i4
    figures: Array  # [4] f8 see the kernel
    state: Array  # [1] u8 of the chance


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
        self.problem, self.units, self.example = problem, units, example
        self.space = space or space_of(units)
        simulator = Simulator.of(problem)
        self.layout = simulator.layout(example)
        self.number = simulator.numbers(self.layout)
        self._simulator = simulator
        graph = problem.graph
        self._is_parameter = np.array(graph.is_parameter)
        self._unit_of = units.unit[self.layout.op].astype(np.int32)  # [positions]
        self._shared = problem.cluster.has_shared_buses
        self._alone, self._look = alone or self._may_fetch(), alone
        self._room: Any = None
        self.measured = 0.0  # seconds a batch took lately: to end in time, and for nothing else

    def _may_fetch(self) -> bool:
        """Whether an op and a parameter it reads can be apart."""
        graph, unit = self.problem.graph, self.units.unit
        reads = graph.is_parameter[graph.input_op]
        return bool((unit[graph.input_op[reads]] != unit[graph.edge_target[reads]]).any())

    def chain(self, unit_device: Array, seed: int) -> Chain:
        """A chain that begins with these devices."""
        placed = np.array(unit_device, dtype=np.int32)
        step, excess = self.cost(placed)
        figures = np.array([1000.0 if excess == 0 else 20.0, step, excess, step])
        return Chain(placed, placed.copy(), figures, np.array([seed], dtype=np.uint64))

    def cost(self, unit_device: Array) -> tuple[float, float]:
        """The step time and the excess of memory, as shares of the capacities, of one placement."""
        timeline = self._simulator.simulate(self.placement(unit_device))
        beyond = np.maximum(timeline.peak_memory - timeline.capacity, 0)
        return timeline.step_time, float((beyond / (timeline.capacity + 1.0)).sum())

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices, in this annealer's order."""
        return replace(self.example, device=self.units.devices(unit_device))

    def run(self, chain: Chain, num_batches: int, hot: float, cold: float) -> int:
        """Anneal for so many batches, from one temperature to another, as shares of the step time;
        simulations spent.

        A batch is as many simulations as the lanes hold, or where these cannot be used about as
        much time.
        """
        if self._room is None:
            self._room = self._new_room()
        began = time.perf_counter()
        lanes, draft, work = self._room
        work.placed[:] = chain.placed
        memory, plan = self.problem.cluster.memory, (num_batches, hot, cold)
        kept = (chain.best, chain.figures, chain.state)
        if self._alone:
            walk = (self.layout, self.space, draft, work, self._unit_of, memory)
            spent = single_moves.walk(*walk, *kept, *plan, self._look)
        else:
            world = (self.number, self._is_parameter, self._unit_of, memory)
            spent = sixteen_moves.anneal(
                self.layout, lanes, self.space, draft, work, *world, *kept, *plan, not self._shared
            )
        chain.placed[:] = work.placed
        self.measured = (time.perf_counter() - began) / max(1, num_batches)
        return int(spent)

    @property
    def batch(self) -> int:
        """The most simulations in a batch."""
        return 1 if self._alone else LANES

    @property
    def seconds_per_batch(self) -> float:
        """About what a batch takes, for planning."""
        each = 80e-9 if self._alone else 120e-9 if self._shared else 60e-9
        return each * self.problem.graph.num_ops + 2e-6

    def _new_room(self) -> tuple[Any, Draft, sixteen_moves.Work]:
        """Lanes, a draft and work, kept from run to run: they are large, and fresh memory is
        slow."""
        graph, cluster, num_units = self.problem.graph, self.problem.cluster, self.units.num_units
        room = 4 * graph.num_ops + 64
        draft = Draft(
            start=np.zeros(LANES + 1, np.int64),
            op=np.zeros(room, np.int32),
            device=np.zeros(room, np.int32),
            unit_start=np.zeros(LANES + 1, np.int64),
            unit=np.zeros(room, np.int32),
            unit_device=np.zeros(room, np.int32),
            kind=np.zeros(LANES, np.int64),
            tried=np.zeros(KINDS),
            gained=np.zeros(KINDS),
            odds=np.zeros(KINDS),
        )
        work = sixteen_moves.Work(
            placed=np.zeros(num_units, np.int32),
            device=np.zeros(len(self.layout.op), np.uint32),
            home=np.zeros(len(self.layout.parameter_op), np.uint32),
            held=np.zeros(64, np.int64),
            row=np.zeros((1, graph.num_ops), np.int32),
            step=np.zeros(LANES),
            excess=np.zeros(LANES),
            score=np.zeros(LANES),
            hot=np.zeros(num_units, np.int32),
            mark=np.zeros(num_units, np.bool_),
            retry_start=np.zeros(LANES + 1, np.int64),
            retry_unit=np.zeros(room, np.int32),
            retry_device=np.zeros(room, np.int32),
            fetching=np.zeros(LANES, np.bool_),
            window=np.array(
                np.broadcast_to(self.example.prefetch_bytes, cluster.num_devices), dtype=np.int64
            ),
            flags=np.array([False, self._shared, True]),
            one_step=np.zeros(1),
            one_peak=np.zeros((1, cluster.num_devices), np.int64),
            one_count=np.zeros(1, np.int64),
        )
        return new_lanes(self.layout, graph.num_ops), draft, work
