"""When each group runs under a placement, by the simulator."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD
from roost.core.placement import Placement
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.simulator.kernels import batch


# [groups] seconds, twice.
def group_times(units: Units, placement: Placement) -> tuple[Array, Array]:
    """The start of the first op of each group, and the finish of the last of its forward ops (of
    all, without any)."""
    graph, layout = units.problem.graph, Simulator.of(units.problem).layout(placement)
    placed = placement.device.astype(np.uint32)
    window = np.array(
        np.broadcast_to(placement.prefetch_bytes, units.problem.cluster.num_devices), dtype=np.int64
    )
    device, home = placed[layout.op], placed[layout.parameter_op]
    _, _, begins, ends, _, _ = batch.run_full(
        layout, device, home, window, placement.order == "fifo"
    )
    start, finish = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    start[layout.op], finish[layout.op] = begins, ends
    last = np.zeros(units.num_units)
    forward = graph.phase == FORWARD
    np.maximum.at(last, units.unit[forward], finish[forward])
    without = last <= 0
    everything = np.zeros(units.num_units)
    np.maximum.at(everything, units.unit, finish)
    return start[units.leader], np.where(without, everything, last)
