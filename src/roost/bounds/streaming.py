"""Streaming: the fast devices fetch the parameters they cannot hold, or roomy devices do the work.

The memory of the fast devices, the time of all devices and of all buses are weighed against each
other: for any weights, no step is shorter than the weighted sum of what must be done (Lagrange).
Each parameter with its readers is then on its own, and so is each other op. Every sum below is a
relaxation of the simulator's rules: each device has its time, each bus its time, and at the fullest
moment of the step the fast devices together hold no more than they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.bounds.memory import Moment, fullest_moment
from roost.bounds.work import cutting_planes
from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.graph import UPDATE

_NONE = -1


def streaming(relaxed: Relaxed) -> float:
    """The bound with the best weights; 0 where the fast devices may hold everything."""
    cluster = relaxed.problem.cluster
    roomy = np.array([device.kind in ("cpu", MEMORY) for device in cluster.devices])
    if roomy.all() or not roomy.any():
        return 0.0
    moment = fullest_moment(relaxed.problem)
    graph = relaxed.problem.graph
    size = graph.output_bytes.astype(float)
    held = size[graph.is_parameter].sum() + size[moment.alive].sum()
    if held <= cluster.memory[~roomy].sum():
        return 0.0
    stars = _stars(relaxed, moment)
    return _Weighed(relaxed, moment, roomy, stars).best()


@dataclass(frozen=True, eq=False)
class Stars:
    """Parameters, each with a reader before the moment and one after, its update and its gradient's
    op.

    No op is in two stars; where there is none, -1.
    """

    parameter: Array  # [stars]
    before: Array  # [stars]
    after: Array  # [stars]
    update: Array  # [stars]
    gradient: Array  # [stars]


def _stars(relaxed: Relaxed, moment: Moment) -> Stars:
    graph = relaxed.problem.graph
    fastest = relaxed.time.min(axis=1)
    consumers = graph.consumer_lists()
    parameters = np.flatnonzero(graph.is_parameter)
    taken = np.zeros(graph.num_ops, dtype=bool)
    rows = []

    def take(ops: list[int]) -> int:
        free = [op for op in ops if not taken[op]]
        if not free:
            return _NONE
        op = max(free, key=fastest.__getitem__)
        taken[op] = True
        return op

    for parameter in parameters[
        np.argsort(-graph.output_bytes[parameters], kind="stable")
    ].tolist():
        readers = consumers[parameter]
        plain = [op for op in readers if graph.phase[op] != UPDATE]
        before = take([op for op in plain if moment.early[op]])
        after = take([op for op in plain if moment.late[op] and op != moment.op])
        if before == after == _NONE:
            before = take(plain)
        update = take([op for op in readers if graph.phase[op] == UPDATE])
        gradient = _NONE
        if update != _NONE:
            gradient = take(
                [op for op in graph.inputs_of(update).tolist() if not graph.is_parameter[op]]
            )
        rows.append((parameter, before, after, update, gradient))
    return Stars(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


class _Weighed:
    """The weighted sum for given weights, and its parts."""

    def __init__(self, relaxed: Relaxed, moment: Moment, roomy: Array, stars: Stars) -> None:
        self.relaxed = relaxed
        self.roomy = roomy
        self.stars = stars
        self.cluster = relaxed.problem.cluster
        self.graph = relaxed.problem.graph
        self.size = self.graph.output_bytes.astype(float)
        self.capacity = float(self.cluster.memory[~roomy].sum())
        self.alive = float(self.size[moment.alive].sum())
        self.gain = self._gains(moment)
        # Seconds a byte of memory may weigh.
        self.most = 10.0 * float(self.cluster.seconds_per_byte.max())

    def _gains(self, moment: Moment) -> Array:  # [ops] bytes
        """Bytes that the fast devices are relieved of, at most, by each op on a roomy device.

        A tensor is alive where its op is, or where its last use is: for that the use is taken that
        is slowest on the roomy devices. It leaves the fast devices only with one of the two.
        """
        gain = np.zeros(self.graph.num_ops)
        gain[moment.alive] = self.size[moment.alive]
        slow = self.relaxed.time[:, self.roomy].min(axis=1)
        is_alive = np.zeros(self.graph.num_ops, dtype=bool)
        is_alive[moment.alive] = True
        edges = np.flatnonzero(is_alive[self.graph.input_op] & moment.late[self.graph.edge_target])
        edges = edges[np.argsort(slow[self.graph.edge_target[edges]], kind="stable")]
        last = np.full(self.graph.num_ops, _NONE)
        # The slowest is written last.
        last[self.graph.input_op[edges]] = self.graph.edge_target[edges]
        np.add.at(gain, last[moment.alive], self.size[moment.alive])
        return gain

    @cached_property
    def kinds(self) -> tuple[Array, Array]:
        """Types of devices, and of buses: those that weigh the same."""
        busy = np.vstack([self.relaxed.time, self.roomy[None]])
        _, device = np.unique(busy, axis=1, return_inverse=True)
        device = device.ravel()
        joined: dict[int, set[tuple[int, int]]] = {}
        for one in range(len(device)):
            for other in range(len(device)):
                if one != other:
                    joined.setdefault(int(self.cluster.bus[one, other]), set()).add(
                        (device[one], device[other])
                    )
        keys = [tuple(sorted(joined[bus])) for bus in range(len(joined))]
        number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        return device, np.array([number[key] for key in keys], dtype=np.int64)

    def best(self) -> float:
        device, bus = self.kinds
        counts = np.concatenate([np.bincount(device), np.bincount(bus)]).astype(float)
        num_devices = int(device.max()) + 1
        top = 0.0

        def value(weights: Array) -> tuple[float, Array]:
            nonlocal top
            each = weights[:-1] / counts
            total, slope = self.at(
                each[:num_devices][device], each[num_devices:][bus], weights[-1] * self.most
            )
            top = max(top, total)
            by_kind = np.bincount(device, slope[0], num_devices) / counts[:num_devices]
            on_bus = np.bincount(bus, slope[1], len(counts) - num_devices) / counts[num_devices:]
            return total, np.concatenate([by_kind, on_bus, [slope[2] * self.most]])

        start = np.append(counts / counts.sum(), 0.1)
        cutting_planes(value, start, np.append(np.full(len(counts), np.nan), 1.0))
        return top

    def at(
        self, device: Array, bus: Array, memory: float
    ) -> tuple[float, tuple[Array, Array, float]]:
        """The weighted sum; and the time of each device and bus, and the memory, that are in it."""
        stars = self.stars
        time = self.relaxed.time
        with np.errstate(invalid="ignore"):
            cost = np.where(
                np.isfinite(time), time * device - memory * np.outer(self.gain, self.roomy), np.inf
            )
        use = _Use(self, device, bus, memory, cost)
        alone = np.ones(self.graph.num_ops, dtype=bool)
        for ops in (stars.parameter, stars.before, stars.after, stars.update, stars.gradient):
            alone[ops[ops >= 0]] = False
        rest = np.flatnonzero(alone)
        use.run(rest, cost[rest].argmin(axis=1))
        use.stars()
        slope = (use.device, use.bus, use.memory + self.alive - self.capacity)
        return float(device @ slope[0] + bus @ slope[1] + memory * slope[2]), slope


class _Use:
    """The cheapest choice for every op under some weights, and the time and memory it uses."""

    def __init__(self, of: _Weighed, device: Array, bus: Array, memory: float, cost: Array) -> None:
        self.of = of
        self.cost = cost
        self.weight = memory
        cluster = of.cluster
        self.device = np.zeros(len(device))
        self.bus = np.zeros(len(bus))
        self.memory = 0.0
        self.line = np.where(np.eye(len(device), dtype=bool), 0, cluster.bus)
        apart = ~np.eye(len(device), dtype=bool)
        # [devices, devices].
        self.per_byte = np.where(apart, bus[self.line] * cluster.seconds_per_byte, 0.0)
        self.per_send = np.where(apart, bus[self.line] * cluster.latency, 0.0)

    def run(self, ops: Array, where: Array) -> None:
        """Note that ops run on these devices."""
        np.add.at(self.device, where, self.of.relaxed.time[ops, where])
        self.memory -= float(self.of.gain[ops[self.of.roomy[where]]].sum())

    def send(self, tensors: Array, source: Array, target: Array) -> None:
        """Note that tensors are sent."""
        cluster = self.of.cluster
        apart = source != target
        tensors = tensors[apart]
        source = source[apart]
        target = target[apart]
        takes = (
            cluster.latency[source, target]
            + self.of.size[tensors] * cluster.seconds_per_byte[source, target]
        )
        np.add.at(self.bus, self.line[source, target], takes)

    def _ways(self, tensors: Array) -> Array:  # [tensors, from, to]
        return np.asarray(self.per_send + self.of.size[tensors][:, None, None] * self.per_byte)

    def _cost(self, ops: Array) -> Array:  # [stars, devices]
        """Seconds of ops on each device; 0 where there is no op."""
        return np.where((ops >= 0)[:, None], self.cost[ops], 0.0)

    def stars(self) -> None:
        stars = self.of.stars
        fast = ~self.of.roomy
        if not len(stars.parameter):
            return
        size = self.of.size[stars.parameter]
        fetch = self._ways(stars.parameter)  # [stars, home, device]
        # In the window, over the moment.
        kept = np.where(fast, self.weight * size[:, None], 0.0)[:, None, :]
        again = np.minimum(fetch, kept)
        first = self._cost(stars.before)[:, None, :] + np.where(
            (stars.before >= 0)[:, None, None], fetch, 0.0
        )
        only = (stars.before < 0)[:, None, None]  # nobody before it: it fetches for the first time
        second = self._cost(stars.after)[:, None, :] + np.where(only, fetch, again)
        second = np.where((stars.after >= 0)[:, None, None], second, 0.0)
        grad = np.where(stars.gradient >= 0, stars.gradient, 0)
        sent = np.where((stars.gradient >= 0)[:, None, None], self._ways(grad), 0.0)
        given = self._cost(stars.gradient)[:, :, None] + sent  # [stars, from, update]
        written = self._cost(stars.update)[:, :, None] + given.min(axis=1)[:, :, None]
        # [stars, update, home].
        written = written + np.where((stars.update >= 0)[:, None, None], fetch, 0.0)
        closed = np.where(np.isfinite(self.of.relaxed.time[stars.parameter]), 0.0, np.inf)
        lives = np.where(fast, self.weight * size[:, None], 0.0) + closed
        home = (lives + first.min(axis=2) + second.min(axis=2) + written.min(axis=1)).argmin(axis=1)
        rows = np.arange(len(home))
        self.memory += float(size[fast[home]].sum())
        self._note_reads(
            home, first[rows, home].argmin(axis=1), second[rows, home].argmin(axis=1), again < fetch
        )
        update = written[rows, :, home].argmin(axis=1)
        self._note_update(home, update, given[rows, :, update].argmin(axis=1))

    def _note_reads(self, home: Array, before: Array, after: Array, keep: Array) -> None:
        stars = self.of.stars
        rows = np.arange(len(home))
        there = stars.before >= 0
        self.run(stars.before[there], before[there])
        self.send(stars.parameter[there], home[there], before[there])
        later = stars.after >= 0
        self.run(stars.after[later], after[later])
        keeps = later & there & keep[rows, home, after]
        self.memory += float(self.of.size[stars.parameter[keeps & ~self.of.roomy[after]]].sum())
        fetches = later & ~keeps
        self.send(stars.parameter[fetches], home[fetches], after[fetches])

    def _note_update(self, home: Array, update: Array, gradient: Array) -> None:
        stars = self.of.stars
        there = stars.update >= 0
        self.run(stars.update[there], update[there])
        self.send(stars.parameter[there], update[there], home[there])
        given = stars.gradient >= 0
        self.run(stars.gradient[given], gradient[given])
        self.send(stars.gradient[given], gradient[given], update[given])
