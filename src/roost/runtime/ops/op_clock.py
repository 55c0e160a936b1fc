"""When each op of a step began and ended on its device: the measured timeline.

A CPU's thread reads the host's clock. A CUDA device is told to note the time in its own stream,
which the host turns into its own seconds afterwards. Transfers are not timed: where a device waits
for one, its timeline has a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import MemoryTrack, Timeline, Transfers
from roost.errors import InputError
from roost.runtime.step.devices import RuntimeDevice
from roost.simulator.compiled import simulate


class OpClock:
    """The stamps of the last step."""

    def __init__(self, places: Sequence[RuntimeDevice]) -> None:
        self._places = places
        # Op -> device, and stamps at its begin and its end.
        self._stamps: dict[int, tuple[int, list[Any]]] = {}
        self._began = self._ended = 0.0

    def around(self, op: int, device: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """What is called before an op, and after it."""
        stamps: list[Any] = [None, None]
        self._stamps[op] = device, stamps
        place = self._places[device]

        def before() -> None:
            stamps[0] = place.stamp()

        def after() -> None:
            stamps[1] = place.stamp()

        return before, after

    def begin(self) -> None:
        for place in self._places:
            place.set_clock()
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def timeline(
        self, problem: Problem, placement: Placement, peaks: Mapping[str, int]
    ) -> Timeline:
        """Of the last step. Memory of CUDA devices is what they held; of others what the simulator
        says."""
        if not self._ended:
            raise InputError("no step has been run yet: there is no timeline")
        start, finish = np.zeros(problem.graph.num_ops), np.zeros(problem.graph.num_ops)
        for op, (device, stamps) in self._stamps.items():
            start[op], finish[op] = (
                self._places[device].seconds(stamp) - self._began for stamp in stamps
            )
        simulated = simulate(problem, placement)
        peak = simulated.peak_memory.copy()
        for name, held in peaks.items():
            peak[problem.cluster.index_of(name)] = held
        none, whole = np.zeros(0), np.zeros(0, np.int64)
        return Timeline(
            self._ended - self._began, peak, simulated.capacity, simulated.num_transfers,
            simulated.device_names, simulated.op_names, "measured", placement.device, start, finish,
            Transfers(whole, whole, whole, whole, none, none), MemoryTrack(whole, none, whole),
        )  # fmt: skip
