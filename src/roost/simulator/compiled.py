"""The simulator, compiled: equal to `reference.py`, and about a hundred times as fast.

`Simulator(problem)` holds what does not change from one placement to the next. One placement:
`simulate`. A batch of unrelated ones: `evaluate`. A batch of neighbours of one: `neighbours`. All
release the GIL.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from roost.core.arrays import Array, digest, exact
from roost.core.graph import UPDATE
from roost.core.placement import ORDERS, Placement
from roost.core.problem import Problem
from roost.core.timeline import SEND, Timeline, Transfers, missing_memory
from roost.errors import InputError
from roost.simulator import (
    memory,
)
from roost.simulator.kernels import batch, lane_state, lanes
from roost.simulator.kernels.base import Busy, Layout
from roost.simulator.kernels.fetches import fetches_anything
from roost.simulator.order import dispatch_order

# Orders come and go in a search; those used lately are kept.
_MOST_LAYOUTS = 8

# Below this many ops simulated, a thread costs more than it brings.
_OPS_PER_THREAD = 400_000


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Step times, peaks and transfers of a batch of placements."""

    step_time: Array  # [batch] seconds
    peak_memory: Array  # [batch, devices] bytes; all zero where memory was not asked for
    num_transfers: Array  # [batch]
    capacity: Array  # [devices] bytes

    @property
    def feasible(self) -> Array:  # [batch]
        return np.asarray((self.peak_memory <= self.capacity).all(axis=1))

    @property
    def missing_bytes(self) -> Array:  # [batch] beyond the capacities, on all devices together
        return np.asarray(missing_memory(self.peak_memory, self.capacity).sum(axis=1))

    def __len__(self) -> int:
        return len(self.step_time)


