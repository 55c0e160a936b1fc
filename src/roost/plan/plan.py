"""A plan: what was decided for a model, what that is expected to take, and how it is applied."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import Result
from roost.core.units import show_bytes, show_seconds
from roost.errors import InputError
from roost.plan.clusters import without_store
from roost.plan.in_call_copies import on_the_spot
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

    from roost.frontends.tracing.captured_step import CapturedStep
    from roost.report.exports import DeviceMap
    from roost.runtime.ops.verify import Verification
    from roost.runtime.whole.module_placement import ModulePlacement


def simulated(problem: Problem, placement: Placement, modules: ModulePlacement) -> Timeline:
    """What a placement takes with weights brought as the modules have it."""
    there = on_the_spot(problem, modules.main, modules.on_the_spot)
    return simulate(there, replace(placement, graph=there.graph.digest))


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Where each module of a model runs and where its weights live, and what that is expected to
    take."""

    # Of the graph as captured; the memory from which weights are streamed is a device in it.
    problem: Problem
    result: Result  # of the search, in which a module is one group
    modules: ModulePlacement
    placement: Placement  # the same, op by op
    timeline: Timeline  # simulated
    # Seconds of a step when it was tried on the model; None where it was not.
    measured: float | None = None
    # What it was made from, and a file does not have.
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
        """Place the model: the same object, for inference, with `generate` and all."""
        from roost.runtime.whole.apply import apply

        return apply(model, self.modules)

    def remove(self, model: nn.Module) -> nn.Module:
        """Take the placement off again."""
        from roost.runtime.whole.apply import remove

        return remove(model)

    def verify(
        self, model: nn.Module, inputs: Any = None, tolerance: float | None = None
    ) -> Verification:
        """Whether the placed model gives what it gives unplaced: outputs, buffers, tied weights. It
        is left as it was.

        `inputs` are those that the plan was made with where none are given; a plan from a file has
        none.
        """
        from roost.runtime.whole.verify import verify_modules

        given = self.example_inputs if inputs is None else inputs
        if given is None:
            raise InputError(
                "a plan from a file has no inputs to call the model with; give some: "
                "verify(model, inputs)"
            )
        return verify_modules(model, self.modules, given, tolerance=tolerance)

    def device_map(self, model: nn.Module | None = None) -> DeviceMap:
        """The nearest that accelerate can express, and what that costs: it streams nothing
        ahead."""
        from roost.report.exports import device_map

        if model is not None:
            from roost.runtime.whole.module_placement import check_signature

            check_signature(model, self.modules)
        problem, placement = self.on_real_devices()
        return device_map(model, problem, placement)

    def on_real_devices(self) -> tuple[Problem, Placement]:
        """Problem and placement without the device that memory is: as files have them, and exports
        take them."""
        return without_store(self.problem, self.placement)

    def save(self, path: str | Path) -> None:
        """Write `plan.json`, compressed where the name ends in `.gz`; `roost.load` reads it, for
        the same model."""
        from roost.core import formats
        from roost.plan import files  # noqa: F401  it registers the format

        formats.save(self, path)

    def __repr__(self) -> str:
        return (
            f"Plan({self.problem.graph.name!r} on {self.problem.cluster.name!r}: "
            f"{show_seconds(self.step_time)} a step)"
        )

    def __str__(self) -> str:
        """What a person wants to know before running it."""
        main, weights = self.modules.main, self._weights()
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
        # Else what was proved is of weights that come so.
        if self.result.bound and not self.modules.on_the_spot:
            bound = f", at least {show_seconds(self.result.bound.step_time)} whatever the placement"
        measured = f"{show_seconds(self.measured)} measured, " if self.measured is not None else ""
        lines.append(f"step: {measured}{show_seconds(self.step_time)} expected{bound}")
        lines.append(f"memory: {peak}")
        return "\n".join(lines)

    def _weights(self) -> dict[str, int]:
        """Bytes of weights by what is done with them."""
        graph, names = self.problem.graph, self.problem.cluster.device_names
        streamed = {name for brought in self.modules.streamed.values() for name in brought}
        in_calls = {
            name for module in self.modules.on_the_spot for name in self.modules.streamed[module]
        }
        found: Counter[str] = Counter()
        for op in np.flatnonzero(graph.is_parameter & (np.diff(graph.consumer_start) > 0)).tolist():
            home = names[self.placement.device[op]]
            if home == self.modules.main:
                kind = f"kept on {home}"
            elif graph.op_names[op] in in_calls:
                kind = f"copied from {home} in each call"
            elif graph.op_names[op] in streamed:
                kind = f"streamed from {home} to {self.modules.main}"
            elif self.problem.cluster.devices[self.placement.device[op]].kind == "cpu":
                kind = f"used where they lie, on {home}"
            else:
                kind = f"kept on {home}"
            found[kind] += int(graph.output_bytes[op])
        return dict(sorted(found.items()))
