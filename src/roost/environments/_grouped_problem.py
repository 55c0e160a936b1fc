"""A problem as the environment sees it: its groups, the cost of placements, and features from 0
to 1.

Features compare within the problem, so that features of unlike problems are alike: a group with as
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

# The names of features, in the last axis of each array.
GROUP_FEATURES = (
    "time",  # seconds, averaged over the devices where it may run
    "sent",  # bytes that other groups read
    "parameters",  # bytes of parameters
    "held",  # bytes held for long: parameters, and what the backward pass needs
    "ops",  # number of ops
    "forward",  # share of its ops
    "backward",
    "update",
    "position",  # share of the way from the first group to the last
    "rank",  # longest path to the end of the step, as a share of the longest
)
# Seconds over an average link, beside the time of an average group.
EDGE_FEATURES = ("bytes", "seconds")
DEVICE_FEATURES = (
    "speed",  # share of the speed that all groups would have on their fastest devices
    "memory",  # share of the largest memory
    "need",  # bytes that all groups hold for long, beside its memory
    "busy",  # seconds of the groups that are here, beside the reference
    "held",  # bytes that the groups here hold for long, beside its memory
)
# Beside the time of an average group; seconds of an average edge.
LINK_FEATURES = ("latency", "seconds")


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """A problem, cut into groups."""

    problem: Problem
    units: Units
    order: str

    @staticmethod
    def of(problem: Problem, most_groups: int, order: str) -> GroupedProblem:
        units = groups_of(problem, most_groups)
        assert units.allowed.any(axis=1).all(), "every group may run somewhere"
        return GroupedProblem(problem, units, order)

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
        """Simulate placements [batch, groups]."""
        device = group_device[:, self.units.unit]
        return Simulator.of(self.problem).evaluate(device, self.order)

    def placement(self, group_device: Array) -> Placement:
        return self.problem.placement(self.units.devices(group_device), self.order)

    @cached_property
    def _single(self) -> tuple[Array, float]:
        """Devices [groups] and step time of the best single device that fits, or of the one nearest
        to fitting."""
        wishes = np.tile(np.arange(self.num_devices)[:, None], self.num_groups)
        devices = np.array([fastest_allowed(self.units, wish) for wish in wishes])
        outcomes = self.simulate(devices)
        best = np.lexsort((outcomes.step_time, outcomes.missing_bytes))[0]
        return devices[best], float(outcomes.step_time[best])

    @property
    def single(self) -> Array:  # [groups] devices
        return self._single[0]

    @property
    def reference(self) -> float:
        """Seconds that step times are compared with: those of the best single device, or 1 if they
        are 0."""
        return self._single[1] or 1.0

    @property
    def allowed_time(self) -> Array:  # [groups, devices] seconds; infinite where it may not run
        return np.where(self.units.allowed, self.units.time, np.inf)

    @property
    def fastest(self) -> Array:  # [groups] device on which it runs fastest
        return np.asarray(self.allowed_time.argmin(axis=1))

    @cached_property
    def held_bytes(self) -> Array:  # [groups]
        return lasting_bytes(self.units).astype(np.float64)

    @property
    def typical_seconds(self) -> float:
        """Seconds of an average group in the reference."""
        return self.reference / self.num_groups

    def features(self) -> dict[str, Array]:
        """The parts of an observation that no placement changes."""
        return {
            "groups": self._group_features(),
            "time": beside(self.units.time, self.typical_seconds),
            "edges": np.stack(self.units.edges[:2], axis=1),
            "edge_features": self._edge_features(),
            "devices": self._device_features(),
            "links": self._link_features(),
            "group_mask": np.ones(self.num_groups),
            "edge_mask": np.ones(self.num_edges),
            "device_mask": np.ones(self.num_devices),
        }

    def _group_features(self) -> Array:  # [groups, features]
        units = self.units
        graph = self.problem.graph
        count = self.num_groups
        total_time = np.where(units.allowed, units.time, 0.0).sum(axis=1)
        mean_time = total_time / np.maximum(units.allowed.sum(axis=1), 1)
        sent = np.bincount(units.edges[0], units.edges[2], minlength=count)
        num_ops = np.bincount(units.unit, minlength=count)
        num_computing = np.bincount(units.unit[~graph.is_parameter], minlength=count)
        shares = []
        for phase in (FORWARD, BACKWARD, UPDATE):
            num_in_phase = np.bincount(units.unit[graph.phase == phase], minlength=count)
            shares.append(num_in_phase / np.maximum(num_computing, 1))
        rank = np.zeros(count)
        np.maximum.at(rank, units.unit, upward_rank(self.problem))
        columns = [
            beside(mean_time, self.typical_seconds),
            _beside_mean(sent),
            _beside_mean(units.resident_bytes),
            _beside_mean(self.held_bytes),
            _beside_mean(num_ops),
            *shares,
            np.arange(count) / max(1, count - 1),
            rank / (rank.max() or 1.0),
        ]
        return np.stack(columns, axis=1)

    def _edge_features(self) -> Array:  # [edges, features]
        size = self.units.edges[2]
        cluster = self.problem.cluster
        apart = ~np.eye(self.num_devices, dtype=bool)
        seconds = np.zeros(len(size))
        if apart.any():
            pace = cluster.seconds_per_byte[apart].mean()
            seconds += cluster.latency[apart].mean() + size * pace
        return np.stack([_beside_mean(size), beside(seconds, self.typical_seconds)], axis=1)

    def _device_features(self) -> Array:  # [devices, those features that no placement changes]
        units = self.units
        memory = self.problem.cluster.memory.astype(np.float64)
        fastest = self.allowed_time.min(axis=1, keepdims=True)
        here = np.where(units.allowed, units.time, 0.0).sum(axis=0)
        ideal = np.where(units.allowed, fastest, 0.0).sum(axis=0)
        speed = np.divide(ideal, here, out=np.ones(self.num_devices), where=here > 0)
        share_of_memory = memory / (memory.max() or 1.0)
        need = beside(self.held_bytes.sum(), memory)
        return np.stack([np.minimum(speed, 1.0), share_of_memory, need], axis=1)

    def _link_features(self) -> Array:  # [devices, devices, features]
        size = self.units.edges[2]
        cluster = self.problem.cluster
        mean_size = size.mean() if len(size) else 0.0
        both = np.stack([cluster.latency, mean_size * cluster.seconds_per_byte], axis=2)
        return beside(both, self.typical_seconds)


def beside(value: Array, typical: Array | float) -> Array:
    """A figure that is not negative as a number from 0 to 1. It is 0.5 for the typical figure."""
    total = value + typical
    share = np.zeros(np.shape(total))
    return np.divide(value, total, out=share, where=total > 0)


def _beside_mean(value: Array) -> Array:
    return beside(value.astype(np.float64), value.mean() if len(value) else 0.0)
