"""A problem as the network of `lister` sees it: what is known of each unit before anything is
placed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._lister.compiled_network import (
    SEEN,
    Frame,
    Network,
    Record,
    Rolls,
    paths,
    run_network,
)
from roost.placers._listing.list_scheduler import SCALES, ListScheduler, total_time
from roost.placers._shared.prefetch import fetched_once
from roost.placers._shared.units import Units
from roost.simulator.kernels.base import Layout

# Of a unit: of its first op where it says so.
KNOWN = (
    "position", "head", "tail", "slack", "time", "op_time", "output", "inputs", "memory", "lasting",
    "ops", "previous",
    "next", "is_source", "has_partner", "has_rival", "ratio", "backward", "update", "slower",
    # Of the whole problem.
    "path", "traffic", "devices", "fast_devices", "units", "tight", "tight_in_all", "spread",
    "latency", "by_rank",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rolled:
    """Schedules and what they cost."""

    unit_device: Array  # [rolls, units] i4
    step_time: Array  # [rolls] seconds
    excess: Array  # [rolls] bytes over memory
    simulations: int
    record: Record


@dataclass(frozen=True, eq=False)
class Framed:
    """A problem under one order, ready for the network."""

    under: ListScheduler
    frame: Frame
    known: Array  # [units, known] f4
    names: Array  # [devices] the first device that each is just like

    @staticmethod
    def of(under: ListScheduler) -> Framed:
        units, problem = under.units, under.units.problem
        total = total_time(units)
        balance = max(1e-12, float(1.0 / (1.0 / total).sum()))
        tick = max(1e-12, float(units.time.min(axis=1).mean()))
        alike = twins(problem, under.layout)
        frame = Frame(
            total=total,
            least_total=float(total.min()),
            balance=balance,
            tick=tick,
            alike=alike,
            first_op=_first_ops(under),
            shared=problem.cluster.has_shared_buses,
            op_unit=units.unit,
            reads=_reads(units),
            size=np.array(problem.graph.output_bytes),
        )
        return Framed(under, frame, _known(under, frame), alike)

    @property
    def units(self) -> Units:
        return self.under.units

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices of units; parameters that live elsewhere are fetched
        once a step."""
        placement = self.under.placement(unit_device)
        return replace(placement, prefetch_bytes=fetched_once(self.units.problem, placement.device))

    def roll(
        self, network: Network, rolls: Rolls, scales: Array = SCALES, record: bool = False
    ) -> Rolled:
        """A schedule for each of the rolls."""
        count, under = len(rolls.heat), self.under
        num_units, num_devices = self.units.num_units, self.units.problem.cluster.num_devices
        rows = count if record else 0
        kept = Record(
            seen=np.zeros((rows, num_units, num_devices, len(SEEN)), np.float32),
            mask=np.zeros((rows, num_units), np.uint64),
            unit=np.full((rows, num_units), -1, np.int32),
            choice=np.zeros((rows, num_units), np.int32),
            log_prob=np.zeros((rows, num_units)),
        )
        unit_device, costs = np.zeros((count, num_units), np.int32), np.zeros((count, 2))
        world = (
            under.layout,
            under.listing,
            self.frame,
            network,
            rolls,
            self.units.problem.cluster.memory,
        )
        spent = run_network(*world, scales, under.is_tight, kept, unit_device, costs)
        return Rolled(unit_device, costs[:, 0], costs[:, 1], int(spent), kept)

    def canonical(self, unit_device: Array) -> Array:
        """The same placement, with devices that are just alike renamed in the order in which they
        are first used."""
        first = self.frame.first_op
        order = np.argsort(np.where(first < 0, np.iinfo(np.int64).max, first), kind="stable")
        name = np.full(len(self.names), -1)
        free = {
            int(kind): np.flatnonzero(self.names == kind).tolist()
            for kind in set(self.names.tolist())
        }
        for device in unit_device[order].tolist():
            if name[device] < 0:
                name[device] = free[int(self.names[device])].pop(0)
        return np.asarray(name[unit_device], dtype=np.int32)


def twins(problem: Problem, layout: Layout) -> Array:  # [devices]
    """The first device that each is just like: the two could change places, and nothing would."""
    cluster, count = problem.cluster, problem.cluster.num_devices
    bus, apart = np.asarray(layout.bus).reshape(count, count), ~np.eye(count, dtype=bool)
    found = np.arange(count)
    for d in range(count):
        for e in range(d):
            order = np.arange(count)
            order[[d, e]] = e, d
            changed = np.ix_(order, order)
            pairs = {(int(a), int(b)) for a, b in zip(bus[apart], bus[changed][apart], strict=True)}
            if (
                found[e] == e
                and cluster.memory[d] == cluster.memory[e]
                and layout.device_gap[d] == layout.device_gap[e]
                and (problem.op_time[:, d] == problem.op_time[:, e]).all()
                and (problem.allowed[:, d] == problem.allowed[:, e]).all()
                and (cluster.latency[changed] == cluster.latency).all()
                and (cluster.seconds_per_byte[changed] == cluster.seconds_per_byte).all()
                and (cluster.sent_latency[changed] == cluster.sent_latency).all()
                and (cluster.sender_busy[changed] == cluster.sender_busy).all()
                and (cluster.receiver_busy[changed] == cluster.receiver_busy).all()
                and (cluster.sent_seconds_per_byte[changed] == cluster.sent_seconds_per_byte).all()
                and len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
                and all(layout.bus_gap[a] == layout.bus_gap[b] for a, b in pairs)
            ):
                found[d] = e
                break
    return found


