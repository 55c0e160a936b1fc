"""The plan of a training run: the work of each device in words, and expected and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE
from roost.core.units import show_bytes, show_seconds
from roost.search.microbatches import MicrobatchResult
from roost.transforms.microbatch import SHARED

_WHOLE = 0.98  # share of a microbatch from which a device is said to compute it
_NONE = 0.02
_FASTER = 1.01  # from here on another placement is called faster than one device


@dataclass(frozen=True, eq=False, repr=False)
class TrainingPlan:
    """A placed training step: how it is expected to run, and how long its steps took so far."""

    found: MicrobatchResult
    model: str
    batch: int
    one_device: tuple[str, float] | None  # the best device alone, and its step time
    later_updates: float = 0.0  # seconds of updates that follow the simulated step
    measured: float | None = None  # seconds: the median of the steps so far
    num_measured: int = 0
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.found.count

    @property
    def step_time(self) -> float:
        """Seconds that a step is expected to take."""
        return self.found.result.best.step_time + self.later_updates

    @property
    def one_device_step_time(self) -> float | None:
        """Seconds that a step is expected to take on the best device alone, if it fits there."""
        return None if self.one_device is None else self.one_device[1]

    @property
    def one_device_is_best(self) -> bool:
        """True if all work is on one device."""
        return len(set(self._device[self._computes].tolist())) <= 1

    @property
    def peak_memory(self) -> dict[str, int]:
        """Bytes that each device is expected to hold at most."""
        peaks = self.found.result.best.peak_memory.tolist()
        return dict(zip(self._names, map(int, peaks), strict=True))

    def __str__(self) -> str:
        return "\n".join([self._title(), *self._times(), *self._devices(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    # ------------------------------------------------------------------ words

    def _title(self) -> str:
        size = self.batch // self.microbatches
        how = (
            "as a whole"
            if self.microbatches == 1
            else f"in {self.microbatches} microbatches of {size}"
        )
        return f"{self.model}: a batch of {self.batch} {how}, on {', '.join(self._names)}"

    def _times(self) -> list[str]:
        expected = self.step_time
        text = f"expected: {show_seconds(expected)} a step"
        if self.one_device is None:
            text += "; it fits on no device alone"
        elif self.one_device[1] <= expected * _FASTER or self.one_device_is_best:
            text += f"; one device is best ({self.one_device[0]})"
        else:
            name, alone = self.one_device
            text += f", {alone / expected:.2f} times faster than {name} alone ("
            text += f"{show_seconds(alone)})"
        bound = self.found.result.bound
        if bound is not None and bound.step_time > 0 and not self.later_updates:
            text += f"; no placement of it is faster than {show_seconds(bound.step_time)}"
        lines = [text]
        if self.measured is not None:
            steps = "1 step" if self.num_measured == 1 else f"{self.num_measured} steps"
            lines.append(
                f"measured: {show_seconds(self.measured)} a step, median of {steps}; expected "
                f"{show_seconds(expected)}"
            )
            lines += self._too_slow(self.measured)
        return lines

    def _too_slow(self, measured: float) -> list[str]:
        """A word where one device alone is expected to be faster than what was measured."""
        if self.one_device is None or self.one_device_is_best:
            return []
        name, seconds = self.one_device
        if measured <= seconds:
            return []
        return [
            f"this is longer than a step is expected to take on {name} alone "
            f"({show_seconds(seconds)}): many short ops cost more than their times, or other "
            "programs were running. Try microbatches=1, or that device alone by cluster="
        ]

    def _devices(self) -> list[str]:
        graph = self.found.problem.graph
        weights = self._bytes(graph.is_parameter)
        updates = np.bincount(self._device[graph.phase == UPDATE], minlength=len(self._names))
        busy = self._work.sum(axis=0)
        lines = []
        for number, name in enumerate(self._names):
            doing = []
            if busy[number] > 0:
                doing.append(
                    f"{busy[number] / busy.sum():.0%} of the busy time: {self._part(number)}"
                )
            if updates[number]:
                doing.append(f"{updates[number]} of {updates.sum()} updates")
            if weights[number]:
                share = f"{show_bytes(weights[number])} of {show_bytes(weights.sum())}"
                doing.append(f"holds {share} of weights and states")
            peak = show_bytes(self.peak_memory[name])
            lines.append(f"{name}: {'; '.join([*doing, f'peak {peak}']) if doing else 'idle'}")
        return lines

    def _part(self, device: int) -> str:
        """The microbatches and modules that a device computes."""
        of_copy = self._work / np.maximum(self._work.sum(axis=1, keepdims=True), 1e-30)
        mine = of_copy[:, device]
        whole = np.flatnonzero(mine >= _WHOLE).tolist()
        some = np.flatnonzero((mine > _NONE) & (mine < _WHOLE)).tolist()
        parts = [f"{_numbered(whole)} whole"] if whole else []
        if some:
            parts.append(f"of {_numbered(some)} {self._modules(device, some)}")
        return ", ".join(parts) or "small parts"

    def _modules(self, device: int, copies: Sequence[int]) -> str:
        """The first and the last module whose forward a device computes."""
        graph = self.found.problem.graph
        here = (self._device == device) & (graph.phase == FORWARD)
        ops = np.flatnonzero(here & np.isin(self._copy, copies))
        in_order = ops[np.argsort(self.found.microbatched.origin[ops], kind="stable")].tolist()
        modules = list(dict.fromkeys(graph.modules[op] for op in in_order if graph.modules[op]))
        if not modules:
            return "some ops"
        return modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}"

    # ------------------------------------------------------------------ figures

    @property
    def _names(self) -> tuple[str, ...]:
        return self.found.problem.cluster.device_names

    @property
    def _device(self) -> Array:  # [ops]
        return self.found.problem.check(self.found.result.best.placement).device

    @property
    def _copy(self) -> Array:  # [ops]
        return self.found.microbatched.copy

    @property
    def _computes(self) -> Array:  # [ops] bool
        return np.isin(self.found.problem.graph.phase, (FORWARD, BACKWARD))

    @property
    def _work(self) -> Array:  # [copies, devices] seconds
        """Seconds of each copy on each device."""
        problem = self.found.problem
        ops = np.flatnonzero(self._computes & (self._copy != SHARED))
        device = self._device[ops]
        work = np.zeros((self.microbatches, len(self._names)))
        np.add.at(work, (self._copy[ops], device), problem.op_time[ops, device])
        return work

    def _bytes(self, ops: Array) -> Array:  # [devices]
        graph = self.found.problem.graph
        sizes = graph.output_bytes[ops].astype(float)
        return np.bincount(self._device[ops], sizes, minlength=len(self._names))


def _numbered(copies: Sequence[int]) -> str:
    """Microbatches in words, counted from 1: `microbatches 1, 3 to 5`."""
    runs: list[list[int]] = []
    for copy in copies:
        if runs and runs[-1][-1] == copy - 1:
            runs[-1].append(copy)
        else:
            runs.append([copy])
    texts = [str(run[0] + 1) if len(run) == 1 else f"{run[0] + 1} to {run[-1] + 1}" for run in runs]
    word = "microbatch" if len(copies) == 1 else "microbatches"
    return f"{word} {', '.join(texts)}"
