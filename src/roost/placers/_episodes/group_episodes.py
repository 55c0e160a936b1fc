"""Episodes side by side: in each of them, the groups of a problem have their turn one by one.

Mirhoseini et al. 2017 start with groups that have no device. Placeto starts with a placement, and
groups may move. The placer `placeto` and `roost.environments` add the cost of a placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from roost.core.arrays import Array


class GroupEpisodes:
    """Devices and turns of episodes. Rows are episodes; each is at its own step."""

    NOWHERE: ClassVar = -1  # the device of a group that has none yet
    ARRAYS = ("device", "visited", "visits", "num_groups", "step", "length")  # all of its state
    device: Array  # [episodes, groups] device or NOWHERE
    visited: Array  # [episodes, groups] bool: the group had its turn
    visits: Array  # [episodes, groups] groups in the order of their turns
    num_groups: Array  # [episodes]; columns beyond are padding
    step: Array  # [episodes] turns taken; -1 before the first start
    length: Array  # [episodes] turns until the end

    def make_room(self, num_episodes: int, most_groups: int) -> None:
        """Forget all episodes, and have room for so many."""
        shape = num_episodes, most_groups
        self.device = np.full(shape, self.NOWHERE, np.int32)
        self.visited = np.zeros(shape, bool)
        self.visits = np.zeros(shape, np.int64)
        self.num_groups = np.ones(num_episodes, np.int64)
        self.step = np.full(num_episodes, -1)
        self.length = np.zeros(num_episodes, np.int64)

    def start(
        self, rows: int | slice, device: Array | int, visits: Array | Sequence[int], sweeps: int = 1
    ) -> None:
        """Start episodes from devices [groups], in which groups have their turn in this order."""
        count = len(visits)
        self.device[rows] = self.NOWHERE
        self.device[rows, :count] = device
        self.visited[rows] = False
        self.visits[rows, :count] = visits
        self.num_groups[rows] = count
        self.step[rows] = 0
        self.length[rows] = sweeps * count

    @property
    def current(self) -> Array:  # [episodes]
        """The group whose turn it is; at the end, the group that had the last turn."""
        turn = np.minimum(self.step, self.length - 1) % self.num_groups
        return np.asarray(self.visits[np.arange(len(turn)), turn])

    @property
    def ended(self) -> Array:  # [episodes] bool
        return self.step >= self.length

    def put(self, rows: Array, device: Array) -> Array:
        """Put the current group of each row on a device [rows], and end its turn.

        Returns the devices where these groups were.
        """
        group = self.current[rows]
        before = self.device[rows, group]
        self.device[rows, group] = device
        self.visited[rows, group] = True
        self.step[rows] += 1
        return before
