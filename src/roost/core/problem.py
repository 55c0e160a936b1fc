"""The problem: a graph to place, a cluster to place it on, and the costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from roost.core.arrays import Array, digest
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.saved import Saved
from roost.errors import InputError


@dataclass(frozen=True, eq=False)
class Problem(Saved):
    """A graph, a cluster and costs. `costs` may be a bare array, op_time [ops, devices]."""

    graph: Graph
    cluster: Cluster
    costs: Costs

    def __post_init__(self) -> None:
        if not isinstance(self.costs, Costs):
            object.__setattr__(self, "costs", Costs(self.costs))
        expected = (self.graph.num_ops, self.cluster.num_devices)
        if self.op_time.shape != expected:
            raise InputError(
                f"op_time is {list(self.op_time.shape)}; the graph has {expected[0]} ops "
                f"and the cluster {expected[1]} devices, so it must be {list(expected)}"
            )
        busy = np.flatnonzero(self.graph.is_parameter & (self.op_time > 0).any(axis=1))
        if len(busy):
            name = self.graph.op_names[busy[0]]
            raise InputError(
                f"op_time of parameter {name!r} must be 0: a parameter computes nothing"
            )
        homeless = np.flatnonzero(~self.allowed.any(axis=1))
        if len(homeless):
            op = int(homeless[0])
            kinds = sorted({device.kind for device in self.cluster.devices})
            raise InputError(
                f"op {self.graph.op_names[op]!r} may only run on "
                f"{', '.join(self.graph.allowed[op])}; "
                f"cluster {self.cluster.name!r} has {', '.join(kinds)}"
            )

    @property
    def op_time(self) -> Array:  # [ops, devices] seconds
        return self.costs.op_time

    @cached_property
    def allowed(self) -> Array:  # [ops, devices] true if the op may run there
        kinds = [device.kind for device in self.cluster.devices]
        rows = {
            choice: [not choice or kind in choice for kind in kinds]
            for choice in set(self.graph.allowed)
        }
        return np.array([rows[choice] for choice in self.graph.allowed], dtype=bool)

    @cached_property
    def digest(self) -> str:
        return digest([self.graph.digest, repr(self.cluster._key), self.op_time])

    def placement(
        self,
        device: Array,  # [ops] index in the devices of the cluster
        order: str = "program",
        priority: Array | None = None,  # [ops] for order "priority"
        prefetch_bytes: Array | int = 0,
    ) -> Placement:
        """A placement that says which graph and which devices it is for."""
        return Placement(
            device, order, priority, prefetch_bytes, self.cluster.device_names, self.graph.digest
        )

    def check(self, placement: Placement) -> Placement:
        """The placement with devices in the order of this cluster, if it is valid here."""
        graph = self.graph
        cluster = self.cluster
        if not isinstance(placement, Placement):
            given = type(placement).__name__
            raise InputError(f"a roost.Placement is needed, not {given}; make one of the devices")
        if placement.graph and placement.graph != graph.digest:
            raise InputError(
                f"the placement was made for graph {placement.graph}; graph {graph.name!r} is "
                f"{graph.digest}"
            )
        if placement.num_ops != graph.num_ops:
            raise InputError(
                f"the placement has {placement.num_ops} entries; graph {graph.name!r} has "
                f"{graph.num_ops} ops"
            )
        num_devices = len(placement.devices) or cluster.num_devices
        wrong = np.flatnonzero((placement.device < 0) | (placement.device >= num_devices))
        if len(wrong):
            op = int(wrong[0])
            raise InputError(
                f"op {graph.op_names[op]!r} is on device {placement.device[op]}; devices are 0 to "
                f"{num_devices - 1}"
            )
        if (
            np.ndim(placement.prefetch_bytes)
            and len(np.asarray(placement.prefetch_bytes)) != num_devices
        ):
            raise InputError(
                f"prefetch_bytes must have one entry for each of {num_devices} devices"
            )
        if placement.devices and placement.devices != cluster.device_names:
            placement = self._renamed(placement)
        self._check_rules(placement.device)
        return placement

    def _renamed(self, placement: Placement) -> Placement:
        index = np.array(
            [self.cluster.index_of(name) for name in placement.devices], dtype=np.int32
        )
        window: Any = placement.prefetch_bytes
        if np.ndim(window):
            window = np.zeros(self.cluster.num_devices, dtype=np.int64)
            window[index] = placement.prefetch_bytes
        names = self.cluster.device_names
        return replace(
            placement, device=index[placement.device], prefetch_bytes=window, devices=names
        )

    def _check_rules(self, device: Array) -> None:
        graph = self.graph
        cluster = self.cluster
        forbidden = np.flatnonzero(~self.allowed[np.arange(graph.num_ops), device])
        if len(forbidden):
            op = int(forbidden[0])
            on = cluster.devices[device[op]]
            raise InputError(
                f"op {graph.op_names[op]!r} may only run on {', '.join(graph.allowed[op])}; "
                f"the placement puts it on {on.name!r}, a {on.kind}"
            )
        members = np.flatnonzero(graph.group >= 0)
        leader = self.group_leader[graph.group[members]]
        split = np.flatnonzero(device[members] != device[leader])
        if len(split):
            op = int(members[split[0]])
            first = int(leader[split[0]])
            raise InputError(
                f"ops {graph.op_names[first]!r} and {graph.op_names[op]!r} share the group "
                f"{graph.group_names[graph.group[op]]!r}; the placement puts them on "
                f"{cluster.device_names[device[first]]!r} and {cluster.device_names[device[op]]!r}"
            )

    @cached_property
    def group_leader(self) -> Array:  # [groups] first op of each
        leader = np.zeros(self.graph.num_groups, dtype=np.int64)
        members = np.flatnonzero(self.graph.group >= 0)[::-1]
        leader[self.graph.group[members]] = members
        return leader

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without cached values such as a simulator."""
        return {"graph": self.graph, "cluster": self.cluster, "costs": self.costs}

    def __repr__(self) -> str:
        return f"Problem({self.graph!r} on {self.cluster.name!r})"
