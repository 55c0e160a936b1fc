"""The search for a plan: whole modules to devices, with memory left free that is not simulated.

`placing.place` makes a `PlanSearch`; `trial_runs` corrects it by runs of plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.core.units import show_bytes
from roost.errors import Infeasible
from roost.frontends.tracing.captured_step import CapturedStep
from roost.placers import Placer
from roost.plan.clusters import (
    LIBRARIES,
    STORE,
    held_longer,
    hop_of,
    only_on,
    with_less,
    with_share,
    with_store,
)
from roost.plan.in_call_copies import at_once, copied_in_calls, loads_of
from roost.plan.plan import Plan, simulated
from roost.runtime.whole.rounding import by_modules
from roost.search.evaluate import Progress
from roost.search.solve import solve
from roost.simulator.compiled import simulate
from roost.transforms.by_module import ByModule

log = logging.getLogger(__name__)

# As LIBRARIES, where the workspace of ops was measured.
_MEASURED = 40 * 2**20
_ATTEMPTS = 4  # at a plan that fits
_MARGIN = 0.01  # of the memory: the use of two runs differs by so much


@dataclass(frozen=True)
class Correction:
    """Corrections of the simulation, which runs of plans have shown."""

    spare: int | None = None  # bytes to leave free on the main device; None: by rule
    too_little: int = 0  # with so many bytes left free a run did not fit
    slowdown: float = 1.0  # of modules on the CPU, compared with their timed ops
    hop: float = 0.0  # seconds more for a tensor to go to the CPU and come back


class Relief(NamedTuple):
    """Measures for activations that do not fit beside the weights on their way."""

    light: bool = False  # modules with little weight may leave the main device as well
    in_calls: tuple[str, ...] = ()  # modules whose weights are copied in their calls


class SearchSettings(NamedTuple):
    """The arguments of `solve` for one search, after the problem."""

    placer: str | Placer
    seconds: float | None
    trials: int | None
    seed: int
    on_trial: Callable[[Progress], object] | None


_NO_RELIEF = Relief()


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """A model, a machine and settings, from which plans are searched."""

    model: nn.Module
    example_inputs: Any
    step: CapturedStep
    workspace: Array | None  # [ops] bytes, measured on the main device; None: not measured
    cluster: Cluster  # with the memory that may be used
    capped: bool  # the main device has more memory than may be used
    main: str
    reserved: Mapping[str, int]  # bytes of devices that are for something else
    costs: Costs
    exact: bool
    few_rows: int
    settings: SearchSettings

    # ------------------------------------------------------------------ one search

    def plan(self, known: Correction = Correction(), relief: Relief = _NO_RELIEF) -> Plan:
        """Search for a plan; raise `Infeasible` if none is found that fits."""
        problem = self._problem(known, relief.light)
        main = self._main
        # The CPU and streamed weights have the same memory. At first each may use all of it.
        share = 1.0
        less = 0
        for _ in range(_ATTEMPTS):
            shared = with_share(problem, share)
            if less:
                smaller = with_less(shared.cluster, {self.main: less})
                shared = Problem(shared.graph, smaller, shared.costs)
            plan = self._searched(shared, relief)
            real = simulated(*plan.on_real_devices(), plan.modules)
            if real.feasible and plan.timeline.feasible:
                if self.exact:
                    _check_exact(plan, self.main)
                return plan
            # The weights of one module may need more than was counted, or host memory overflows.
            over = int(plan.timeline.peak_memory[main]) - int(shared.cluster.memory[main])
            if over > 0:
                less += over
            elif share < 1.0:
                break
            else:
                share = 0.5
        name = real.device_names[int(real.missing.argmax())]
        lacking = real.missing_bytes
        raise Infeasible(
            f"found no plan that fits: the best one needs {show_bytes(lacking)} more than "
            f"{name!r} has; give it more memory, or search longer",
            name,
            lacking,
        )

    def spare(self, known: Correction) -> int:
        """Bytes to leave free on the main device, for memory that is not simulated."""
        if known.spare is not None:
            return known.spare
        late = held_longer(Problem(self.step.graph, self.cluster, self.costs), self.main)
        if not self.main.startswith("cuda"):
            return late
        return late + (LIBRARIES if self.workspace is None else _MEASURED)

    @property
    def _main(self) -> int:
        return self.cluster.index_of(self.main)

    @cached_property
    def _graph(self) -> Graph:
        """The captured graph, with measured workspaces, and a module's weights brought at once.

        Buffers are not streamed, so they cannot live in host memory alone.
        """
        graph = self.step.graph
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        real = tuple(dict.fromkeys(device.kind for device in self.cluster.devices))
        allowed = tuple(
            real if name in buffers else kinds
            for name, kinds in zip(graph.op_names, graph.allowed, strict=True)
        )
        workspace = graph.workspace_bytes + (0 if self.workspace is None else self.workspace)
        return at_once(replace(graph, allowed=allowed, workspace_bytes=workspace))

    def _problem(self, known: Correction, light: bool) -> Problem:
        cluster = self.cluster
        graph = self._graph
        costs = self.costs
        if known.slowdown > 1.0:
            slower = [
                known.slowdown if device.kind == "cpu" and device.name != self.main else 1.0
                for device in cluster.devices
            ]
            costs = Costs(costs.op_time * np.array(slower), costs.source)
        if self.exact:
            costs = only_on(self.main, graph, cluster, costs)
        room = {**self.reserved, self.main: self._reserved_on_main + self.spare(known)}
        problem = Problem(graph, with_less(cluster, room), costs)
        return with_store(problem, self.main, self._hop + known.hop, large=light)

    @cached_property
    def _hop(self) -> float:
        """Seconds of a hop, measured once: plans are compared by it."""
        return hop_of(self.main)

    def _searched(self, problem: Problem, relief: Relief) -> Plan:
        copied = copied_in_calls(problem, self.main, relief.in_calls)
        whole = self._by_module(relief.light).apply(copied.graph)
        result = solve(whole.problem(copied), *self.settings)
        placement = replace(whole.expand(result.best.placement), graph=problem.graph.digest)
        modules, rounded = by_modules(
            problem, placement, self.model, self.step.program.tied, relief.light, relief.in_calls
        )
        # A light module left for its activations, which have many rows: it is not to come back for
        # calls with many rows.
        modules = replace(modules, few_rows=0 if relief.light else self.few_rows)
        timeline = simulated(problem, rounded, modules)
        return Plan(
            problem,
            result,
            modules,
            rounded,
            timeline,
            step=self.step,
            example_inputs=self.example_inputs,
        )

    def _by_module(self, light: bool = False) -> ByModule:
        kind = self.cluster.devices[self._main].kind
        return ByModule(kind, tied=self.step.program.tied, light=light)

    def _all_streamed(self, problem: Problem) -> Array:  # [ops] devices
        """Put all on the main device, and into host memory the weights that may come from there."""
        main = problem.cluster.index_of(self.main)
        names = problem.cluster.device_names
        if STORE not in names:
            return np.full(problem.graph.num_ops, main)
        store = names.index(STORE)
        whole = self._by_module().apply(problem.graph).problem(problem)
        free = whole.graph.is_parameter & (whole.graph.group < 0) & whole.allowed[:, store]
        return np.where(free, store, main)

    # ------------------------------------------------------------------ several searches

    def first_plan(self, may_run: bool) -> tuple[Plan, Correction]:
        """Give the first plan that fits, with its correction.

        `may_run`: runs can show that less spare memory than by rule is enough.
        """
        corrections = [Correction(), Correction(spare=self.margin)]
        first: Infeasible | None = None
        for known in corrections if may_run else corrections[:1]:
            try:
                return self.fastest(known), known
            except Infeasible as error:
                first = first or error
        assert first is not None
        raise self.with_enough(first)

    def with_enough(self, error: Infeasible) -> Infeasible:
        """Add to the error how much memory of the main device is surely enough."""
        enough = self._enough()
        have = int(self.cluster.memory[self._main])
        if enough <= have:  # then something else is missing
            return error
        return Infeasible(
            f"{error}; {enough // 2**20:,} MiB of {self.main!r} are enough",
            self.main,
            enough - have,
        )

    def _enough(self) -> int:
        """Bytes of the main device, in whole MiB, with which there is a plan: all weights come."""
        problem = with_store(Problem(self._graph, self.cluster, self.costs), self.main, 0.0)
        main = problem.cluster.index_of(self.main)
        loads = loads_of(problem.graph)
        room = max(
            device.memory - self.reserved.get(device.name, 0) if device.kind == "cpu" else 0
            for device in self.cluster.devices
        )
        peaks = []
        for in_calls in ((), tuple(loads)):
            copied = copied_in_calls(problem, self.main, in_calls)
            size = copied.graph.output_bytes
            device = self._all_streamed(copied)
            window = 0
            if not in_calls:
                window = max((int(size[own].sum()) for own in loads.values()), default=0)
            placement = copied.placement(device, prefetch_bytes=window)
            peak = int(simulate(copied, placement).peak_memory[main])
            # Weights that the host has no room for stay; a weight is not divided.
            away = size[device != main]
            left = int(away.sum()) - max(0, room)
            peaks.append(peak + (left + int(away.max()) if left > 0 else 0))
        least = min(peaks) + self.spare(Correction()) + self._reserved_on_main
        return -(-least // 2**20) * 2**20

    def fastest(self, known: Correction) -> Plan:
        """Give the plan, the fastest of several if activations do not fit beside streamed weights.

        If they fit and yet no plan is found: all weights copied in their calls, or light modules
        elsewhere.
        """
        in_calls = self._in_calls(known)
        reliefs = [_NO_RELIEF, Relief(light=True)]
        if in_calls is not None:  # else even all weights in their calls would not fit
            reliefs.insert(1, Relief(in_calls=in_calls or tuple(loads_of(self._graph))))
        plans: list[Plan] = []
        first: Infeasible | None = None
        for relief in reliefs:
            try:
                plans.append(self.plan(known, relief))
            except Infeasible as error:
                first = first or error
                log.info("%s", error)
            if plans and relief == _NO_RELIEF and in_calls == ():
                break
        if not plans:
            assert first is not None
            raise first
        if len(plans) == 1:
            return plans[0]
        # Compared with the same links: where light modules leave, large outputs take their time.
        alike = self._problem(known, light=True)
        return min(plans, key=lambda plan: simulated(alike, plan.placement, plan.modules).step_time)

    def _in_calls(self, known: Correction) -> tuple[str, ...] | None:
        """Give the modules whose weights must be copied in their calls for activations to fit.

        The largest, as few as will do. None: not even all of them are enough.
        """
        problem = self._problem(known, light=False)
        if STORE not in problem.cluster.device_names:
            return ()
        main = problem.cluster.index_of(self.main)
        size = {
            module: int(problem.graph.output_bytes[own].sum())
            for module, own in loads_of(problem.graph).items()
        }
        for largest in sorted({0, *size.values()}, reverse=True):
            in_calls = tuple(module for module in size if size[module] > largest)
            copied = copied_in_calls(problem, self.main, in_calls)
            # Host memory is not checked: if it is too small for all weights, some stay.
            placement = copied.placement(self._all_streamed(copied), prefetch_bytes=largest)
            if simulate(copied, placement).peak_memory[main] <= problem.cluster.memory[main]:
                return in_calls
        return None

    @property
    def _reserved_on_main(self) -> int:
        return self.reserved.get(self.main, 0)

    @property
    def will_grow(self) -> bool:
        """More memory will be used than the example shows: a run does not tell what stays free."""
        return bool(self._reserved_on_main)

    @property
    def margin(self) -> int:
        """Bytes by which the memory in use may differ from run to run."""
        return int(_MARGIN * self.cluster.devices[self._main].memory)

    @property
    def room(self) -> int:
        """Bytes of the main device that the model may use."""
        return int(self.cluster.memory[self._main]) - self._reserved_on_main


def _check_exact(plan: Plan, main: str) -> None:
    """Raise `Infeasible` if an op runs elsewhere: to the search that is only very slow."""
    graph = plan.problem.graph
    device = plan.placement.device
    elsewhere = ~graph.is_parameter & (device != plan.problem.cluster.index_of(main))
    if not elsewhere.any():
        return
    op = int(elsewhere.argmax())
    other = plan.problem.cluster.device_names[device[op]]
    raise Infeasible(
        f"found no plan that fits and computes on {main!r} alone, as exact asks: "
        f"{graph.op_names[op]!r} would run on {other!r}; give {main!r} more memory, search longer "
        f"or with placer='auto', or leave out exact",
        main,
    )
