"""The search for a plan: modules to whole devices, with room left for what the simulator does not
see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.core.units import show_bytes
from roost.errors import Infeasible
from roost.placers import Placer
from roost.plan.clusters import (
    STORE,
    hop_of,
    kept_longer,
    only_on,
    with_less,
    with_share,
    with_store,
)
from roost.plan.in_call_copies import at_once, loads_of, on_the_spot
from roost.plan.plan import Plan, simulated
from roost.search.evaluate import Progress
from roost.search.solve import solve
from roost.simulator.compiled import simulate
from roost.transforms.by_module import ByModule

if TYPE_CHECKING:
    from torch import nn

    from roost.frontends.tracing.captured_step import CapturedStep

log = logging.getLogger(__name__)

# What libraries take for themselves and the allocator rounds up, in no graph: with what ops hold
# while they run, and where that was measured without (PyTorch has cuBLAS keep 32 MiB on a Hopper
# GPU).
_WORKSPACE, _KEPT = 96 * 2**20, 40 * 2**20
_ATTEMPTS = 4  # at a plan that fits
_MARGIN = 0.01  # of the memory: what may differ from run to run


@dataclass(frozen=True)
class Correction:
    """What runs have shown."""

    # Bytes of the main device left free for what is not simulated; None: by rule.
    held: int | None = None
    too_few: int = 0  # with so many left free a run held more than there is
    slower: float = 1.0  # modules on the CPU, than their ops were timed
    hop: float = 0.0  # seconds more, for a tensor to go to the CPU and come back


class Relief(NamedTuple):
    """What is done where activations do not fit beside the weights that are on their way."""

    # Modules with little weight may leave the main device as well, so that their activations do.
    light: bool = False
    # Modules whose weights come in their calls, and not through a window.
    spots: tuple[str, ...] = ()


_NO_RELIEF = Relief()


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """All that a search for a plan is given."""

    model: nn.Module
    example_inputs: Any
    step: CapturedStep
    # [ops] bytes that ops hold for themselves on the main device; None: not known.
    spaces: Array | None
    cluster: Cluster  # with the memory that there is, or may be used
    capped: bool  # whether it is less than there is, on the main device
    main: str
    reserved: Mapping[str, int]  # bytes of devices that are for something else
    costs: Costs
    exact: bool
    few_rows: int
    placer: str | Placer
    seconds: float | None
    trials: int | None
    seed: int
    on_trial: Callable[[Progress], object] | None

    # ------------------------------------------------------------------ one search

    def plan(self, known: Correction = Correction(), relief: Relief = _NO_RELIEF) -> Plan:
        """What a search finds; raises `Infeasible` where it finds nothing that fits."""
        problem, main = self._problem(known, relief.light), self.cluster.index_of(self.main)
        # Of the host's memory for streamed weights, and as much for the others: it is one memory.
        share, less = 1.0, 0
        for _ in range(_ATTEMPTS):
            shared = with_share(problem, share)
            if less:
                shared = Problem(
                    shared.graph, with_less(shared.cluster, {self.main: less}), shared.costs
                )
            plan = self._searched(shared, relief)
            real = simulated(*plan.on_real_devices(), plan.modules)
            if real.feasible and plan.timeline.feasible:
                if self.exact:
                    _check_exact(plan, self.main)
                return plan
            # What one module needs together may be more than was counted, and both kinds of host
            # memory are one.
            over = int(plan.timeline.peak_memory[main]) - int(shared.cluster.memory[main])
            if over <= 0 and share < 1.0:
                break
            share, less = (share, less + over) if over > 0 else (0.5, less)
        worst = int(real.missing.argmax())
        raise Infeasible(
            f"nothing was found that fits: {real.device_names[worst]!r} lacks "
            f"{show_bytes(real.missing_bytes)}; give "
            "it more, or search longer",
            real.device_names[worst],
            real.missing_bytes,
        )

    def held(self, known: Correction) -> int:
        """Bytes of the main device that are left free for what the simulator does not see."""
        if known.held is not None:
            return known.held
        problem = Problem(self.step.graph, self.cluster, self.costs)
        workspace = _WORKSPACE if self.spaces is None else _KEPT
        return (workspace if self.main.startswith("cuda") else 0) + kept_longer(problem, self.main)

    @cached_property
    def _graph(self) -> Graph:
        """As captured, with what ops hold for themselves, and weights of a module that come
        together.

        Buffers are not brought, and have no home in memory alone.
        """
        graph = self.step.graph
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        real = tuple(dict.fromkeys(device.kind for device in self.cluster.devices))
        allowed = [
            real if name in buffers else kinds
            for name, kinds in zip(graph.op_names, graph.allowed, strict=True)
        ]
        space = 0 if self.spaces is None else self.spaces
        return at_once(
            replace(graph, allowed=tuple(allowed), workspace_bytes=graph.workspace_bytes + space)
        )

    def _problem(self, known: Correction, light: bool) -> Problem:
        where, graph = self.cluster, self._graph
        slower = [
            known.slower if one.kind == "cpu" and one.name != self.main else 1.0
            for one in where.devices
        ]
        costs = (
            Costs(self.costs.op_time * np.array(slower), self.costs.source)
            if max(slower) != 1.0
            else self.costs
        )
        if self.exact:
            costs = only_on(self.main, graph, where, costs)
        room = {**self.reserved, self.main: self.reserved.get(self.main, 0) + self.held(known)}
        problem = Problem(graph, with_less(where, room), costs)
        return with_store(problem, self.main, self._hop + known.hop, large=light)

    @cached_property
    def _hop(self) -> float:
        """Measured once: plans are compared by it."""
        return hop_of(self.main)

    def _searched(self, problem: Problem, relief: Relief) -> Plan:
        from roost.runtime.whole.rounding import by_modules

        tied = self.step.program.tied
        brought = on_the_spot(problem, self.main, relief.spots)
        whole = self._by_module(relief.light).apply(brought.graph)
        found = solve(
            whole.problem(brought), self.placer, self.seconds, self.trials, self.seed, self.on_trial
        )
        placement = replace(whole.expand(found.best.placement), graph=problem.graph.digest)
        modules, rounded = by_modules(
            problem, placement, self.model, tied, relief.light, relief.spots
        )
        # What left the main device for its activations has many rows, and is not to come back for
        # that.
        modules = replace(modules, few_rows=0 if relief.light else self.few_rows)
        timeline = simulated(problem, rounded, modules)
        return Plan(
            problem,
            found,
            modules,
            rounded,
            timeline,
            step=self.step,
            example_inputs=self.example_inputs,
        )

    def _by_module(self, light: bool = False) -> ByModule:
        kind = self.cluster.devices[self.cluster.index_of(self.main)].kind
        return ByModule(kind, tied=self.step.program.tied, light=light)

    def _all_away(self, problem: Problem) -> Array:  # [ops] devices
        """Everything on the main device, but weights that may come to it from the host's memory."""
        main, names = problem.cluster.index_of(self.main), problem.cluster.device_names
        if STORE not in names:
            return np.full(problem.graph.num_ops, main)
        whole = self._by_module().apply(problem.graph).problem(problem)
        free = (
            whole.graph.is_parameter
            & (whole.graph.group < 0)
            & whole.allowed[:, names.index(STORE)]
        )
        return np.where(free, names.index(STORE), main)

    # ------------------------------------------------------------------ the plan of several

    def fitting(self, tries: bool) -> tuple[Plan, Correction]:
        """The first plan that fits, with what is known. With `tries` what the rules leave free may
        shrink."""
        first: Infeasible | None = None
        for known in (Correction(), *([Correction(held=self.margin)] if tries else [])):
            try:
                return self.roomy(known), known
            except Infeasible as error:
                first = first or error
        assert first is not None
        raise self.with_what_is_enough(first)

    def with_what_is_enough(self, error: Infeasible) -> Infeasible:
        """The error with so much more for the main device that there surely is a plan."""
        least, have = self._least(), int(self.cluster.memory[self.cluster.index_of(self.main)])
        if least <= have:  # then it is something else
            return error
        return Infeasible(
            f"{error}; {least // 2**20:,} MiB of {self.main!r} are enough", self.main, least - have
        )

    def _least(self) -> int:
        """Bytes of the main device, in whole MiB, with which there is a plan: all weights come as
        they are needed."""
        problem = with_store(Problem(self._graph, self.cluster, self.costs), self.main, 0.0)
        names, graph = problem.cluster.device_names, problem.graph
        main, loads = names.index(self.main), loads_of(graph)
        hosts = [
            one.memory - self.reserved.get(one.name, 0)
            for one in self.cluster.devices
            if one.kind == "cpu"
        ]
        room = max([0, *hosts])
        found = []
        for spots in ((), tuple(loads)):
            brought = on_the_spot(problem, self.main, spots)
            size, away = brought.graph.output_bytes, self._all_away(brought)
            window = (
                0 if spots else max((int(size[own].sum()) for own in loads.values()), default=0)
            )
            peak = simulate(brought, brought.placement(away, prefetch_bytes=window)).peak_memory[
                main
            ]
            # What the host has no room for stays; weights are not divided.
            gone = size[away != main]
            left = int(gone.sum()) - room
            found.append(int(peak) + (left + int(gone.max()) if left > 0 else 0))
        least = min(found) + self.held(Correction()) + self.reserved.get(self.main, 0)
        return -(-least // 2**20) * 2**20

    def roomy(self, known: Correction) -> Plan:
        """The plan; where activations do not fit beside weights on their way, the fastest of
        several.

        Where they do and yet nothing is found, all weights may come in their calls, or light
        modules leave.
        """
        spots = self._spots(known)
        reliefs = [
            _NO_RELIEF,
            Relief(spots=spots or tuple(loads_of(self._graph))),
            Relief(light=True),
        ]
        if spots is None:
            del reliefs[1]  # they would not fit either
        found: list[Plan] = []
        first: Infeasible | None = None
        for relief in reliefs:
            try:
                found.append(self.plan(known, relief))
            except Infeasible as error:
                first = first or error
                log.info("%s", error)
            if found and relief == _NO_RELIEF and spots == ():
                break
        if not found:
            assert first is not None
            raise first
        if len(found) == 1:
            return found[0]
        # With links of the same kind for all: where light modules leave, what they send takes as
        # long as it takes.
        alike = self._problem(known, light=True)
        return min(found, key=lambda plan: simulated(alike, plan.placement, plan.modules).step_time)

    def _spots(self, known: Correction) -> tuple[str, ...] | None:
        """Modules whose weights must come in their calls for all activations to fit on the main
        device.

        As few as will do, the largest. None where that is not enough.
        """
        problem = self._problem(known, light=False)
        names = problem.cluster.device_names
        if STORE not in names:
            return ()
        size = {
            m: int(problem.graph.output_bytes[own].sum())
            for m, own in loads_of(problem.graph).items()
        }
        for largest in sorted({0, *size.values()}, reverse=True):
            spots = tuple(module for module in size if size[module] > largest)
            brought = on_the_spot(problem, self.main, spots)
            # Of the host's memory nothing is said: where it is too small for all weights, some stay
            # on the main device.
            away = brought.placement(self._all_away(brought), prefetch_bytes=largest)
            needed = simulate(brought, away).peak_memory
            if needed[names.index(self.main)] <= problem.cluster.memory[names.index(self.main)]:
                return spots
        return None

    @property
    def grows(self) -> bool:
        """Whether more is to come than the example shows: then a run of it does not say what is
        left free."""
        return bool(self.reserved.get(self.main, 0))

    @property
    def margin(self) -> int:
        """Bytes by which the memory in use may differ from run to run."""
        return int(_MARGIN * self.cluster.devices[self.cluster.index_of(self.main)].memory)

    @property
    def room(self) -> int:
        """Bytes of the main device that the model may use."""
        return int(self.cluster.memory[self.cluster.index_of(self.main)]) - self.reserved.get(
            self.main, 0
        )


def _check_exact(plan: Plan, main: str) -> None:
    """Raise `Infeasible` where something is computed elsewhere: to a search that is only very slow,
    no more."""
    graph, device = plan.problem.graph, plan.placement.device
    elsewhere = np.flatnonzero(
        ~graph.is_parameter & (device != plan.problem.cluster.index_of(main))
    )
    if len(elsewhere):
        op = int(elsewhere[0])
        raise Infeasible(
            f"nothing was found that fits and computes on {main!r} alone, as exact asks: "
            f"{graph.op_names[op]!r} would "
            f"run on {plan.problem.cluster.device_names[device[op]]!r}; give {main!r} more "
            f"memory, search longer or "
            "with placer='auto', or leave out exact",
            main,
        )
