"""Machines that nobody has are still clusters, and are drawn from a seed."""

from __future__ import annotations

import numpy as np

from roost.presets import cluster
from roost.presets.made_up import made_up


def test_a_made_up_machine_has_the_same_devices_at_other_speeds() -> None:
    base = cluster("k80x4")
    found = made_up(base, np.random.default_rng([0, 1]))
    assert found.device_names == base.device_names
    assert [device.kind for device in found.devices] == [device.kind for device in base.devices]
    assert (found.seconds_per_byte != base.seconds_per_byte)[~np.eye(5, dtype=bool)].all()
    peaks = {device.peak["float32"] for device in found.devices if device.kind != "cpu"}
    assert len(peaks) > 1
    assert min(peaks) > 0


def test_the_same_seed_makes_up_the_same_machine() -> None:
    one, same, other = (
        made_up(cluster("k80x2"), np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert one.devices == same.devices != other.devices
    assert one.links == same.links != other.links


def test_the_factors_of_a_made_up_machine_are_these() -> None:
    """Policies are trained on these machines: other factors are other training data."""
    base = cluster("k80x2")
    found = made_up(base, np.random.default_rng(7))
    factors = [
        (
            round(new.peak["float32"] / old.peak["float32"], 3),
            round(new.memory / old.memory, 3),
            round(new.memory_bandwidth / old.memory_bandwidth, 3),
            round(new.launch_overhead / old.launch_overhead, 3),
        )
        for new, old in zip(found.devices, base.devices, strict=True)
    ]
    assert factors == [
        (2.895, 1.0, 2.219, 0.931),
        (7.034, 0.705, 4.319, 0.931),
        (8.382, 2.233, 4.926, 0.931),
    ]
    links = zip(found.links, base.links, strict=True)
    assert {
        (round(new.bandwidth / old.bandwidth, 3), round(new.latency / old.latency, 3))
        for new, old in links
    } == {(4.295, 0.683)}
