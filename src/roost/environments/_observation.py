"""Observations: one padded dictionary of arrays, whatever the problem, and the space it lies in.

| key | shape | content |
|---|---|---|
| `groups` | [max_groups, features] | see GROUP_FEATURES |
| `time` | [max_groups, max_devices] | of a group on a device, beside that of an average group |
| `edges` | [max_edges, 2] | tensors from group to group |
| `edge_features` | [max_edges, features] | see EDGE_FEATURES |
| `devices` | [max_devices, features] | see DEVICE_FEATURES |
| `links` | [max_devices, max_devices, features] | from device to device; see LINK_FEATURES |
| `group_mask`, `edge_mask`, `device_mask` | | 1 for what is there, 0 for padding |
| `placement` | [max_groups, max_devices] | 1 for the device of a group that has one |
| `visited` | [max_groups] | 1 for groups that had their turn |
| `current_group` | a number | the group whose turn it is |
| `progress` | [1] | share of the steps that are done |
| `action_mask` | [max_devices] | 1 for devices where the current group may go |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike

from roost.core.arrays import Array
from roost.core.units import show_bytes
from roost.environments._grouped_problem import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    GROUP_FEATURES,
    LINK_FEATURES,
    GroupedProblem,
)
from roost.environments._settings import EnvironmentSettings
from roost.errors import InputError

_MOST_BYTES = 8 * 2**30
_CELL_BYTES = 16  # a number, and its two limits in the space


@dataclass(frozen=True)
class Sizes:
    """The sizes of an observation."""

    groups: int
    edges: int
    devices: int

    @staticmethod
    def of(problems: Sequence[GroupedProblem], settings: EnvironmentSettings, count: int) -> Sizes:
        """The sizes in the settings, or else as large as the problems need.

        Raises InputError if a problem is larger, or if so many episodes need too much memory.
        """
        room = {}
        for what in ("groups", "edges", "devices"):
            needs = [getattr(problem, f"num_{what}") for problem in problems]
            largest = int(np.argmax(needs))
            limit = getattr(settings, f"max_{what}")
            if limit is not None and needs[largest] > limit:
                raise InputError(
                    f"{problems[largest]!r} has {needs[largest]} {what}; max_{what} is {limit}: "
                    f"leave it out, or make it at least {needs[largest]}"
                )
            room[what] = limit or max(1, needs[largest])
        sizes = Sizes(**room)
        sizes._check_bytes(len(problems), count)
        return sizes

    def _check_bytes(self, num_problems: int, count: int) -> None:
        # Numbers in an observation, about.
        of_groups = self.groups * (len(GROUP_FEATURES) + 2 * self.devices + 2)
        of_devices = self.devices * (len(LINK_FEATURES) * self.devices + 7)
        num_cells = of_groups + 5 * self.edges + of_devices
        need = _CELL_BYTES * num_cells * (num_problems + count)
        if need > _MOST_BYTES:
            raise InputError(
                f"observations of {self.groups:,} groups, {self.edges:,} edges and "
                f"{self.devices:,} devices, for {num_problems:,} problems and {count:,} episodes, "
                f"take about {show_bytes(need)}; at most {show_bytes(_MOST_BYTES)} are allowed: "
                "make max_groups, max_edges, max_devices or num_envs smaller"
            )


def space_of(sizes: Sizes) -> spaces.Dict:
    """The space of observations of this size."""
    groups = sizes.groups
    edges = sizes.edges
    devices = sizes.devices
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


def fixed_parts(problems: Sequence[GroupedProblem], space: spaces.Dict) -> dict[str, Array]:
    """The parts of an observation that an episode does not change: [problems, ...] each."""
    parts = [problem.features() for problem in problems]
    return {
        key: padded([part[key] for part in parts], space[key].shape or (), space[key].dtype)
        for key in parts[0]
    }


def padded(arrays: Sequence[Array], shape: tuple[int, ...], dtype: DTypeLike | None) -> Array:
    """Arrays of unlike sizes as one array [arrays, *shape], zero elsewhere."""
    rows = np.zeros((len(arrays), *shape), dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[tuple(slice(0, size) for size in array.shape)] = array
    return rows
