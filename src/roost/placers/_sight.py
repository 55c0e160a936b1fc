"""What Placeto's policy sees: numbers about groups and devices, in units that mean the same on every problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import FORWARD
from roost.placers._units import Units
from roost.policies.gnn import GraphMaps, pools

# Of a group, whatever the placement.
FIXED = ("time", "output_bytes", "resident_bytes", "input_bytes", "position", "depth", "height", "inputs", "outputs")
# Of a group under a placement, as a device sees it: the paper's, with "is it here" for its one-hot device.
MOVING = ("time", "output_bytes", "start", "is_current", "is_done", "is_here", "time_here")
# Of a device, for the current group.
DEVICE = (
    "is_current", "relative_time", "speed", "load", "load_after", "share", "inputs_here", "outputs_here",
    "near_here", "far_here", "ancestors_here", "descendants_here", "parallel_here", "overlap", "transfer",
    "transfer_gap", "ready_gap", "memory", "memory_after", "previous_here",
)  # fmt: skip
_NEAR, _FAR = 2, 6  # steps along edges, either way
_STRETCH = 20.0  # times are log(1 + this many times their share of a balanced step)


@dataclass(frozen=True, eq=False)
class Moment:
    """Placements of one problem, and what their last simulations said."""

    place: Array  # [batch, groups] device
    start: Array  # [batch, groups] seconds
    finish: Array  # [batch, groups] seconds
    peak: Array  # [batch, devices] bytes

    def __getitem__(self, rows: Array) -> Moment:
        return Moment(self.place[rows], self.start[rows], self.finish[rows], self.peak[rows])


class Sight:
    """A problem as the policy sees it."""

    def __init__(self, units: Units) -> None:
        self.units, cluster = units, units.problem.cluster
        self.num_groups, self.num_devices = units.num_units, cluster.num_devices
        source, target, size = units.edges
        self.order = _visits(units)
        place = np.empty(self.num_groups, dtype=np.int64)
        place[self.order] = np.arange(self.num_groups)
        self.position = place
        # A group holds ops and their gradients, so tensors go both ways; the network follows those that go forward.
        onward = place[source] < place[target]
        self.source, self.target = source[onward], target[onward]
        self.inputs = self._bytes(target, source, size)  # [groups, groups] bytes that a row reads of a column
        self.outputs = self.inputs.T
        self.time = np.where(units.allowed, units.time, np.nanmax(units.time, initial=0.0))
        # Seconds, were the work spread over all devices as they are fast.
        self.balanced = float(1.0 / (1.0 / np.maximum(units.time.sum(axis=0), 1e-12)).sum())
        self.memory = np.maximum(1.0, cluster.memory.astype(np.float64))
        self.need = self._need()

    def _bytes(self, row: Array, column: Array, size: Array) -> Array:
        found = np.zeros((self.num_groups, self.num_groups), dtype=np.float32)
        np.add.at(found, (row, column), size)
        return found

    def _need(self) -> Array:  # [groups] bytes that a group holds for most of a step, about
        graph = self.units.problem.graph
        found = np.zeros(self.num_groups)
        np.add.at(found, self.units.unit, graph.output_bytes)
        return found

    @cached_property
    def reach(self) -> Array:  # [groups, groups] whether the column comes after the row
        found = np.zeros((self.num_groups, self.num_groups), dtype=bool)
        by_row = np.argsort(self.position[self.source], kind="stable")[::-1]
        for u, v in zip(self.source[by_row].tolist(), self.target[by_row].tolist(), strict=True):
            found[u] |= found[v]
            found[u, v] = True
        return found

    @cached_property
    def maps(self) -> GraphMaps:
        return GraphMaps.of(self.reach, self.source, self.target)

    @cached_property
    def _weights(self) -> Array:
        """[groups, 7, groups] what is looked up of others: how the bytes and the neighbours of a row are shared out."""
        joined = self.inputs + self.outputs
        step = joined / np.maximum(1e-9, joined.sum(axis=1, keepdims=True))
        near = np.linalg.matrix_power(0.5 * (step + np.eye(self.num_groups, dtype=np.float32)), _NEAR)
        far = np.linalg.matrix_power(near, _FAR // _NEAR)
        for spread in (near, far):  # a group does not see itself in others
            np.fill_diagonal(spread, 0.0)
        pooled = pools(self.reach) * self.time.min(axis=1)[None, None, :]
        found = [self.inputs, self.outputs, near, far, *pooled]
        rows = np.stack(found, axis=1).astype(np.float32)
        return np.asarray(rows / np.maximum(1e-12, rows.sum(axis=2, keepdims=True)))

    @cached_property
    def fixed(self) -> Array:  # [groups, FIXED] f4
        units, count = self.units, self.num_groups
        depth = self._depths(self.source, self.target)
        height = self._depths(self.target, self.source)
        size = [units.resident_bytes, self.inputs.sum(axis=1), np.bincount(self.target, minlength=count)]
        columns = [
            self._stretched(units.time.min(axis=1) * count / 10), _scaled(self.outputs.sum(axis=1)), _scaled(size[0]),
            _scaled(size[1]), self.position / count, depth, height, np.log1p(size[2]),
            np.log1p(np.bincount(self.source, minlength=count)),
        ]  # fmt: skip
        return np.stack(columns, axis=1).astype(np.float32)

    def _depths(self, before: Array, after: Array) -> Array:
        """[groups] edges on the longest way from a beginning, as a share of the longest."""
        found = np.zeros(self.num_groups)
        order = np.argsort(self.position[before], kind="stable")
        for u, v in zip(
            before[order if before is self.source else order[::-1]].tolist(),
            after[order if before is self.source else order[::-1]].tolist(),
            strict=True,
        ):
            found[v] = max(found[v], found[u] + 1)
        return np.asarray(found / max(1.0, found.max()))

    def moving(self, moment: Moment, at: Array, done: Array) -> Array:
        """[groups, batch, devices, MOVING] f4; `at` [batch] is the current group, `done` [batch, groups] who was it."""
        batch, groups, rows = len(at), self.num_groups, np.arange(len(at))
        found = np.zeros((groups, batch, self.num_devices, len(MOVING)), dtype=np.float32)
        here = self._here(moment.place)
        now = (here * self.time).sum(axis=2)  # [batch, groups]
        start = moment.start - moment.start[rows, at][:, None]
        largest = np.maximum(1e-12, np.abs(start).max(axis=1, keepdims=True))
        size = self.outputs.sum(axis=1)
        found[..., 0] = (now / np.maximum(1e-12, now.max(axis=1, keepdims=True))).T[..., None]
        found[..., 1] = (size / max(1e-12, size.max()))[:, None, None]
        found[..., 2] = (start / largest).T[..., None]
        found[at, rows, :, 3] = 1.0
        found[..., 4] = done.T[..., None]
        found[..., 5] = here.transpose(1, 0, 2)
        fastest = np.maximum(1e-12, self.time.min(axis=1, keepdims=True))
        found[..., 6] = np.log(np.maximum(self.time, 1e-12) / fastest).clip(-3, 3)[:, None, :]
        return found

    def devices(self, moment: Moment, at: int, previous: Array) -> Array:
        """[batch, devices, DEVICE] f4 for one group, in placements where each was last at a device [batch]."""
        place, group_time = moment.place, self.time[at]
        here = self._here(place)
        current = here[:, at]
        busy = here * self.time
        load = busy.sum(axis=1) - current * group_time  # [batch, devices] of all other groups
        parts = self._weights[at] @ here  # [batch, 7, devices]
        held = [side[at] @ here for side in (self.inputs, self.outputs)]  # [batch, devices] bytes
        transfer = self._transfer(*held)
        peak = moment.peak / self.memory
        after = peak + (1.0 - current) * (self.need[at] / self.memory)
        fastest = max(1e-12, float(group_time.min()))
        balanced = max(self.balanced, 1e-12)
        columns = [
            current, np.broadcast_to(np.log(np.maximum(group_time, 1e-12) / fastest).clip(-3, 3), current.shape),
            np.broadcast_to(self._speed, current.shape), load / balanced, (load + group_time) / balanced,
            here.mean(axis=1), *parts.transpose(1, 0, 2), self._overlap(moment, at, busy),
            self._stretched(transfer), self._stretched(transfer - transfer.min(axis=1, keepdims=True)),
            self._ready(moment, at), peak.clip(0, 3), after.clip(0, 3), _one_hot(previous, self.num_devices),
        ]  # fmt: skip
        return np.stack([np.asarray(c, dtype=np.float32) for c in columns], axis=2)

    @cached_property
    def _speed(self) -> Array:  # [devices] of all the work, beside the fastest device
        total = np.maximum(1e-12, self.units.time.sum(axis=0))
        return np.asarray(np.log(total / total.min()).clip(0, 5))

    def _here(self, place: Array) -> Array:  # [batch, groups, devices]
        return _one_hot(place, self.num_devices)

    def _stretched(self, seconds: Array) -> Array:
        return np.asarray(np.log1p(_STRETCH * seconds / max(self.balanced, 1e-12)))

    def _transfer(self, read: Array, written: Array) -> Array:
        """[batch, devices] seconds on the links for a group there, from bytes that others have where they are."""
        cluster = self.units.problem.cluster
        pace, latency = cluster.seconds_per_byte, cluster.latency
        # Links that are not there are infinitely slow: none is used by a placement that can be run.
        pace, latency = (np.where(np.isfinite(x), x, 0.0) for x in (pace, latency))
        return np.asarray(read @ pace + written @ pace.T + (read > 0) @ latency + (written > 0) @ latency.T)

    def _overlap(self, moment: Moment, at: int, busy: Array) -> Array:
        """[batch, devices] work of others there while the group ran, in times of its own length."""
        begin, end = moment.start[:, at, None], moment.finish[:, at, None]
        common = np.minimum(moment.finish, end) - np.maximum(moment.start, begin)
        common = np.maximum(0.0, common)
        common[:, at] = 0.0
        length = np.maximum(end - begin, 1e-12)
        return np.asarray(np.einsum("bg,bgd->bd", common / length, (busy > 0).astype(float)).clip(0, 3))

    def _ready(self, moment: Moment, at: int) -> Array:
        """[batch, devices] how much later its inputs are there than at the best device."""
        cluster = self.units.problem.cluster
        before = self.source[self.target == at]
        if not len(before):
            return np.zeros((len(moment.place), self.num_devices))
        there = moment.place[:, before]  # [batch, inputs]
        sent = self.inputs[at, before][None, :, None] * cluster.seconds_per_byte[there] + cluster.latency[there]
        away = there[..., None] != np.arange(self.num_devices)
        arrival = moment.finish[:, before, None] + np.where(away & np.isfinite(sent), sent, 0.0)
        ready = arrival.max(axis=1)
        return self._stretched(ready - ready.min(axis=1, keepdims=True))


def _one_hot(device: Array, count: int) -> Array:
    return np.asarray(device[..., None] == np.arange(count), dtype=np.float32)


def _scaled(size: Array) -> Array:
    """Bytes beside the mean of those that are not 0, as a logarithm."""
    some = size[size > 0]
    return np.log1p(size / (some.mean() if len(some) else 1.0))


def _visits(units: Units) -> Array:
    """[groups] in topological order: by the first op of each; one without a forward op just before its first reader."""
    first = units.leader.astype(np.float64)
    late = np.ones(units.num_units, dtype=bool)  # parameters with their updates, which come at the end of the step
    late[units.unit[units.problem.graph.phase == FORWARD]] = False
    source, target, _ = units.edges
    reads = late[source] & ~late[target]
    reader = np.full(units.num_units, np.inf)
    np.minimum.at(reader, source[reads], first[target[reads]])
    first[late] = np.where(np.isfinite(reader[late]), reader[late] - 0.5, first[late])
    return np.argsort(first, kind="stable")
