"""Times at which the ops of a step begin and end on their devices: the measured timeline.

The thread of a CPU reads the clock of the process. A CUDA device stamps the time in its own stream,
and its stamps are turned into seconds of that clock afterwards. Transfers are not timed: where a
device waits for one, its timeline has a gap.
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
from roost.runtime.ops.cuda import RuntimeDevice
from roost.simulator.compiled import simulate


class OpClock:
    """The stamps of the last step."""

    def __init__(self, devices: Sequence[RuntimeDevice]) -> None:
        self._devices = devices
        self._stamps: dict[int, tuple[int, list[Any]]] = {}  # op -> device, stamps of begin and end
        self._began = self._ended = 0.0

    def around(self, op: int, device: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Give the functions to call before an op and after it."""
        stamps: list[Any] = [None, None]
        self._stamps[op] = device, stamps
        stamp = self._devices[device].stamp

        def before() -> None:
            stamps[0] = stamp()

        def after() -> None:
            stamps[1] = stamp()

        return before, after

    def begin(self) -> None:
        for device in self._devices:
            device.set_clock()
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def timeline(
        self, problem: Problem, placement: Placement, peaks: Mapping[str, int]
    ) -> Timeline:
        """Give the timeline of the last step; memory of CPUs is simulated, of others measured."""
        if not self._ended:
            raise InputError("no step has been run yet: there is no timeline")
        start = np.zeros(problem.graph.num_ops)
        finish = np.zeros(problem.graph.num_ops)
        for op, (device, stamps) in self._stamps.items():
            seconds = self._devices[device].seconds
            start[op], finish[op] = (seconds(stamp) - self._began for stamp in stamps)
        simulated = simulate(problem, placement)
        peak = simulated.peak_memory.copy()
        for name, held in peaks.items():
            peak[problem.cluster.index_of(name)] = held
        none = np.zeros(0)
        whole = np.zeros(0, np.int64)
        return Timeline(
            self._ended - self._began, peak, simulated.capacity, simulated.num_transfers,
            simulated.device_names, simulated.op_names, "measured", placement.device, start, finish,
            Transfers(whole, whole, whole, whole, none, none), MemoryTrack(whole, none, whole),
        )  # fmt: skip
