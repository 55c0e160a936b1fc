"""The pipelines and data-parallel placements that are nearest to a placed step of microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD
from roost.core.placement import Placement
from roost.core.timeline import Timeline
from roost.report.exports._schedules import GPIPE, ONE_F_ONE_B, slots
from roost.report.exports._unrolled import UnrolledStep
from roost.simulator.compiled import simulate
from roost.transforms.microbatch import SHARED


@dataclass(frozen=True, eq=False)
class Form:
    """One form that other tools can run, as a placement and its simulated step."""

    name: str  # such as "pipeline of 2 stages, 1F1B"
    placement: Placement
    step: Timeline

    def better_than(self, other: Form | None) -> bool:
        """Fitting before not fitting, then the shorter step."""
        if other is None:
            return True
        mine, its = self.step, other.step
        return (not mine.feasible, mine.step_time) < (not its.feasible, its.step_time)


def best_of(forms: list[Form]) -> Form:
    """The best of some forms."""
    best: Form | None = None
    for form in forms:
        if form.better_than(best):
            best = form
    assert best is not None
    return best


def chain_of(step: UnrolledStep) -> Array:  # [units] device
    """The stages that move the fewest seconds: devices in a row, each with neighbouring units."""
    place = np.arange(len(step.units))
    share = step.by_unit[:, step.computing]
    total = np.maximum(share.sum(axis=0), 1e-30)
    row = [step.computing[each] for each in np.argsort(place @ share / total, kind="stable")]
    away = step.by_unit.sum(axis=1, keepdims=True) - step.by_unit[:, row]  # [units, row] seconds
    cost = np.zeros(len(row))
    came: list[Array] = []
    for unit in range(len(step.units)):
        best = np.minimum.accumulate(cost)
        came.append(np.array([int(np.argmin(cost[: d + 1])) for d in range(len(row))]))
        cost = best + away[unit]
    at = int(np.argmin(cost))
    stages = []
    for before in reversed(came):
        stages.append(row[at])
        at = int(before[at])
    return np.array(stages[::-1])


def pipelined(step: UnrolledStep, stage_device: Array) -> Array:  # [ops] device
    """The device of each op where each unit [units] has one, with its weights and updates."""
    wanted = np.where(step.unit >= 0, stage_device[step.unit], -1)
    resident = step.problem.graph.is_parameter & (wanted < 0)
    wanted[resident] = step.placement.device[resident]
    return step.moved(wanted)


def pipeline(step: UnrolledStep, device: Array, row: list[int], schedule: str) -> Form:
    """A pipeline with the stages of `row` on their devices, in the order of a schedule."""
    begins = slots(schedule, len(row), step.count, step.trains)
    stage = {each: number for number, each in enumerate(row)}
    graph = step.problem.graph
    last = max(begins.values()) + 1.0
    time = np.zeros(graph.num_ops)
    inputs = graph.input_lists()
    for op in range(graph.num_ops):
        phase = int(graph.phase[op])
        work = (BACKWARD if phase == BACKWARD else FORWARD, int(step.copy[op]))
        if step.copy[op] == SHARED:
            time[op] = max((time[each] for each in inputs[op]), default=0.0)
        else:
            time[op] = begins.get((stage.get(int(device[op]), 0), work), last)
    made = step.with_devices(device, "priority", -time)
    names = "stage" if len(row) == 1 else "stages"
    named = f"pipeline of {len(row)} {names}, {schedule}"
    return Form(named, made, simulate(step.problem, made, full=True))


def nearest_pipeline(step: UnrolledStep) -> Form:
    """The best pipeline of the stages that are nearest to the placement."""
    stages = chain_of(step)
    device = pipelined(step, stages)
    row = list(dict.fromkeys(stages.tolist()))
    # Of equal steps 1F1B, which holds less memory.
    names = (ONE_F_ONE_B, GPIPE) if step.trains else (GPIPE,)
    return best_of([pipeline(step, device, row, name) for name in names])


def nearest_data_parallel(step: UnrolledStep) -> Form:
    """The best data-parallel step on the devices that the placement computes on.

    Weights, optimizer states and updates are spread over the devices. Each weight is fetched once a
    step where memory allows it, else for each use.
    """
    ranks = _ranks(step)
    device = _spread(step, ranks)
    graph = step.problem.graph
    weights = int(graph.output_bytes[graph.is_parameter].sum())
    name = f"data parallelism on {len(ranks)} devices"
    forms = []
    for order in ("rank", "program"):
        for window in (step.placement.prefetch_bytes, weights):
            made = step.problem.placement(device, order, prefetch_bytes=window)
            forms.append(Form(name, made, simulate(step.problem, made)))
    return best_of(forms)


def _ranks(step: UnrolledStep) -> list[int]:
    """The devices with most of the computing, as many as divide the microbatches."""
    row = step.computing
    count = max(n for n in range(1, len(row) + 1) if step.count % n == 0)
    order = np.argsort(-step.by_copy.sum(axis=0)[row], kind="stable")
    return sorted(np.array(row)[order[:count]].tolist())


def _spread(step: UnrolledStep, ranks: list[int]) -> Array:  # [ops] device
    """Neighbouring copies on each rank, and the state of modules where least state is."""
    graph = step.problem.graph
    rank_of = np.array([ranks[copy * len(ranks) // step.count] for copy in range(step.count)])
    wanted = np.where(step.copy >= 0, rank_of[step.copy], -1)
    units = np.where(step.unit >= 0, step.unit, len(step.units))
    size = np.bincount(units, np.where(graph.is_parameter, graph.output_bytes, 0))
    held = [0.0] * len(ranks)
    home: dict[int, int] = {}
    for unit in np.argsort(-size, kind="stable").tolist():
        least = int(np.argmin(held))
        home[unit] = ranks[least]
        held[least] += float(size[unit])
    for op in np.flatnonzero(step.copy == SHARED).tolist():
        near = {int(wanted[each]) for each in graph.inputs_of(op).tolist()}
        is_sum = graph.phase[op] == BACKWARD and len(near) == 1
        wanted[op] = near.pop() if is_sum else home[int(units[op])]
    return step.moved(wanted)
