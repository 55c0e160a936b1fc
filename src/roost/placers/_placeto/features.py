"""What Placeto's policy sees: numbers about groups and devices, in units that mean the same on
every problem."""

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
# Of a group under a placement, as a device sees it: the paper's, with "is it here" for its one-hot
# device.
MOVING = ("time", "output_bytes", "start", "is_current", "is_done", "is_here", "time_here")
# Of a device, for the current group.
DEVICE = (
    "is_current", "relative_time", "speed", "load", "load_after", "share", "inputs_here",
    "outputs_here",
    "near_here", "far_here", "ancestors_here", "descendants_here", "parallel_here", "overlap",
    "transfer",
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

    @staticmethod
    def joined(moments: Sequence[Moment]) -> Moment:
        """All of their placements."""
        fields = ("place", "start", "finish", "peak")
        return Moment(
            *(np.concatenate([getattr(moment, name) for moment in moments]) for name in fields)
        )


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
        # A group holds ops and their gradients, so tensors go both ways; the network follows those
        # that go forward.
        onward = place[source] < place[target]
        self.source, self.target = source[onward], target[onward]
        # [groups, groups] bytes that a row reads of a column.
        self.inputs = self._bytes(target, source, size)
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
    def _shares(self) -> Array:
        """[groups, 7, groups] what is looked up of others: how the bytes and the neighbours of a
        row are shared out."""
        joined = self.inputs + self.outputs
        step = joined / np.maximum(1e-9, joined.sum(axis=1, keepdims=True))
        near = np.linalg.matrix_power(
            0.5 * (step + np.eye(self.num_groups, dtype=np.float32)), _NEAR
        )
        far = np.linalg.matrix_power(near, _FAR // _NEAR)
        for spread in (near, far):  # a group does not see itself in others
            np.fill_diagonal(spread, 0.0)
        pooled = pools(self.reach) * self.time.min(axis=1)[None, None, :]
        found = [self.inputs, self.outputs, near, far, *pooled]
        rows = np.stack(found, axis=1).astype(np.float32)
        return np.asarray(rows / np.maximum(1e-12, rows.sum(axis=2, keepdims=True)))

    @cached_property
    def fixed(self) -> Array:  # [FIXED, groups] f4
        units, count = self.units, self.num_groups
        depth = self._depths(self.source, self.target)
        height = self._depths(self.target, self.source)
        size = [
            units.resident_bytes,
            self.inputs.sum(axis=1),
            np.bincount(self.target, minlength=count),
        ]
        columns = [
            self._stretched(units.time.min(axis=1) * count / 10), _scaled(self.outputs.sum(axis=1)),
            _scaled(size[0]),
            _scaled(size[1]), self.position / count, depth, height, np.log1p(size[2]),
            np.log1p(np.bincount(self.source, minlength=count)),
        ]  # fmt: skip
        return np.stack(columns).astype(np.float32)

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
        """[MOVING, batch, devices, groups] f4; `at` [batch] is the current group, `done` [batch,
        groups] who was it."""
        batch, groups, rows = len(at), self.num_groups, np.arange(len(at))
        found = np.zeros((len(MOVING), batch, self.num_devices, groups), dtype=np.float32)
        now = self.time[np.arange(groups), moment.place]  # [batch, groups]
        start = moment.start - moment.start[rows, at][:, None]
        size = self.outputs.sum(axis=1)
        found[0] = (now / np.maximum(1e-12, now.max(axis=1, keepdims=True)))[:, None]
        found[1] = size / max(1e-12, size.max())
        found[2] = (start / np.maximum(1e-12, np.abs(start).max(axis=1, keepdims=True)))[:, None]
        found[3, rows, :, at] = 1.0
        found[4] = done[:, None]
        found[5] = moment.place[:, None] == np.arange(self.num_devices)[:, None]
        found[6] = self._slowness.T
        return found

    def devices(self, moment: Moment, at: int, previous: Array) -> Array:
        """[DEVICE, batch, devices] f4 for one group, in placements where each was last at a device
        [batch]."""
        # [batch, devices, groups].
        here = (moment.place[:, None] == self._numbers[:, None]).astype(np.float32)
        group_time, balanced = self.time[at], max(self.balanced, 1e-12)
        found = np.empty((len(DEVICE), *here.shape[:2]), dtype=np.float32)
        current = found[0] = here[:, :, at]
        found[1], found[2] = self._slowness[at], self._speed
        # Of all other groups.
        found[3] = (here * self._loads).sum(axis=2) - current * (group_time / balanced)
        found[4] = found[3] + group_time / balanced
        found[5] = here.mean(axis=2)
        found[6:13] = (here @ self._shares[at].T).transpose(2, 0, 1)
        found[13] = self._overlap(moment, at, here)
        found[14] = self._transfer(found[6] * self._read[at], found[7] * self._written[at])
        found[15] = found[14] - found[14].min(axis=1, keepdims=True)
        found[16] = self._late(moment, at)
        found[14:17] = np.log1p(found[14:17] * (_STRETCH / balanced))
        found[17] = moment.peak / self.memory
        found[18] = found[17] + (1.0 - current) * (self.need[at] / self.memory)
        np.minimum(found[17:19], 3.0, out=found[17:19])
        found[19] = previous[:, None] == self._numbers
        return found

    @cached_property
    def _numbers(self) -> Array:  # [devices]
        return np.arange(self.num_devices)

    @cached_property
    def _loads(self) -> Array:  # [devices, groups] seconds there, beside a balanced step
        return np.asarray(self.time.T / max(self.balanced, 1e-12), dtype=np.float32)

    @cached_property
    def _read(self) -> Array:  # [groups] bytes
        return np.asarray(self.inputs.sum(axis=1))

    @cached_property
    def _written(self) -> Array:  # [groups] bytes
        return np.asarray(self.outputs.sum(axis=1))

    @cached_property
    def _slowness(self) -> Array:  # [groups, devices] beside the fastest device for the group
        fastest = np.maximum(1e-12, self.time.min(axis=1, keepdims=True))
        return np.asarray(np.log(np.maximum(self.time, 1e-12) / fastest).clip(-3, 3))

    @cached_property
    def _speed(self) -> Array:  # [devices] of all the work, beside the fastest device
        total = np.maximum(1e-12, self.units.time.sum(axis=0))
        return np.asarray(np.log(total / total.min()).clip(0, 5))

    @cached_property
    def _links(self) -> tuple[Array, Array]:
        """[devices, devices] seconds for each byte, and for each message.

        Links that are not there are infinitely slow: none is used by a placement that can be run.
        """
        cluster = self.units.problem.cluster
        both = (
            np.where(np.isfinite(x), x, 0.0) for x in (cluster.seconds_per_byte, cluster.latency)
        )
        pace, latency = (x * ~np.eye(self.num_devices, dtype=bool) for x in both)
        return pace, latency

    @cached_property
    def _before(self) -> list[Array]:
        """For each group those that it reads."""
        return [self.source[self.target == at] for at in range(self.num_groups)]

    def _stretched(self, seconds: Array) -> Array:
        return np.asarray(np.log1p(_STRETCH * seconds / max(self.balanced, 1e-12)))

    def _transfer(self, read: Array, written: Array) -> Array:
        """[batch, devices] seconds on the links for a group there, from bytes that others have
        where they are."""
        pace, latency = self._links
        return np.asarray(
            read @ pace + written @ pace.T + (read > 0) @ latency + (written > 0) @ latency.T
        )

    def _overlap(self, moment: Moment, at: int, here: Array) -> Array:
        """[batch, devices] work of others there while the group ran, in times of its own length."""
        begin, end = moment.start[:, at, None], moment.finish[:, at, None]
        common = np.minimum(moment.finish, end)
        common -= np.maximum(moment.start, begin)
        np.maximum(common, 0.0, out=common)
        common *= self._works
        common[:, at] = 0.0
        busy = (here @ common.astype(np.float32)[..., None])[..., 0]
        return np.asarray(np.minimum(busy / np.maximum(end - begin, 1e-12), 3.0))

    @cached_property
    def _works(self) -> Array:  # [groups] whether it takes any time
        return np.asarray((self.time > 0).any(axis=1))

    def _late(self, moment: Moment, at: int) -> Array:
        """[batch, devices] how many seconds later its inputs are there than at the best device."""
        before = self._before[at]
        if not len(before):
            return np.zeros((len(moment.place), self.num_devices))
        there, (pace, latency) = moment.place[:, before], self._links  # [batch, inputs]
        sent = self.inputs[at, before][:, None] * pace[there] + latency[there]
        ready = (moment.finish[:, before, None] + sent).max(axis=1)
        return np.asarray(ready - ready.min(axis=1, keepdims=True))


def _scaled(size: Array) -> Array:
    """Bytes beside the mean of those that are not 0, as a logarithm."""
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
