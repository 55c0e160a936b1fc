"""A problem as an environment sees it: its groups, what a placement of them costs, and features of
all between 0 and 1.

Features compare within the problem, so that those of unlike problems are alike: a group with as
much of something as an average group has feature 0.5 (see `beside`), a share is a share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers.toolkit import Units, fastest_allowed, groups_of, lasting_bytes
from roost.simulator.compiled import Outcomes, Simulator
from roost.simulator.order import upward_rank

# What stands in the last axis of a feature array.
GROUP_FEATURES = (
    "time",  # seconds, averaged over the devices where it may run
    "sent",  # bytes that other groups read
    "parameters",  # bytes of parameters
    "held",  # bytes held for long: parameters, and what the backward pass needs
    "ops",  # how many
    "forward",  # share of its ops
    "backward",
    "update",
    "position",  # share of the way from the first group to the last
    "rank",  # longest path to the end of the step, as a share of the longest
)
# Seconds over an average link, beside the time of an average group.
EDGE_FEATURES = ("bytes", "seconds")
DEVICE_FEATURES = (
    "speed",  # share of the speed there would be with each group on its fastest device
    "memory",  # share of the largest memory
    "need",  # what all groups hold for long, beside its memory
    "busy",  # seconds of the groups that are here, beside the reference
    "held",  # bytes that the groups here hold for long, beside its memory
)
# Beside the time of an average group; seconds of an average edge.
LINK_FEATURES = ("latency", "seconds")


@dataclass(frozen=True, eq=False)
class Case:
    """A problem, cut into groups."""

    problem: Problem
    units: Units
    order: str

    @staticmethod
    def of(problem: Problem, most_groups: int, order: str) -> Case:
        units = groups_of(problem, most_groups)
        assert units.allowed.any(axis=1).all(), "every group may run somewhere"
        return Case(problem, units, order)

    @property
    def num_groups(self) -> int:
        return self.units.num_units

    @property
    def num_devices(self) -> int:
        return self.problem.cluster.num_devices

    @property
    def num_edges(self) -> int:
        return len(self.units.edges[0])

    def simulate(self, group_device: Array) -> Outcomes:
        """What placements [batch, groups] cost."""
        return Simulator.of(self.problem).evaluate(group_device[:, self.units.unit], self.order)

    def placement(self, group_device: Array) -> Placement:
        return self.problem.placement(self.units.devices(group_device), self.order)

    @cached_property
    def _single(self) -> tuple[Array, float]:
        """The best single device that fits, or the one nearest to fitting: devices [groups], and
        seconds of a step."""
        tried = np.array(
            [
                fastest_allowed(self.units, np.full(self.num_groups, device))
                for device in range(self.num_devices)
            ]
        )
        found = self.simulate(tried)
        best = np.lexsort((found.step_time, found.missing_bytes))[0]
        return tried[best], float(found.step_time[best])

    @property
    def single(self) -> Array:  # [groups] devices
        return self._single[0]

    @property
    def reference(self) -> float:
        """Seconds that step times are compared with: of the best single device, or 1 where that
        takes no time."""
        return self._single[1] or 1.0

    @cached_property
    def fastest(self) -> Array:  # [groups] device on which it runs fastest
        return np.asarray(np.where(self.units.allowed, self.units.time, np.inf).argmin(axis=1))

    @cached_property
    def held_bytes(self) -> Array:  # [groups]
        return lasting_bytes(self.units).astype(np.float64)

    @cached_property
    def typical(self) -> float:
        """Seconds of an average group in the reference."""
        return self.reference / self.num_groups

    @cached_property
    def time(self) -> Array:  # [groups, devices]
        return beside(self.units.time, self.typical)

    @cached_property
    def group_features(self) -> Array:  # [groups, features]
        units, graph = self.units, self.problem.graph
        allowed, count = units.allowed, self.num_groups
        mean_time = np.where(allowed, units.time, 0.0).sum(axis=1) / np.maximum(
            allowed.sum(axis=1), 1
        )
        sent = np.bincount(units.edges[0], units.edges[2], minlength=count)
        num_ops = np.bincount(units.unit, minlength=count)
        computing = np.bincount(units.unit[~graph.is_parameter], minlength=count)
        phases = [
            np.bincount(units.unit[graph.phase == phase], minlength=count)
            for phase in (FORWARD, BACKWARD, UPDATE)
        ]
        rank = np.zeros(count)
        np.maximum.at(rank, units.unit, upward_rank(self.problem))
        columns = [
            beside(mean_time, self.typical),
            _beside_mean(sent),
            _beside_mean(units.resident_bytes),
            _beside_mean(self.held_bytes),
            _beside_mean(num_ops),
            *(phase / np.maximum(computing, 1) for phase in phases),
            np.arange(count) / max(1, count - 1),
            rank / (rank.max() or 1.0),
        ]
        return np.stack(columns, axis=1)

    @cached_property
    def edges(self) -> Array:  # [edges, 2] from one group to another
        return np.stack(self.units.edges[:2], axis=1)

    @cached_property
    def edge_features(self) -> Array:  # [edges, features]
        size, cluster = self.units.edges[2], self.problem.cluster
        apart = ~np.eye(self.num_devices, dtype=bool)
        seconds = np.zeros(len(size))
        if apart.any():
            seconds += cluster.latency[apart].mean() + size * cluster.seconds_per_byte[apart].mean()
        return np.stack([_beside_mean(size), beside(seconds, self.typical)], axis=1)

    @cached_property
    def device_features(self) -> Array:  # [devices, those features that no placement changes]
        units, memory = self.units, self.problem.cluster.memory.astype(np.float64)
        least = np.where(units.allowed, units.time, np.inf).min(axis=1, keepdims=True)
        here = np.where(units.allowed, units.time, 0.0).sum(axis=0)
        ideal = np.where(units.allowed, least, 0.0).sum(axis=0)
        speed = np.divide(ideal, here, out=np.ones(self.num_devices), where=here > 0)
        need = beside(np.full(self.num_devices, self.held_bytes.sum()), memory)
        return np.stack([np.minimum(speed, 1.0), memory / (memory.max() or 1.0), need], axis=1)

    @cached_property
    def links(self) -> Array:  # [devices, devices, features]
        size, cluster = self.units.edges[2], self.problem.cluster
        typical = size.mean() if len(size) else 0.0
        seconds = typical * cluster.seconds_per_byte
        return np.stack(
            [beside(cluster.latency, self.typical), beside(seconds, self.typical)], axis=2
        )


def beside(value: Array, typical: Array | float) -> Array:
    """A figure that is not negative as a number from 0 to 1, which is 0.5 where it equals the
    typical one."""
    total = value + typical
    return np.divide(value, total, out=np.zeros(np.shape(total)), where=total > 0)


def _beside_mean(value: Array) -> Array:
    return beside(value.astype(np.float64), value.mean() if len(value) else 0.0)
