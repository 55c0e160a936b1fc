"""Features of groups and devices that Placeto's policy sees, in units that mean the same on every
problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD
from roost.placers._shared.units import Units
from roost.policies.gnn import GraphMaps, pools

# Of a group, whatever the placement.
FIXED = (
    "time",
    "output_bytes",
    "resident_bytes",
    "input_bytes",
    "position",
    "depth",
    "height",
    "inputs",
    "outputs",
)
# Of a group under a placement, from the view of a device. They are those of the paper, but its
# one-hot device is replaced by "is_here".
MOVING = ("time", "output_bytes", "start", "is_current", "is_done", "is_here", "time_here")
# Of a device, for the current group.
DEVICE = (
    "is_current",
    "relative_time",
    "speed",
    "load",
    "load_after",
    "share",
    "inputs_here",
    "outputs_here",
    "near_here",
    "far_here",
    "ancestors_here",
    "descendants_here",
    "parallel_here",
    "overlap",
    "transfer",
    "transfer_gap",
    "ready_gap",
    "memory",
    "memory_after",
    "previous_here",
)
_NEAR, _FAR = 2, 6  # steps along edges, either way
_STRETCH = 20.0  # times are log(1 + this many times their share of a balanced step)
_LEAST_SECONDS = 1e-12  # against division by zero
_MOST_RATIO = 3.0  # of memory, and of overlap


@dataclass(frozen=True, eq=False)
class SimulatedPlacements:
    """Placements of one problem, and the figures of their last simulations."""

    device: Array  # [batch, groups]
    start: Array  # [batch, groups] seconds
    finish: Array  # [batch, groups] seconds
    peak: Array  # [batch, devices] bytes

    @staticmethod
    def joined(parts: Sequence[SimulatedPlacements]) -> SimulatedPlacements:
        """All placements of these batches, as one batch."""
        rows = [vars(part).values() for part in parts]
        return SimulatedPlacements(*map(np.concatenate, zip(*rows, strict=True)))


class ProblemFeatures:
    """A problem in the eyes of the policy. Arrays that no placement changes are computed once."""

    def __init__(self, units: Units) -> None:
        self.units = units
        cluster = units.problem.cluster
        self.num_groups = units.num_units
        self.num_devices = cluster.num_devices
        source, target, size = units.edges
        self.visits = _visits(units)
        self.position = np.argsort(self.visits)  # [groups] in the order of visits
        # A group holds ops and their gradients, so tensors go both ways. The network follows the
        # edges that go forward.
        onward = self.position[source] < self.position[target]
        self.source = source[onward]
        self.target = target[onward]
        # [groups, groups] bytes that the row reads of the column, and that the column reads.
        square = self.num_groups, self.num_groups
        self.inputs = np.zeros(square, dtype=np.float32)
        self.inputs[target, source] = size
        self.outputs = self.inputs.T
        self._read = self.inputs.sum(axis=1)
        self._written = self.outputs.sum(axis=1)

        # Seconds of each group on each device, and of a step, were the work spread over all
        # devices in proportion to their speed.
        most = np.nanmax(units.time, initial=0.0)
        self.time = np.where(units.allowed, units.time, most)
        work = np.maximum(units.time.sum(axis=0), _LEAST_SECONDS)
        speed = (1.0 / work).sum()
        self.balanced = max(float(1.0 / speed), _LEAST_SECONDS)
        self._loads = (self.time.T / self.balanced).astype(np.float32)  # [devices, groups]
        self._takes_time = (self.time > 0).any(axis=1)
        # Logarithms of times relative to the fastest device: [groups, devices], and of all work.
        fastest = np.maximum(_LEAST_SECONDS, self.time.min(axis=1, keepdims=True))
        slowness = np.maximum(self.time, _LEAST_SECONDS) / fastest
        self._slowness = np.log(slowness).clip(-3, 3)
        self._speed = np.log(work / work.min()).clip(0, 5)

        self._numbers = np.arange(self.num_devices)[:, None]
        self.memory = np.maximum(1.0, cluster.memory.astype(np.float64))
        # [groups] bytes that a group holds for most of a step, about.
        output_bytes = units.problem.graph.output_bytes
        self.need = np.bincount(units.unit, output_bytes, minlength=self.num_groups)
        # [devices, devices] seconds for each byte and for each message. A missing link is
        # infinitely slow; it counts as 0, since no feasible placement uses it.
        apart = ~np.eye(self.num_devices, dtype=bool)
        pace = cluster.seconds_per_byte
        latency = cluster.latency
        self._pace = np.where(np.isfinite(pace), pace, 0.0) * apart
        self._latency = np.where(np.isfinite(latency), latency, 0.0) * apart

    @cached_property
    def reach(self) -> Array:  # [groups, groups] bool: the column comes after the row
        reach = np.zeros(self.inputs.shape, dtype=bool)
        last_first = np.argsort(-self.position[self.source])
        for source, target in zip(self.source[last_first], self.target[last_first], strict=True):
            reach[source] |= reach[target]
            reach[source, target] = True
        return reach

    @property
    def maps(self) -> GraphMaps:
        return GraphMaps.of(self.reach, self.source, self.target)

    @cached_property
    def _shares(self) -> Array:
        """[groups, 7, groups] by which weights a row looks at other groups: its inputs, outputs,
        neighbours, far neighbours, ancestors, descendants, and parallel groups."""
        joined = self.inputs + self.outputs
        step = joined / np.maximum(1e-9, joined.sum(axis=1, keepdims=True))
        stay_or_step = 0.5 * (step + np.eye(self.num_groups, dtype=np.float32))
        near = np.linalg.matrix_power(stay_or_step, _NEAR)
        far = np.linalg.matrix_power(near, _FAR // _NEAR)
        for spread in (near, far):  # a group does not see itself in others
            np.fill_diagonal(spread, 0.0)
        pooled = pools(self.reach) * self.time.min(axis=1)
        rows = np.stack([self.inputs, self.outputs, near, far, *pooled], axis=1)
        rows = rows.astype(np.float32)
        total = rows.sum(axis=2, keepdims=True)
        return np.asarray(rows / np.maximum(1e-12, total))

    @cached_property
    def fixed(self) -> Array:  # [FIXED, groups] f4
        count = self.num_groups
        mean_times = self.units.time.min(axis=1) * count / 10
        columns = (
            np.log1p(_STRETCH * mean_times / self.balanced),
            _beside_mean(self._written),
            _beside_mean(self.units.resident_bytes),
            _beside_mean(self._read),
            self.position / count,
            self._depths(self.source, self.target, self.position),
            self._depths(self.target, self.source, -self.position),
            np.log1p(np.bincount(self.target, minlength=count)),
            np.log1p(np.bincount(self.source, minlength=count)),
        )
        return _filled(columns, count)

    def _depths(self, before: Array, after: Array, position: Array) -> Array:
        """[groups] edges on the longest path to a group, as a share of the longest of all."""
        depth = np.zeros(self.num_groups)
        edges = np.argsort(position[before], kind="stable")
        for first, second in zip(before[edges], after[edges], strict=True):
            depth[second] = max(depth[second], depth[first] + 1)
        return np.asarray(depth / max(1.0, depth.max()))

    def moving(self, placements: SimulatedPlacements, at: Array, done: Array) -> Array:
        """[MOVING, batch, devices, groups] f4 for the current groups `at` [batch].

        `done` [batch, groups] are the groups that had their turn.
        """
        device = placements.device
        groups = np.arange(self.num_groups)
        time = self.time[groups, device]  # [batch, groups]
        start = placements.start - np.take_along_axis(placements.start, at[:, None], axis=1)
        longest = time.max(axis=1, keepdims=True)
        latest = np.abs(start).max(axis=1, keepdims=True)
        columns = (
            (time / np.maximum(_LEAST_SECONDS, longest))[:, None],
            self._written / max(1e-12, self._written.max()),
            (start / np.maximum(_LEAST_SECONDS, latest))[:, None],
            (at[:, None] == groups)[:, None],
            done[:, None],
            device[:, None] == self._numbers,
            self._slowness.T,
        )
        return _filled(columns, len(at), self.num_devices, self.num_groups)

    def devices(self, placements: SimulatedPlacements, at: int, previous: Array) -> Array:
        """[DEVICE, batch, devices] f4 for one group; `previous` [batch] is the device that the
        group before it went to."""
        # [batch, devices, groups].
        here = (placements.device[:, None] == self._numbers).astype(np.float32)
        time_share = self.time[at] / self.balanced
        is_current = here[:, :, at]
        # Of all other groups.
        load = (here * self._loads).sum(axis=2) - is_current * time_share
        load = load.astype(np.float32)
        weighed = (here @ self._shares[at].T).transpose(2, 0, 1)
        inputs_here, outputs_here = weighed[:2]
        read = inputs_here * self._read[at]
        written = outputs_here * self._written[at]
        transfer = self._transfer(read, written).astype(np.float32)
        memory = (placements.peak / self.memory).astype(np.float32)
        memory_after = memory + (1.0 - is_current) * (self.need[at] / self.memory)
        columns = (
            is_current,
            self._slowness[at],
            self._speed,
            load,
            load + time_share,
            here.mean(axis=2),
            *weighed,
            self._overlap(placements, at, here),
            self._stretched(transfer),
            self._stretched(transfer - transfer.min(axis=1, keepdims=True)),
            self._stretched(self._late(placements, at)),
            np.minimum(memory, _MOST_RATIO),
            np.minimum(memory_after, _MOST_RATIO),
            previous[:, None] == self._numbers[:, 0],
        )
        return _filled(columns, *here.shape[:2])

    def _stretched(self, seconds: Array) -> Array:
        factor = _STRETCH / self.balanced
        return np.asarray(np.log1p(seconds.astype(np.float32) * factor))

    def _transfer(self, read: Array, written: Array) -> Array:
        """[batch, devices] seconds on the links for a group there, from the bytes that it reads
        and writes on each device."""
        seconds = read @ self._pace + written @ self._pace.T
        seconds = seconds + (read > 0) @ self._latency + (written > 0) @ self._latency.T
        return np.asarray(seconds)

    def _overlap(self, placements: SimulatedPlacements, at: int, here: Array) -> Array:
        """[batch, devices] work of others there while the group ran, in times of its own length."""
        begin = placements.start[:, at, None]
        end = placements.finish[:, at, None]
        common = np.minimum(placements.finish, end)
        common -= np.maximum(placements.start, begin)
        np.maximum(common, 0.0, out=common)
        common *= self._takes_time
        common[:, at] = 0.0
        busy = (here @ common.astype(np.float32)[..., None])[..., 0]
        length = np.maximum(end - begin, _LEAST_SECONDS)
        return np.asarray(np.minimum(busy / length, _MOST_RATIO))

    def _late(self, placements: SimulatedPlacements, at: int) -> Array:
        """[batch, devices] seconds by which its inputs arrive later than at the best device."""
        before = self.source[self.target == at]
        if not len(before):
            return np.zeros((len(placements.device), self.num_devices))
        there = placements.device[:, before]  # [batch, inputs]
        size = self.inputs[at, before][:, None]
        sent = size * self._pace[there] + self._latency[there]
        ready = (placements.finish[:, before, None] + sent).max(axis=1)
        return np.asarray(ready - ready.min(axis=1, keepdims=True))


def _filled(columns: Sequence[Array], *shape: int) -> Array:
    """[columns, *shape] f4; each column is broadcast."""
    table = np.empty((len(columns), *shape), dtype=np.float32)
    for row, column in zip(table, columns, strict=True):
        row[:] = column
    return table


def _beside_mean(size: Array) -> Array:
    """Bytes divided by the mean of those that are not 0, as a logarithm."""
    some = size[size > 0]
    return np.log1p(size / (some.mean() if len(some) else 1.0))


def _visits(units: Units) -> Array:
    """[groups] in topological order: by the first op of each; one without a forward op just before
    its first reader."""
    first = units.leader.astype(np.float64)
    # Parameters with their updates, which come at the end of the step.
    late = np.ones(units.num_units, dtype=bool)
    late[units.unit[units.problem.graph.phase == FORWARD]] = False
    source, target, _ = units.edges
    reads = late[source] & ~late[target]
    reader = np.full(units.num_units, np.inf)
    np.minimum.at(reader, source[reads], first[target[reads]])
    first[late] = np.where(np.isfinite(reader[late]), reader[late] - 0.5, first[late])
    return np.argsort(first, kind="stable")