class Simulator:
    """A problem, ready to simulate placements."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layouts: dict[str, Layout] = {}
        self._lanes = threading.local()
        bits = np.uint64(1) << np.arange(problem.cluster.num_devices, dtype=np.uint64)
        self._allowed = (problem.allowed * bits).sum(axis=1, dtype=np.uint64)  # [ops]
        self._leader = np.arange(problem.graph.num_ops)  # [ops]
        members = problem.graph.group >= 0
        self._leader[members] = problem.group_leader[problem.graph.group[members]]
        led = np.flatnonzero(members)
        self._member_start, self._member = _grouped(self._leader[led], led, problem.graph.num_ops)

    @staticmethod
    def of(problem: Problem) -> Simulator:
        """The simulator of a problem, made once and kept with it."""
        if not isinstance(problem, Problem):
            raise InputError(
                f"a problem is needed, not {type(problem).__name__}; roost.estimate makes one of "
                f"a graph"
            )
        kept = vars(problem).get("_simulator")
        if kept is None:
            kept = vars(problem)["_simulator"] = Simulator(problem)
        assert isinstance(kept, Simulator)
        return kept

    def layout(self, placement: Placement) -> Layout:
        """The problem as the kernels read it, under the order of a placement."""
        key = "program" if placement.order == "fifo" else placement.order
        if key == "priority":
            assert placement.priority is not None
            key = digest([placement.priority])
        found = self._layouts.pop(key, None) or _layout(self.problem, placement)
        self._layouts[key] = found  # at the end: the one used longest ago is at the front
        if len(self._layouts) > _MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return found

    def simulate(self, placement: Placement, full: bool = False) -> Timeline:
        """One placement: its step time and peaks, and the full timeline where it is asked for."""
        placement = self.problem.check(placement)
        # Not read-only: one machine code.
        outcome = self._run(placement.device[None].copy(), placement, memory=True)
        detail = self._full(placement) if full else {}
        return Timeline(
            step_time=float(outcome.step_time[0]),
            peak_memory=outcome.peak_memory[0],
            capacity=outcome.capacity,
            num_transfers=int(outcome.num_transfers[0]),
            device_names=self.problem.cluster.device_names,
            op_names=self.problem.graph.op_names,
            **detail,
        )

    def op_times(self, placement: Placement) -> tuple[Array, Array]:  # [ops] seconds each
        """Start and finish of the ops of one placement, unchecked; parameters have zeros."""
        start, finish, *_ = self._every_event(placement)
        return start, finish

    def evaluate(
        self,
        devices: Array,
        order: str = "program",
        prefetch_bytes: Array | int = 0,
        memory: bool = True,
        threads: int = 1,
    ) -> Outcomes:
        """A batch of unrelated placements: `devices` [batch, ops], under one order and one set of
        windows."""
        if order not in ORDERS or order == "priority":
            raise InputError(f"order {order!r} must be one of program, rank, fifo")
        devices = self._checked(devices)
        example = Placement(
            np.zeros(self.problem.graph.num_ops, np.int32), order, prefetch_bytes=prefetch_bytes
        )
        if np.ndim(example.prefetch_bytes) and np.shape(example.prefetch_bytes) != (
            self.problem.cluster.num_devices,
        ):
            raise InputError(
                f"prefetch_bytes must have one entry for each of "
                f"{self.problem.cluster.num_devices} devices"
            )
        return self._run(devices, example, bool(memory), threads)

    def neighbours(
        self,
        placement: Placement,
        move_start: Array,
        move_op: Array,
        move_device: Array,
    ) -> Outcomes:
        """Neighbours of a placement: number i differs from it in moves move_start[i] to
        move_start[i + 1].

        A move puts one op on another device. Neighbours are simulated many at a time where that is
        exact, which is several times as fast as `evaluate`.
        """
        placement = self.problem.check(placement)
        moves = self._checked_moves(placement, move_start, move_op, move_device)
        layout = self.layout(placement)
        cluster = self.problem.cluster
        count = len(moves[0]) - 1
        placed = placement.device.astype(np.uint32)
        device = placed[layout.op]
        home = placed[layout.parameter_op]
        step_time = np.zeros(count)
        num_transfers = np.zeros(count, np.int64)
        peak = np.zeros((count, cluster.num_devices), np.int64)
        alone = np.ones(count, bool)
        by_lanes = placement.order != "fifo" and not cluster.has_shared_buses
        if by_lanes and not fetches_anything(layout, device, home):
            lanes.run_neighbours(
                layout,
                self._lanes_for(layout, lanes.most_moves(moves[0])),
                device,
                home,
                self.numbers(layout),
                self.problem.graph.is_parameter,
                moves,
                alone,
                step_time,
                peak,
                num_transfers,
            )
        if alone.any():
            rows = np.flatnonzero(alone)
            devices = np.repeat(placement.device[None], len(rows), axis=0)
            for row, number in enumerate(rows.tolist()):
                picked = slice(moves[0][number], moves[0][number + 1])
                devices[row, moves[1][picked]] = moves[2][picked]
            outcome = self._run(devices, placement, memory=True)
            step_time[rows] = outcome.step_time
            peak[rows] = outcome.peak_memory
            num_transfers[rows] = outcome.num_transfers
        return Outcomes(step_time, peak, num_transfers, cluster.memory)

    def _lanes_for(self, layout: Layout, most_moves: int) -> Any:
        """Lanes for this layout, kept from call to call: they are large, and fresh memory is slow.
        One to a thread."""
        kept = vars(self._lanes).get("kept")
        if kept is None or kept[0] is not layout or kept[1] < most_moves:
            kept = self._lanes.kept = (layout, most_moves, lane_state.new_lanes(layout, most_moves))
        return kept[2]

    def numbers(self, layout: Layout) -> Array:
        """[ops] the position of each op, or the number of a parameter."""
        number = np.zeros(self.problem.graph.num_ops, np.uint32)
        number[layout.op] = np.arange(len(layout.op))
        number[layout.parameter_op] = np.arange(len(layout.parameter_op))
        return number

    def _checked_moves(
        self, placement: Placement, move_start: Array, move_op: Array, move_device: Array
    ) -> tuple[Array, Array, Array]:
        """Moves that the kernels can trust."""
        start = np.array(exact(move_start, np.int64, "move_start"))
        op = np.array(exact(move_op, np.int32, "move_op"))
        device = np.array(exact(move_device, np.int32, "move_device"))
        if (
            start.ndim != 1
            or len(start) < 1
            or start[0] != 0
            or start[-1] != len(op)
            or (start[1:] < start[:-1]).any()  # not np.diff, which wraps around
        ):
            raise InputError(
                "move_start must go up from 0 to the number of moves, with one more entry than "
                "neighbours"
            )
        if op.shape != device.shape or op.ndim != 1:
            raise InputError(
                f"move_op and move_device must match, not {list(op.shape)} and {list(device.shape)}"
            )
        wrong = batch.first_wrong_neighbour(
            placement.device,
            start,
            op,
            device,
            self._allowed,
            self._leader,
            self._member_start,
            self._member,
            self.problem.cluster.num_devices,
        )
        if wrong >= 0:
            picked = slice(start[wrong], start[wrong + 1])
            nowhere = device[picked][
                (device[picked] < 0) | (device[picked] >= self.problem.cluster.num_devices)
            ]
            if len(nowhere):
                last = self.problem.cluster.num_devices - 1
                raise InputError(
                    f"neighbour {wrong} moves to device {nowhere[0]}; devices are 0 to {last}"
                )
            bad = op[picked][(op[picked] < 0) | (op[picked] >= self.problem.graph.num_ops)]
            if len(bad):
                raise InputError(
                    f"neighbour {wrong} moves op {bad[0]}; ops are 0 to "
                    f"{self.problem.graph.num_ops - 1}"
                )
            changed = placement.device.copy()
            changed[op[picked]] = device[picked]
            self.problem.check(Placement(changed))
            raise AssertionError("what the kernel refuses, the problem refuses too")
        return start, op, device

    def _checked(self, devices: Array) -> Array:
        """A batch of devices that the kernels can trust."""
        # A copy: nobody may change it after the check.
        devices = exact(devices, np.int32, "devices")
        num_ops = self.problem.graph.num_ops
        if devices.ndim != 2 or devices.shape[1] != num_ops:
            raise InputError(f"devices must be [batch, {num_ops}], not {list(devices.shape)}")
        wrong = batch.first_wrong(
            devices, self._allowed, self._leader, self.problem.cluster.num_devices
        )
        if wrong >= 0:
            self.problem.check(Placement(devices[wrong]))
            raise AssertionError("what the kernel refuses, the problem refuses too")
        return devices

    def _window(self, placement: Placement) -> Array:
        return np.array(
            np.broadcast_to(placement.prefetch_bytes, self.problem.cluster.num_devices),
            dtype=np.int64,
        )

    def _run(self, devices: Array, example: Placement, memory: bool, threads: int = 1) -> Outcomes:
        count = len(devices)
        cluster = self.problem.cluster
        layout = self.layout(example)
        window = self._window(example)
        step_time = np.zeros(count)
        num_transfers = np.zeros(count, np.int64)
        peak = np.zeros((count, cluster.num_devices), np.int64)

        def run(rows: slice) -> None:
            batch.run_batch(
                layout,
                devices[rows],
                window,
                example.order == "fifo",
                cluster.has_shared_buses,
                memory,
                step_time[rows],
                peak[rows],
                num_transfers[rows],
            )

        parts = max(1, min(threads, count, devices.size // _OPS_PER_THREAD))
        if parts == 1:
            run(slice(0, count))
        else:
            edges = np.linspace(0, count, parts + 1).astype(int).tolist()
            with ThreadPoolExecutor(parts) as pool:
                list(pool.map(run, (slice(*pair) for pair in pairwise(edges))))
        return Outcomes(step_time, peak, num_transfers, cluster.memory)

    def _every_event(self, placement: Placement) -> tuple[Array, Array, int, Any, Array]:
        """Start and finish of ops [ops], the number of transfers, the transfers, and the windows
        that were used."""
        layout = self.layout(placement)
        num_ops = self.problem.graph.num_ops
        placed = placement.device.astype(np.uint32)
        device = placed[layout.op]
        home = placed[layout.parameter_op]
        window = self._window(placement)
        fifo = placement.order == "fifo"
        _, count, begins, ends, moves, window = batch.run_full(layout, device, home, window, fifo)
        start = np.zeros(num_ops)
        finish = np.zeros(num_ops)
        start[layout.op] = begins
        finish[layout.op] = ends
        return start, finish, count, moves, window

    def _full(self, placement: Placement) -> dict[str, Any]:
        layout = self.layout(placement)
        start, finish, count, moves, window = self._every_event(placement)
        kind = moves.kind[:count].astype(np.int32)
        tensor = np.empty(count, np.int32)
        sent = kind == SEND
        tensor[sent] = layout.op[moves.tensor[:count][sent]]
        tensor[~sent] = layout.parameter_op[moves.tensor[:count][~sent]]
        transfers = Transfers(
            tensor,
            moves.source[:count].astype(np.int32),
            moves.target[:count].astype(np.int32),
            kind,
            moves.start[:count],
            moves.finish[:count],
        )
        fifo = placement.order == "fifo"
        account = memory.in_time_order if fifo else memory.in_dispatch_order
        order = layout.op.tolist()
        track, _ = account(
            self.problem, placement, order, window.tolist(), start, finish, transfers
        )
        return {
            "device": placement.device,
            "start": start,
            "finish": finish,
            "transfers": transfers,
            "memory": track,
        }


def simulate(problem: Problem, placement: Placement, full: bool = False) -> Timeline:
    """Predict one step of a placement: step time and peaks, and with `full` the whole timeline."""
    return Simulator.of(problem).simulate(placement, full)


def _layout(problem: Problem, placement: Placement) -> Layout:
    graph = problem.graph
    cluster = problem.cluster
    order = dispatch_order(problem, placement)
    parameters = np.flatnonzero(graph.is_parameter)
    number = np.zeros(graph.num_ops, dtype=np.int64)  # position of an op, or number of a parameter
    number[order] = np.arange(len(order))
    number[parameters] = np.arange(len(parameters))
    source = graph.input_op
    target = graph.edge_target
    read = graph.is_parameter[source]
    use_start, use = _grouped(
        number[target[read]], number[source[read]], len(order), keep_order=True
    )
    user_start, user = _grouped(number[source[read]], number[target[read]], len(parameters))
    source = number[source[~read]]
    target = number[target[~read]]
    next_start, following = _grouped(source, target, len(order))
    ends = (
        Busy(cluster.sender_busy.ravel(), cluster.receiver_busy.ravel())
        if cluster.keeps_busy
        else None
    )
    previous_start, previous = _grouped(target, source, len(order))
    return Layout(
        num_devices=cluster.num_devices,
        broadcast=cluster.broadcast,
        copies_in_memory=cluster.copies_in_memory,
        op=order.astype(np.uint32),
        time=np.ascontiguousarray(problem.op_time[order]).ravel(),
        output=graph.output_bytes[order],
        workspace=graph.workspace_bytes[order],
        is_update=graph.phase[order] == UPDATE,
        num_inputs=np.diff(previous_start).astype(np.int32),
        next_start=next_start,
        next=following,
        previous_start=previous_start,
        previous=previous,
        use_start=use_start,
        use=use,
        user_start=user_start,
        user=user,
        parameter_op=parameters.astype(np.uint32),
        parameter_bytes=graph.output_bytes[parameters],
        latency=cluster.latency.ravel(),
        sent_latency=cluster.sent_latency.ravel(),
        seconds_per_byte=cluster.seconds_per_byte.ravel(),
        sent_seconds_per_byte=cluster.sent_seconds_per_byte.ravel(),
        bus=cluster.bus.ravel().astype(np.uint32),
        bus_gap=cluster.bus_gap,
        device_gap=cluster.device_gap,
        busy=ends,
    )


def _grouped(key: Array, value: Array, count: int, keep_order: bool = False) -> tuple[Array, Array]:
    """Values by key, as starts and one flat array; ascending within a key, or in the order
    given."""
    start = np.zeros(count + 1, dtype=np.uint32)
    np.cumsum(np.bincount(key, minlength=count), out=start[1:], dtype=np.uint32)
    # One number for both, for numbers are sorted several times faster than pairs are.
    second = np.arange(len(key)) if keep_order else value
    bits = int(second.max(initial=0)).bit_length()
    second = np.sort(key << bits | second) & ((1 << bits) - 1)
    return start, (value[second] if keep_order else second).astype(np.uint32)
