"""Time of an op: what limits it, compute or memory, plus the overhead of launching it (Williams et
al. 2009).

Differs in: the roof is what each class of op attains on the device, `efficiency` in its cluster
file, not the peak.
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
    """The larger of FLOP over the attainable rate and bytes over bandwidth, plus launch overhead;
    free ops are free."""

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
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
        # A dtype the device has no figure for runs at the slowest of those it has.
        peak = device.peak.get(dtype, min(device.peak.values()))
        return peak * device.efficiency.get(class_of(kind), 1.0)


def known_share(graph: Graph) -> tuple[float, float]:
    """Which share of a graph's FLOP, and of the bytes it moves, belongs to ops whose FLOP are known
    by a formula.

    The rest counts elements: such ops are limited by the bytes they move, and those are counted for
    every op.
    """
    kinds = {kind: class_of(kind) != "other" for kind in set(graph.kinds)}
    known = np.array([kinds[kind] for kind in graph.kinds])
    moved = graph.bytes_read + graph.bytes_written
    return (
        float(graph.flop[known].sum() / max(graph.flop.sum(), 1.0)),
        float(moved[known].sum() / max(int(moved.sum()), 1)),
    )
