"""Schedules of a layout: the tasks of each device one after another, and when each begins.

A task is the work of one kind that one microbatch has in one chunk. A device takes the most urgent
task that is ready, by one of these rules:

- `gpipe` (Huang et al., NeurIPS 2019): all forward tasks, then all backward tasks.
- `1f1b` (PipeDream-flush; Megatron-LM, Narayanan et al., SC 2021): a backward task as soon as there
  is one. A chunk holds activations of as few microbatches as keep the pipeline busy. With several
  chunks on a device this is the interleaved order.
- `zero_bubble` (Qi et al., 2023): as `1f1b`, but gradients of weights are tasks of their own. They
  fill the time in which a device would wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from roost.core.arrays import Array
from roost.placers._microbatches.copied_step import (
    BACKWARD_WORK,
    FORWARD_WORK,
    NUM_KINDS,
    WEIGHT_WORK,
    CopiedStep,
)
from roost.placers._microbatches.layouts import CopyLayout

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")

Task = tuple[int, int, int]  # copy, chunk, kind


@dataclass(frozen=True, eq=False)
class TaskSchedule:
    """The begin of each task, and the end of the last."""

    layout: CopyLayout
    name: str  # one of SCHEDULES
    start: Array  # [copies, chunks, kinds] seconds
    seconds: float

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are tasks of their own."""
        return self.name == "zero_bubble"


def scheduled(step: CopiedStep, layout: CopyLayout, name: str) -> TaskSchedule:
    """Schedule the tasks of a layout by a rule."""
    start = np.zeros((len(layout.replica_of_copy), layout.num_chunks, NUM_KINDS))
    last = 0.0
    for replica in range(len(layout.replicas)):
        ended = _Replica(step, layout, replica, name).run(start)
        last = max(last, ended)
    return TaskSchedule(layout, name, start, last)


