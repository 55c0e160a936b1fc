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
