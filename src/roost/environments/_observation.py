"""What an agent sees: one padded dictionary of arrays, whatever the problem, and the space that it
lies in.

| key | shape | what | | `groups` | [max_groups, features] | see GROUP_FEATURES | | `time` |
[max_groups, max_devices] | of a group on a device, beside that of an average group | | `edges`,
`edge_features` | [max_edges, 2], [max_edges, features] | tensors from group to group; see
EDGE_FEATURES | | `devices` | [max_devices, features] | see DEVICE_FEATURES | | `links` |
[max_devices, max_devices, features] | from device to device; see LINK_FEATURES | | `group_mask`,
`edge_mask`, `device_mask` | | 1 for what is there, 0 for padding | | `placement` | [max_groups,
max_devices] | 1 where a group is; a group that is not placed yet has none | | `visited` |
[max_groups] | 1 for groups that had their turn | | `current_group` | a number | whose turn it is |
| `progress` | [1] | share of the steps that are done | | `action_mask` | [max_devices] | 1 for
devices where that group may go |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from roost.core.arrays import Array
from roost.core.units import show_bytes
from roost.environments._case import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    GROUP_FEATURES,
    LINK_FEATURES,
    Case,
)
from roost.environments._settings import Settings
from roost.errors import InputError

_MOST_BYTES = 8 * 2**30
_CELL_BYTES = 16  # a number, and the two limits that its space has for it


@dataclass(frozen=True)
class Sizes:
    """How many there is room for in an observation."""

    groups: int
    edges: int
    devices: int

    @staticmethod
    def of(cases: Sequence[Case], settings: Settings, count: int = 1) -> Sizes:
        """As large as they were set, or as the problems need; raises InputError where a problem
        does not fit in.

        Or where so many episodes of that size, and the problems, would not fit into memory.
        """
        found = {}
        for what in ("groups", "edges", "devices"):
            needs = [getattr(case, f"num_{what}") for case in cases]
            largest, room = int(np.argmax(needs)), getattr(settings, f"max_{what}")
            if room is not None and needs[largest] > room:
                fix = f"leave it out, or make it at least {needs[largest]}"
                raise InputError(
                    f"{cases[largest].problem!r} has {needs[largest]} {what}; max_{what} is "
                    f"{room}: {fix}"
                )
            found[what] = room or max(1, needs[largest])
        sizes = Sizes(**found)
        sizes._check_room(len(cases), count)
        return sizes

    @property
    def num_cells(self) -> int:
        """Numbers in an observation, about."""
        of_groups = self.groups * (len(GROUP_FEATURES) + 2 * self.devices + 2)
        return of_groups + 5 * self.edges + self.devices * (len(LINK_FEATURES) * self.devices + 7)

    def _check_room(self, num_cases: int, count: int) -> None:
        need = _CELL_BYTES * self.num_cells * (num_cases + count)
        if need > _MOST_BYTES:
            raise InputError(
                f"observations of {self.groups:,} groups, {self.edges:,} edges and "
                f"{self.devices:,} devices, for "
                f"{num_cases:,} problems and {count:,} episodes, take about {show_bytes(need)}; "
                f"at most "
                f"{show_bytes(_MOST_BYTES)} are allowed: make max_groups, max_edges, max_devices "
                f"or num_envs smaller"
            )


def space_of(sizes: Sizes) -> spaces.Dict:
    """The space that observations of this size lie in."""
    groups, edges, devices = sizes.groups, sizes.edges, sizes.devices
    return spaces.Dict(
        {
            "groups": _features(groups, len(GROUP_FEATURES)),
            "time": _features(groups, devices),
            "edges": spaces.Box(0, groups, (edges, 2), np.int32),
            "edge_features": _features(edges, len(EDGE_FEATURES)),
            "devices": _features(devices, len(DEVICE_FEATURES)),
            "links": _features(devices, devices, len(LINK_FEATURES)),
            "group_mask": spaces.MultiBinary(groups),
            "edge_mask": spaces.MultiBinary(edges),
            "device_mask": spaces.MultiBinary(devices),
            "placement": spaces.MultiBinary([groups, devices]),
            "visited": spaces.MultiBinary(groups),
            "current_group": spaces.Discrete(groups),
            "progress": _features(1),
            "action_mask": spaces.MultiBinary(devices),
        }
    )


def _features(*shape: int) -> spaces.Box:
    return spaces.Box(0.0, 1.0, shape, np.float32)


def lasting_parts(cases: Sequence[Case], sizes: Sizes) -> dict[str, Array]:
    """Those parts of an observation that an episode does not change: [cases, ...] each."""
    groups, edges, devices = sizes.groups, sizes.edges, sizes.devices
    return {
        "groups": padded([case.group_features for case in cases], (groups, len(GROUP_FEATURES))),
        "time": padded([case.time for case in cases], (groups, devices)),
        "edges": padded([case.edges for case in cases], (edges, 2), np.int32),
        "edge_features": padded(
            [case.edge_features for case in cases], (edges, len(EDGE_FEATURES))
        ),
        "devices": padded(
            [case.device_features for case in cases], (devices, len(DEVICE_FEATURES))
        ),
        "links": padded([case.links for case in cases], (devices, devices, len(LINK_FEATURES))),
        "group_mask": padded([np.ones(case.num_groups) for case in cases], (groups,), np.int8),
        "edge_mask": padded([np.ones(case.num_edges) for case in cases], (edges,), np.int8),
        "device_mask": padded([np.ones(case.num_devices) for case in cases], (devices,), np.int8),
    }


def padded(
    arrays: Sequence[Array], shape: tuple[int, ...], dtype: type[np.generic] = np.float32
) -> Array:
    """Arrays of unlike sizes as one [arrays, *shape], zero where there is nothing."""
    found = np.zeros((len(arrays), *shape), dtype)
    for row, array in zip(found, arrays, strict=True):
        row[tuple(slice(0, size) for size in array.shape)] = array
    return found