class _Replica:
    """The tasks of one replica, while they are scheduled."""

    def __init__(self, step: CopiedStep, layout: CopyLayout, replica: int, name: str) -> None:
        self.devices = layout.replicas[replica].devices
        self.copies = layout.copies[replica]
        self.name = name
        chunk = layout.chunk_of_element(replica, step.num_elements)
        self.seconds = np.zeros((len(self.devices), NUM_KINDS))
        for number, device in enumerate(self.devices):
            self.seconds[number] = step.work[:, chunk == number, device].sum(axis=1)
        self.forward_hop, self.backward_hop = self._hops(step, layout, replica)
        self.trains = bool(step.work[BACKWARD_WORK:].any())
        self.splits = name == "zero_bubble"
        if not self.splits:
            self.seconds[:, BACKWARD_WORK] += self.seconds[:, WEIGHT_WORK]
        self.limit = self._limits()

    def _hops(
        self, step: CopiedStep, layout: CopyLayout, replica: int
    ) -> tuple[list[float], list[float]]:
        """Seconds to the next chunk and back, behind each chunk."""
        ends = layout.replicas[replica].ends
        ahead, back = step.crossing_bytes
        cluster = step.problem.cluster
        forward, backward = [], []
        for chunk in range(len(self.devices) - 1):
            here, there = self.devices[chunk], self.devices[chunk + 1]
            cut = ends[chunk] - 1
            latency, rate = cluster.sent_latency, cluster.sent_seconds_per_byte
            forward.append(float(latency[here, there] + ahead[cut] * rate[here, there]))
            backward.append(float(latency[there, here] + back[cut] * rate[there, here]))
        return forward, backward

    def _limits(self) -> dict[int, int]:
        """The most microbatches, times chunks, that each device holds activations of."""
        count = len(self.copies)
        places = list(dict.fromkeys(self.devices))
        depth = len(places)
        chunks = {device: self.devices.count(device) for device in places}
        if self.name == "gpipe" or not self.trains:
            return {device: count * chunks[device] for device in places}
        limits = {}
        for place, device in enumerate(places):
            own = depth - place
            if chunks[device] > 1:  # as Megatron warms up an interleaved pipeline
                own = 2 * (depth - place - 1) + (chunks[device] - 1) * depth + 1
            elif self.name == "zero_bubble":
                own += 1 if place else 0
            limits[device] = max(1, own)
        return limits

    def run(self, start: Array) -> float:
        """Write the begins of all tasks, and return the end of the last."""
        ready: dict[int, list[tuple[float, Task]]] = {device: [] for device in self.devices}
        self.free = dict.fromkeys(self.devices, 0.0)
        held = dict.fromkeys(self.devices, 0)
        for copy in self.copies:
            ready[self.devices[0]].append((0.0, (copy, 0, FORWARD_WORK)))
        for row in ready.values():
            heapify(row)
        waiting: dict[int, list[tuple[tuple[int, ...], Task]]] = {d: [] for d in ready}
        kinds = 1 + self.trains * (1 + self.splits)
        left = len(self.copies) * len(self.devices) * kinds
        end = 0.0
        while left:
            device, now = self._next(ready, waiting, held)
            self._arrive(ready[device], waiting[device], now)
            task = self._take(waiting[device], held[device], self.limit[device])
            copy, chunk, kind = task
            start[copy, chunk, kind] = now
            done = now + float(self.seconds[chunk, kind])
            self.free[device] = done
            end = max(end, done)
            left -= 1
            if self.trains:
                held[device] += (kind == FORWARD_WORK) - (kind == BACKWARD_WORK)
            self._follow(task, done, ready)
        return end

    def _follow(self, task: Task, done: float, ready: dict[int, list[tuple[float, Task]]]) -> None:
        """Make the tasks ready that wait for this one."""
        copy, chunk, kind = task
        devices = self.devices
        if kind == FORWARD_WORK:
            if chunk + 1 < len(devices):
                arrives = done + self.forward_hop[chunk]
                heappush(ready[devices[chunk + 1]], (arrives, (copy, chunk + 1, FORWARD_WORK)))
            elif self.trains:
                heappush(ready[devices[chunk]], (done, (copy, chunk, BACKWARD_WORK)))
        elif kind == BACKWARD_WORK:
            if self.splits:
                heappush(ready[devices[chunk]], (done, (copy, chunk, WEIGHT_WORK)))
            if chunk:
                arrives = done + self.backward_hop[chunk - 1]
                heappush(ready[devices[chunk - 1]], (arrives, (copy, chunk - 1, BACKWARD_WORK)))

    def _next(
        self,
        ready: dict[int, list[tuple[float, Task]]],
        waiting: dict[int, list[tuple[tuple[int, ...], Task]]],
        held: dict[int, int],
    ) -> tuple[int, float]:
        """The device that can begin a task first, and when."""
        found = (np.inf, -1)
        blocked = (np.inf, -1)
        for device, row in ready.items():
            full = held[device] >= self.limit[device]
            times = [self.free[device]] if self._may(waiting[device], full) else []
            times += [
                max(self.free[device], at)
                for at, task in row
                if not (full and task[2] == FORWARD_WORK)
            ]
            if times:
                found = min(found, (min(times), device))
            elif row or waiting[device]:
                at = max(self.free[device], row[0][0] if row else 0.0)
                blocked = min(blocked, (at, device))
        if found[1] < 0:  # limits that no schedule can keep: let one more begin
            found = blocked
            self.limit[found[1]] += 1
        return found[1], float(found[0])

    @staticmethod
    def _may(waiting: list[tuple[tuple[int, ...], Task]], full: bool) -> bool:
        return any(not (full and task[2] == FORWARD_WORK) for _, task in waiting)

    def _arrive(
        self,
        ready: list[tuple[float, Task]],
        waiting: list[tuple[tuple[int, ...], Task]],
        now: float,
    ) -> None:
        while ready and ready[0][0] <= now:
            _, task = heappop(ready)
            heappush(waiting, (self._urgency(task), task))

    @staticmethod
    def _take(waiting: list[tuple[tuple[int, ...], Task]], held: int, limit: int) -> Task:
        """Take the most urgent task that the limit allows."""
        full = held >= limit
        skipped = []
        while True:
            entry = heappop(waiting)
            if not (full and entry[1][2] == FORWARD_WORK):
                break
            skipped.append(entry)
        for each in skipped:
            heappush(waiting, each)
        return entry[1]

    def _urgency(self, task: Task) -> tuple[int, ...]:
        """The order among tasks that are ready, the least first."""
        copy, chunk, kind = task
        several = len(self.devices) > len(set(self.devices))
        depth = len(set(self.devices))
        block = self.copies.index(copy) // depth if several else 0
        rank = (0, 1, 2)[kind] if self.name == "gpipe" else (1, 0, 2)[kind]
        level = chunk // depth if kind == FORWARD_WORK else -(chunk // depth)
        return rank, block, level, copy
