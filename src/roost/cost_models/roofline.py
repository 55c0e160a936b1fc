"""Time of an op: what limits it, compute or memory, plus the overhead of launching it (Williams et al. 2009).

Differs in: no efficiency below the peak, for now; the figures in the cluster are taken as attainable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.errors import InputError


@dataclass(frozen=True)
class Roofline:
    """The larger of FLOP over peak and bytes over bandwidth, plus launch overhead; ops that do neither are free."""

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        moved = graph.bytes_read + graph.bytes_written
        works = ((graph.flop > 0) | (moved > 0)) & ~graph.is_parameter
        columns = [self._times(graph, device, moved) * works for device in cluster.devices]
        return Costs(np.stack(columns, axis=1), source="roofline")

    def _times(self, graph: Graph, device: Device, moved: Array) -> Array:
        if not device.peak or device.memory_bandwidth == 0:
            raise InputError(
                f"device {device.name!r} needs peak and memory_bandwidth for a roofline; add them to its cluster file"
            )
        # A dtype the device has no figure for runs at the slowest of those it has.
        slowest = min(device.peak.values())
        rates = {dtype: device.peak.get(dtype, slowest) for dtype in set(graph.dtypes)}
        rate = np.array([rates[dtype] for dtype in graph.dtypes])
        if (rate == 0).any():
            raise InputError(f"device {device.name!r} has a peak of 0 FLOP/s; it must be above zero")
        times: Array = np.maximum(graph.flop / rate, moved / device.memory_bandwidth) + device.launch_overhead
        return times
