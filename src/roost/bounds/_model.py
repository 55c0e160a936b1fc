"""The model for CP-SAT: devices of units, starts of ops, one op at a time on a device, transfers.

Times are whole ticks, rounded down. Whatever the simulator does, rounded down, satisfies every
constraint here: all of them say that one moment is at least so much later than another, and
rounding down keeps that. So the least step of the model is never above that of any placement, in
any order and with any window. `_links.py` adds the links. For how long what crosses keeps both ends
busy is left out: what an op takes longer for what it receives is here a later start, and it
finishes when it does in the simulator.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from roost.bounds._relaxed import Relaxed
from roost.bounds.alike import alike
from roost.bounds.heads_tails import Ends
from roost.core.arrays import Array
from roost.core.graph import UPDATE
from roost.core.timeline import Timeline


class SolverModel:
    """A relaxed problem as variables and constraints."""

    def __init__(self, relaxed: Relaxed, ends: Ends, horizon: float, tick: float) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model.CpModel()
        self.relaxed = relaxed
        self.ends = ends
        self.tick = tick
        self.problem = relaxed.problem
        self.graph = self.problem.graph
        self.cluster = self.problem.cluster
        self.devices = range(self.cluster.num_devices)
        self.most = math.floor(horizon / tick)
        self.step: Any = self.cp.new_int_var(0, self.most, "step")
        self.open = np.isfinite(relaxed.time)  # [ops, devices]
        self._unit_on: dict[tuple[int, int], Any] = {}
        self.begin: dict[int, Any] = {}
        self.links: Any = None  # of `_links.py`, where they are in the model
        # Whether some placements have been ruled out that are not proved to be bad.
        self.forbidden = False
        self._places()
        self._runs()
        self._devices_run_one_op_at_a_time()
        self._memory()
        self._break_symmetry()
        self.cp.minimize(self.step)

    def ticks(self, seconds: float) -> int:
        """Seconds as whole ticks, rounded down, and at most a little more than the longest step."""
        return math.floor(min(seconds / self.tick, 2.0 * self.most + 2.0))

    def on(self, op: int, d: int) -> Any:
        """The literal that an op is on a device."""
        return self._unit_on[int(self.relaxed.unit[op]), d]

    def where(self, op: int) -> list[int]:
        """The devices an op may be on."""
        return [d for d in self.devices if self.open[op, d]]

    def takes(self, source: int, target: int, tensor: int, home: bool = False) -> float:
        """Seconds of a tensor between two devices; a parameter is fetched, or its new value goes
        home."""
        size = float(self.graph.output_bytes[tensor])
        cluster = self.cluster
        fetched = self.graph.is_parameter[tensor] and not home
        per_byte = cluster.seconds_per_byte if fetched else cluster.sent_seconds_per_byte
        latency = cluster.latency if fetched or home else cluster.sent_latency
        return float(latency[source, target] + size * per_byte[source, target])

    def _places(self) -> None:
        unit = self.relaxed.unit
        for number, op in zip(*np.unique(unit, return_index=True), strict=True):
            for d in self.where(int(op)):
                self._unit_on[int(number), d] = self.cp.new_bool_var(f"unit{number} on {d}")
            self.cp.add_exactly_one([self.on(int(op), d) for d in self.where(int(op))])

    def _runs(self) -> None:
        """An op starts after its head, and the step lasts for its tail after it."""
        head = self.ends.head
        tail = self.ends.tail
        time = self.relaxed.time
        for op in np.flatnonzero(~self.graph.is_parameter).tolist():
            places = self.where(op)
            earliest = min(self.ticks(head[op, d]) for d in places)
            latest = max(
                self.most - self.ticks(time[op, d]) - self.ticks(tail[op, d]) for d in places
            )
            self.begin[op] = self.cp.new_int_var(
                min(earliest, self.most), max(latest, 0), f"begin{op}"
            )
            for d in places:
                after = self.ticks(time[op, d] + tail[op, d])
                self.cp.add(self.begin[op] >= self.ticks(head[op, d])).only_enforce_if(
                    self.on(op, d)
                )
                self.cp.add(self.step >= self.begin[op] + after).only_enforce_if(self.on(op, d))

    def _devices_run_one_op_at_a_time(self) -> None:
        busy = self.relaxed.busy
        time = self.relaxed.time
        for d in self.devices:
            here = [op for op in self.begin if self.open[op, d]]
            self.cp.add_no_overlap(
                self.cp.new_optional_fixed_size_interval_var(
                    self.begin[op], self.ticks(busy[op, d]), self.on(op, d), f"run{op} on {d}"
                )
                for op in here
            )
            # Implied, but the solver's linear relaxation does not know: all of it runs between
            # heads and tails.
            for late, last in self._spans(here, d):
                inside = [
                    op
                    for op in here
                    if self.ends.head[op, d] >= late and self.ends.tail[op, d] >= last
                ]
                work = sum(self.ticks(time[op, d]) * self.on(op, d) for op in inside)
                self.cp.add(
                    self.step >= self.ticks(late) + self.ticks(last) + work
                ).only_enforce_if([] if late + last == 0 else [self._any(inside, d)])

    def _spans(self, ops: list[int], d: int) -> list[tuple[float, float]]:
        heads, tails = (
            [float(end[op, d]) for op in ops] for end in (self.ends.head, self.ends.tail)
        )
        if not ops:
            return []
        cuts = [0.0, 0.25, 0.5, 0.75]
        starts, stops = ({0.0, *np.quantile(values, cuts).tolist()} for values in (heads, tails))
        return [(late, last) for late in sorted(starts) for last in sorted(stops)]

    def _any(self, ops: list[int], d: int) -> Any:
        """A literal that is true if any of the ops is on the device."""
        found = self.cp.new_bool_var("")
        for unit in {int(self.relaxed.unit[op]) for op in ops}:
            self.cp.add_implication(self._unit_on[unit, d], found)
        return found

    def add_delays(self) -> None:
        """A tensor takes its time to another device; links carry any number at once."""
        for op in self.begin:
            for source in self.graph.inputs_of(op).tolist():
                if self.graph.is_parameter[source]:
                    self._fetched(source, op)
                else:
                    self._received(source, op)

    def follows(self, source: int, op: int) -> None:
        """An op starts after its input has finished, wherever it is."""
        done = self.begin[source] + sum(
            self.ticks(self.relaxed.time[source, d]) * self.on(source, d)
            for d in self.where(source)
        )
        self.cp.add(self.begin[op] >= done)

    def _received(self, source: int, op: int) -> None:
        self.follows(source, op)
        if self.relaxed.unit[source] == self.relaxed.unit[op]:
            return
        for d in self.where(op):
            others = [e for e in self.where(source) if e != d]
            delays = [
                self.ticks(self.relaxed.time[source, e] + self.takes(e, d, source)) for e in others
            ]
            if len(set(delays)) == 1 and self.open[source, d]:  # one constraint for all
                after = self.cp.add(self.begin[op] >= self.begin[source] + delays[0])
                after.only_enforce_if(self.on(op, d), ~self.on(source, d))
                continue
            for e, delay in zip(others, delays, strict=True):
                after = self.cp.add(self.begin[op] >= self.begin[source] + delay)
                after.only_enforce_if(self.on(op, d), self.on(source, e))

    def _fetched(self, parameter: int, op: int) -> None:
        update = self.graph.phase[op] == UPDATE
        for d in self.where(op):
            for home in (home for home in self.where(parameter) if home != d):
                if self.relaxed.unit[parameter] == self.relaxed.unit[op]:
                    continue
                apart = [self.on(op, d), self.on(parameter, home)]
                delay = self.ticks(self.takes(home, d, parameter))
                self.cp.add(self.begin[op] >= delay).only_enforce_if(apart)
                if update:
                    after = self.ticks(
                        self.relaxed.time[op, d] + self.takes(d, home, parameter, home=True)
                    )
                    self.cp.add(self.step >= self.begin[op] + after).only_enforce_if(apart)

    def _memory(self) -> None:
        """Residents fit, together with what each op needs while it runs: see `unit_needs`."""
        graph = self.graph
        cluster = self.cluster
        size = graph.output_bytes.tolist()
        parameter = graph.is_parameter
        parameters = np.flatnonzero(parameter).tolist()
        for d in self.devices:
            room = int(cluster.memory[d])
            here = [p for p in parameters if self.open[p, d]]
            resident = sum(size[p] * self.on(p, d) for p in here)
            if here:
                self.cp.add(resident <= room)
            for op in self.begin:
                if not self.open[op, d]:
                    continue
                inputs = graph.inputs_of(op).tolist()
                passing = 0
                if self.relaxed.time[op, d] > 0:
                    passing = size[op] + int(graph.workspace_bytes[op])
                    passing += (
                        sum(size[p] for p in inputs if not parameter[p]) * cluster.copies_in_memory
                    )
                fetched = sum(
                    size[p] * (1 - self.on(p, d) if self.open[p, d] else 1)
                    for p in inputs
                    if parameter[p]
                )
                most = (
                    sum(size[p] for p in here)
                    + passing
                    + sum(size[p] for p in inputs if parameter[p])
                )
                if most > room:
                    self.cp.add(resident + fetched + passing <= room).only_enforce_if(
                        self.on(op, d)
                    )

    def _break_symmetry(self) -> None:
        """Of devices that are alike, the next is used only once the one before it has been, by an
        earlier unit."""
        busy = self.relaxed.unit_busy
        longest = np.where(np.isfinite(busy), busy, 0.0).max(axis=1)
        ranked = np.argsort(-longest, kind="stable").tolist()
        for members in alike(self.problem):
            used: dict[int, Any] = {}  # literals: some unit so far is on it
            for unit in ranked:
                row = {d: self._unit_on[unit, d] for d in members if (unit, d) in self._unit_on}
                for before, d in pairwise(members):
                    if d in row:
                        self.cp.add_bool_or(
                            [~row[d], used[before]] if before in used else [~row[d]]
                        )
                for d, literal in row.items():
                    now = self.cp.new_bool_var("")
                    self.cp.add_bool_or([~now, literal, *([used[d]] if d in used else [])])
                    used[d] = now

    def add_bound(self, seconds: float) -> None:
        """No step is shorter, as was proved before."""
        self.cp.add(self.step >= min(self.ticks(seconds), self.most))

    def hint(self, timeline: Timeline) -> None:
        """Start the search from a placement."""
        assert timeline.device is not None
        assert timeline.start is not None
        first = {int(unit): op for op, unit in reversed(list(enumerate(self.relaxed.unit)))}
        for (unit, d), literal in self._unit_on.items():
            self.cp.add_hint(literal, int(timeline.device[first[unit]] == d))
        for op, begin in self.begin.items():
            self.cp.add_hint(begin, self.ticks(float(timeline.start[op])))

    def forbid(self, devices: Array) -> None:
        """Look at these devices no more."""
        self.forbidden = True
        _, first = np.unique(self.relaxed.unit, return_index=True)
        self.cp.add_bool_or([~self.on(op, int(devices[op])) for op in first.tolist()])
