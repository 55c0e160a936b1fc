"""A plan: where the modules of a model run, what that is expected to cost, and how to apply it.

`roost.place` makes it; `files.py` has its file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from roost.core import formats
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import Result
from roost.core.units import show_bytes, show_seconds
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.plan.clusters import without_store
from roost.plan.in_call_copies import copied_in_calls
from roost.report.exports import DeviceMap, device_map
from roost.runtime.step.differences import Verification
from roost.runtime.whole import apply as runtime
from roost.runtime.whole.module_placement import ModulePlacement, check_signature
from roost.runtime.whole.verify import verify_modules
from roost.simulator.compiled import simulate


def simulated(problem: Problem, placement: Placement, modules: ModulePlacement) -> Timeline:
    """Simulate a placement whose weights are brought as the modules say."""
    copied = copied_in_calls(problem, modules.main, modules.on_the_spot)
    return simulate(copied, replace(placement, graph=copied.graph.digest))


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The place of each module and its weights on one machine, and the expected step time."""

    problem: Problem  # of the captured graph; host memory, which weights come from, is a device
    result: Result  # of the search, in which a module is one group
    modules: ModulePlacement
    placement: Placement  # the same, op by op
    timeline: Timeline  # simulated
    measured: float | None = None  # seconds of a step in a trial run on the model
    # A plan from a file has neither of these.
    step: CapturedStep | None = None
    example_inputs: Any = None

    @property
    def step_time(self) -> float:
        """Seconds that a step is expected to take."""
        return self.timeline.step_time

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that a step brings to the main device."""
        graph = self.problem.graph
        size = dict(zip(graph.op_names, graph.output_bytes.tolist(), strict=True))
        return sum(size.get(name, 0) for names in self.modules.streamed.values() for name in names)

    def apply(self, model: nn.Module) -> nn.Module:
        """Place the model for inference, `generate` included; it is the same object."""
        return runtime.apply(model, self.modules)

    def remove(self, model: nn.Module) -> nn.Module:
        """Take the placement off again."""
        return runtime.remove(model)

    def verify(
        self, model: nn.Module, inputs: Any = None, tolerance: float | None = None
    ) -> Verification:
        """Compare the placed with the unplaced model: outputs, buffers and tied weights.

        The model stays as it is. `inputs`: default: those that the plan was made with.
        """
        given = self.example_inputs if inputs is None else inputs
        if given is None:
            raise InputError(
                "a plan from a file has no inputs to call the model with; give some: "
                "verify(model, inputs)"
            )
        return verify_modules(model, self.modules, given, tolerance=tolerance)

    def device_map(self, model: nn.Module | None = None) -> DeviceMap:
        """Give the nearest map for accelerate, and its cost: it streams nothing ahead."""
        if model is not None:
            check_signature(model, self.modules)
        return device_map(model, *self.on_real_devices())

    def on_real_devices(self) -> tuple[Problem, Placement]:
        """Give problem and placement without host memory as a device, for files and exports."""
        return without_store(self.problem, self.placement)

    def save(self, path: str | Path) -> None:
        """Write `plan.json`, or `plan.json.gz`; `roost.load` reads it, for the same model."""
        formats.save(self, path)

    def __repr__(self) -> str:
        return (
            f"Plan({self.problem.graph.name!r} on {self.problem.cluster.name!r}: "
            f"{show_seconds(self.step_time)} a step)"
        )

    def __str__(self) -> str:
        """Tell where the weights are, the step time and the memory, for people."""
        main = self.modules.main
        weights = self._weights()
        total = max(1, sum(weights.values()))
        lines = [
            f"{kind:36} {show_bytes(size):>10} of weights, {size / total:4.0%}"
            for kind, size in weights.items()
            if size
        ]
        if not self.modules.streamed and not self.modules.runs_on:
            lines.append(f"one device is best: everything runs on {main}")
        if len(self.modules.streamed) > len(self.modules.on_the_spot):
            lines.append(
                f"{'window for weights on their way':36} {show_bytes(self.modules.window):>10} on "
                f"{main}"
            )
        real = simulated(*self.on_real_devices(), self.modules)
        sizes = zip(real.device_names, real.peak_memory.tolist(), strict=True)
        peak = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes if size)
        bound = ""
        # With copies in calls the proof is of another problem.
        if self.result.bound and not self.modules.on_the_spot:
            bound = f", at least {show_seconds(self.result.bound.step_time)} whatever the placement"
        measured = f"{show_seconds(self.measured)} measured, " if self.measured is not None else ""
        lines.append(f"step: {measured}{show_seconds(self.step_time)} expected{bound}")
        lines.append(f"memory: {peak}")
        return "\n".join(lines)

    def _weights(self) -> dict[str, int]:
        """Bytes of weights by their use: kept, streamed, copied in calls or used where they lie."""
        graph = self.problem.graph
        names = self.problem.cluster.device_names
        streamed = {name for brought in self.modules.streamed.values() for name in brought}
        in_calls = {
            name for module in self.modules.on_the_spot for name in self.modules.streamed[module]
        }
        sizes: Counter[str] = Counter()
        used = graph.is_parameter & (np.diff(graph.consumer_start) > 0)
        for op in np.flatnonzero(used).tolist():
            device = self.placement.device[op]
            home = names[device]
            name = graph.op_names[op]
            if home != self.modules.main and name in in_calls:
                kind = f"copied from {home} in each call"
            elif home != self.modules.main and name in streamed:
                kind = f"streamed from {home} to {self.modules.main}"
            elif home != self.modules.main and self.problem.cluster.devices[device].kind == "cpu":
                kind = f"used where they lie, on {home}"
            else:
                kind = f"kept on {home}"
            sizes[kind] += int(graph.output_bytes[op])
        return dict(sorted(sizes.items()))
