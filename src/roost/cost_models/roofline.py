"""Costs from a roofline: an op takes its time in compute or in memory, plus its launch.

After Williams et al. 2009. Differs in: the roof is the rate that each class of op attains on the
device, `efficiency` in its cluster file, not the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.kinds import CLASSES as CLASSES
from roost.core.kinds import class_of
from roost.errors import InputError


@dataclass(frozen=True)
class Roofline:
    """The larger of FLOP / attainable rate and bytes / bandwidth, plus the launch overhead."""

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """The costs of a graph on a cluster; an op without FLOP and bytes costs nothing."""
        moved = graph.bytes_read + graph.bytes_written
        works = ((graph.flop > 0) | (moved > 0)) & ~graph.is_parameter
        columns = [self._times(graph, device, moved) * works for device in cluster.devices]
        return Costs(np.stack(columns, axis=1), source="roofline")

    def _times(self, graph: Graph, device: Device, moved: Array) -> Array:
        if not device.peak or device.memory_bandwidth == 0:
            raise InputError(
                f"device {device.name!r} needs peak and memory_bandwidth for a roofline; add them "
                "to its cluster file"
            )
        pairs = set(zip(graph.dtypes, graph.kinds, strict=True))
        rates = {pair: self._rate(device, *pair) for pair in pairs}
        rate = np.array([rates[pair] for pair in zip(graph.dtypes, graph.kinds, strict=True)])
        if (rate == 0).any():
            raise InputError(
                f"device {device.name!r} has a peak of 0 FLOP/s; it must be above zero"
            )
        bandwidth = device.memory_bandwidth * device.efficiency.get("memory", 1.0)
        times: Array = np.maximum(graph.flop / rate, moved / bandwidth) + device.launch_overhead
        return times

    def _rate(self, device: Device, dtype: str, kind: str) -> float:
        # A dtype without a figure runs at the slowest rate of the device.
        peak = device.peak.get(dtype, min(device.peak.values()))
        return peak * device.efficiency.get(class_of(kind), 1.0)


def known_share(graph: Graph) -> tuple[float, float]:
    """The shares of a graph's FLOP and bytes that belong to ops with a FLOP formula.

    The FLOP of the other ops are counts of elements. Their bytes limit those ops, and bytes are
    counted for every op.
    """
    known = ~graph.counted
    moved = graph.bytes_read + graph.bytes_written
    return (
        float(graph.flop[known].sum() / max(graph.flop.sum(), 1.0)),
        float(moved[known].sum() / max(int(moved.sum()), 1)),
    )
