"""Made-up clusters: a real one with other speeds, for learning that holds on more machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from roost.core.cluster import Cluster, Device

# The least and the most factor of each figure, drawn evenly in the logarithm.
_FASTER = (1.0, 30.0)  # all accelerators together: from an old one to one of today
_SLOWER = (0.25, 1.0)  # some of them, each by itself
_UNLIKE = 0.5  # share of the accelerators that are slower
_MEMORY = (0.7, 3.0)
_OVERHEAD = (0.5, 1.0)
_BANDWIDTH, _LATENCY = (0.5, 8.0), (0.5, 2.0)  # of all links together
# Memory and hosts became faster too, but less than arithmetic.
_BYTES_POWER = 0.75
_HOST_POWER = 0.5


def made_up(cluster: Cluster, rng: np.random.Generator) -> Cluster:
    """A machine with the same devices at other speeds, some of them slower than the rest."""

    def drawn(bounds: tuple[float, float]) -> float:
        return float(np.exp(rng.uniform(*np.log(bounds))))

    faster = drawn(_FASTER)
    overhead = drawn(_OVERHEAD)
    bandwidth = drawn(_BANDWIDTH)
    latency = drawn(_LATENCY)
    devices = []
    for device in cluster.devices:
        speed = faster**_HOST_POWER
        memory = 1.0
        if device.kind != "cpu":
            speed = faster * (drawn(_SLOWER) if rng.random() < _UNLIKE else 1.0)
            memory = drawn(_MEMORY)
        devices.append(_scaled(device, speed, memory, overhead))
    factors = dict.fromkeys(("bandwidth", "send_bandwidth"), bandwidth)
    seconds = ("latency", "send_latency", "sender_busy", "receiver_busy")
    factors |= dict.fromkeys(seconds, latency)
    links = []
    for link in cluster.links:
        figures: dict[str, Any] = {
            name: getattr(link, name) * factor for name, factor in factors.items()
        }
        links.append(replace(link, **figures))
    name = f"{cluster.name}_made_up"
    return replace(cluster, name=name, devices=tuple(devices), links=tuple(links), description="")


def _scaled(device: Device, speed: float, memory: float, overhead: float) -> Device:
    return replace(
        device,
        memory=int(device.memory * memory),
        peak={dtype: rate * speed for dtype, rate in device.peak.items()},
        memory_bandwidth=device.memory_bandwidth * speed**_BYTES_POWER,
        launch_overhead=device.launch_overhead * overhead,
        figures_from="made up",
    )