def _first_ops(under: ListScheduler) -> Array:  # [units]
    first = np.full(under.units.num_units, -1, np.int64)
    unit = under.listing.unit[::-1].astype(np.int64)
    first[unit] = np.arange(len(unit))[::-1]
    return first


def _reads(units: Units) -> Array:
    """[reads, 2] parameters and the ops that read them in other units, by parameter."""
    graph = units.problem.graph
    edges = graph.is_parameter[graph.input_op] & (
        units.unit[graph.input_op] != units.unit[graph.edge_target]
    )
    found = np.stack([graph.input_op[edges], graph.edge_target[edges]], axis=1).astype(np.int64)
    return np.ascontiguousarray(found[np.lexsort((found[:, 1], found[:, 0]))])


def _known(under: ListScheduler, frame: Frame) -> Array:
    units, layout, listing = under.units, under.layout, under.listing
    graph, cluster = units.problem.graph, units.problem.cluster
    num_ops, num_units, num_devices = len(layout.op), units.num_units, cluster.num_devices
    apart = ~np.eye(num_devices, dtype=bool)
    latency = float(cluster.latency[apart].mean()) if num_devices > 1 else 0.0
    per_byte = float(cluster.seconds_per_byte[apart].mean()) if num_devices > 1 else 0.0
    op_time = np.asarray(layout.time).reshape(num_ops, num_devices)
    fastest = op_time.min(axis=1, initial=np.inf) if num_ops else np.zeros(0)
    transfer = (latency + layout.output * per_byte) if num_devices > 1 else np.zeros(num_ops)
    head, tail = np.zeros(num_ops), np.zeros(num_ops)
    paths(layout, fastest, transfer * 0.5, head, tail)
    longest = max(1e-12, float((head + tail).max(initial=0.0)))
    inputs = np.zeros(num_ops)
    np.add.at(
        inputs,
        np.repeat(np.arange(num_ops), layout.num_inputs),
        transfer[layout.previous.astype(np.int64)],
    )
    op = np.maximum(frame.first_op, 0)
    there = (frame.first_op >= 0) & (num_ops > 0)
    memory = max(1.0, float(cluster.memory.mean()))
    time, tick, phase = units.time.min(axis=1), frame.tick, graph.phase[layout.op]
    total = frame.total

    def first(values: Array) -> Array:
        return np.where(there, values[op] if num_ops else 0.0, 0.0)

    own = [
        first(np.arange(num_ops) / max(1, num_ops)),
        first(head / longest),
        first(tail / longest),
        first(1.0 - (head + tail) / longest),
        np.log1p(time / tick),
        first(np.log1p(fastest / tick)),
        first(np.log1p(transfer / tick)),
        first(np.log1p(inputs / tick)),
        np.log1p(20.0 * units.resident_bytes / memory),
        np.log1p(20.0 * listing.lasting / memory),
        np.log1p(np.bincount(units.unit, minlength=num_units)) / 4,
        first(np.log1p(layout.num_inputs)),
        first(np.log1p(np.diff(layout.next_start.astype(np.int64)))),
        first(layout.num_inputs == 0),
        first(listing.partner >= 0),
        first(listing.rival >= 0),
        first(np.log((transfer + 1e-3 * tick) / (fastest + 1e-3 * tick)) / 4),
        first(phase == BACKWARD),
        first(phase == UPDATE),
        np.log((units.time.max(axis=1) + 1e-3 * tick) / (time + 1e-3 * tick)) / 4,
    ]
    lasting, room = float(listing.lasting.sum()), max(1.0, float(cluster.memory.sum()))
    whole = [
        np.log(longest / frame.balance + 1e-3) / 2,
        np.log1p(float(transfer.sum()) / frame.balance) / 4,
        np.log2(num_devices) / 3,
        np.log2(max(1, int((total < 1.5 * total.min()).sum()))) / 3,
        np.log(num_units) / 6,
        min(4.0, lasting / max(1.0, float(cluster.memory.max()))),
        min(4.0, 2 * lasting / room),
        np.log(total.max() / total.min()) / 3,
        np.log1p(20.0 * latency / tick) / 4,
        float(under.example.order != "program"),
    ]
    shared = np.broadcast_to(np.array(whole), (num_units, len(whole)))
    found = np.concatenate([np.stack(own, axis=1), shared], axis=1).astype(np.float32)
    assert found.shape == (num_units, len(KNOWN))
    return np.ascontiguousarray(np.nan_to_num(found, posinf=10.0, neginf=-10.0))
