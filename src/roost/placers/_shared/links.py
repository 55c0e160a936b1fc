"""The average link of a cluster, to guess transfers before devices are chosen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster


class MeanLink(NamedTuple):
    """Means over all pairs of devices."""

    latency: float  # seconds
    seconds_per_byte: float

    def seconds(self, nbytes: Array) -> Array:
        """Seconds of each transfer of so many bytes."""
        return np.asarray(self.latency + nbytes * self.seconds_per_byte)


def mean_link(cluster: Cluster) -> MeanLink:
    """The average link; it takes no time if there is one device only."""
    if cluster.num_devices < 2:
        return MeanLink(0.0, 0.0)
    apart = ~np.eye(cluster.num_devices, dtype=bool)
    return MeanLink(cluster.latency[apart].mean(), cluster.seconds_per_byte[apart].mean())
