"""A pipeline for `torch.distributed.pipelining`, or data parallelism, from an unrolled step.

A placement is a plain pipeline if all copies of a module run on one device, and the modules go from
device to device in the order of the model. With several stages on each device it is interleaved. It
is plain data parallelism if each copy runs on one device, with as many copies on each. Up to a
fiftieth of the computing is rounded to that. Any other placement is refused: the error names what
is mixed, and simulates the nearest pipeline and the nearest data-parallel step.

`step_time` is that of the rounded placement in the order of its schedule. Other tools add costs of
their own, and data parallelism sums gradients in a ring, not at homes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.units import show_seconds
from roost.errors import InputError
from roost.report.exports._export import TimedExport
from roost.report.exports._nearest import (
    Form,
    nearest_data_parallel,
    nearest_pipeline,
    pipeline,
    pipelined,
)
from roost.report.exports._schedules import (
    BREADTH_FIRST,
    INTERLEAVED,
    ONE_F_ONE_B,
    in_flight,
    schedule_of,
)
from roost.report.exports._unrolled import MINOR, UnrolledStep
from roost.report.exports.split_spec import begins
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "one device"


@dataclass(frozen=True)
class Microbatches(TimedExport):
    """The settings of a pipeline or of data parallelism, and the distance from the placement."""

    form: str
    devices: tuple[str, ...]  # of the stages of a pipeline, in order; else of the ranks
    count: int  # microbatches
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> Microbatches:
        return microbatches(model, problem, placement)

    def text(self) -> str:
        return json.dumps(self._content(), indent=2) + "\n"

    def facts(self) -> dict[str, Any]:
        return self._content() | self.time_facts()

    def _content(self) -> dict[str, Any]:
        named = {"form": self.form, "devices": list(self.devices), "microbatches": self.count}
        notes = {"notes": list(self.notes)} if self.notes else {}
        return named | dict(self.settings) | notes

    def __str__(self) -> str:
        where = ", ".join(self.devices)
        if self.form == PIPELINE:
            said = f"a pipeline on {where}: {self.settings['schedule']}"
        elif self.form == DATA_PARALLEL:
            said = f"use {self.settings['use']} with {len(self.devices)} ranks, on {where}"
        else:
            said = f"everything runs on {where}: there is nothing to distribute"
        said += (
            f"; {self.count} microbatches, {show_seconds(self.step_time)} a step expected, "
            f"{self.cost:.2f} times the placement's"
        )
        return "; ".join([said, *self.notes])


def microbatches(model: nn.Module | None, problem: Problem, placement: Placement) -> Microbatches:
    """The pipeline or the data parallelism that a placement of an unrolled step is.

    Raises InputError for any other placement, with the cost of the nearest of both.
    """
    step = UnrolledStep.of(model, problem, placement)
    if len(step.computing) == 1:
        return _one_device(step)
    busiest = step.busiest
    not_pipeline = _why_no_pipeline(step, busiest)
    if not not_pipeline:
        return _pipeline(step, busiest)
    not_parallel = _why_no_data_parallelism(step)
    if not not_parallel:
        return _data_parallel(step)
    raise InputError(_mixture(step, not_pipeline, not_parallel))


def _one_device(step: UnrolledStep) -> Microbatches:
    time = simulate(step.problem, step.placement).step_time
    graph = step.problem.graph
    names = step.problem.cluster.device_names
    here = step.computing[0]
    residents = graph.is_parameter
    size = float(graph.output_bytes[residents].sum())
    away = float(graph.output_bytes[residents & (step.placement.device != here)].sum())
    if away > MINOR * size:
        raise InputError(
            f"everything is computed on {names[here]}, but {away / size:.0%} of the weights and "
            "optimizer states live on other devices, which no form here says; run the placement "
            "with roost.trainer, or with roost run"
        )
    settings = {"accumulate": step.count}
    own = (names[here],)
    return Microbatches(_agreement(step.by_copy), time, time, ONE_DEVICE, own, step.count, settings)


def _agreement(seconds: Array) -> float:  # [rows, devices]
    """The share of the seconds that are on the busiest device of their row."""
    total = float(seconds.sum())
    return float(seconds.max(axis=1).sum()) / total if total > 0 else 1.0


def _why_no_pipeline(step: UnrolledStep, busiest: Array) -> str:
    """The reason why a step is no plain pipeline; empty if it is one."""
    names = step.problem.cluster.device_names
    if _agreement(step.by_unit) < 1 - MINOR:
        unit = int((step.by_unit.sum(axis=1) - step.by_unit.max(axis=1)).argmax())
        return f"module {step.units[unit]!r} runs on {_shares(step.by_unit[unit], names)}"
    row = _row(step, busiest)
    ranks = list(dict.fromkeys(row))
    if [*ranks] * (len(row) // len(ranks)) != row:
        shown = ", ".join(names[each] for each in row)
        return f"its modules go over {shown} in turn, which is no round of the same devices"
    if len(ranks) > 1 and any(later < earlier for earlier, later in _repeats(step, busiest)):
        return "a module is called again after modules of other stages"
    size, away = _weights_away(step, busiest)
    if away > MINOR * size:
        return f"{away / size:.0%} of the weights live on other devices than their modules"
    return ""


def _row(step: UnrolledStep, busiest: Array) -> list[int]:
    """The devices of the stages, in order."""
    devices = busiest.tolist()
    return [devices[0], *(later for earlier, later in pairwise(devices) if later != earlier)]


def _stages(step: UnrolledStep, busiest: Array) -> Array:  # [units]
    changed = np.diff(busiest) != 0
    return np.concatenate([[0], np.cumsum(changed)])


def _repeats(step: UnrolledStep, busiest: Array) -> list[tuple[int, int]]:
    """The stages of neighbouring calls."""
    stage = _stages(step, busiest)
    return [(int(stage[one]), int(stage[other])) for one, other in pairwise(step.calls)]


def _weights_away(step: UnrolledStep, busiest: Array) -> tuple[float, float]:
    """Bytes of the weights and optimizer states of modules, and of those on other devices."""
    graph = step.problem.graph
    residents = np.flatnonzero(graph.is_parameter & (step.unit >= 0))
    size = graph.output_bytes[residents]
    away = step.placement.device[residents] != busiest[step.unit[residents]]
    return float(size.sum()), float(size[away].sum())


def _pipeline(step: UnrolledStep, busiest: Array) -> Microbatches:
    row = _row(step, busiest)
    ranks = list(dict.fromkeys(row))
    chunks = len(row) // len(ranks)
    placed = simulate(step.problem, step.placement, full=True)
    held = in_flight(placed, ranks, step.copy, step.problem.graph.phase)
    schedule = schedule_of(held, step.count, step.trains, chunks)
    settings = {
        "schedule": schedule,
        "stages_per_device": chunks,
        "under_way": held,
        "split_spec": _points(step, busiest),
    }
    return Microbatches(
        agreement=_agreement(step.by_unit),
        step_time=_pipelined_time(step, busiest, row, schedule),
        placed_time=placed.step_time,
        form=PIPELINE,
        devices=tuple(step.problem.cluster.device_names[each] for each in row),
        count=step.count,
        settings=settings,
        notes=(*_notes(schedule, held, step.count), *_tied(step, busiest)),
    )


def _pipelined_time(step: UnrolledStep, busiest: Array, row: list[int], schedule: str) -> float:
    """Seconds of the rounded step: in the order of the schedule, or in its own if interleaved."""
    device = pipelined(step, busiest)
    if len(set(row)) == len(row):
        return pipeline(step, device, row, schedule).step.step_time
    own = step.placement
    rounded = step.with_devices(device, own.order, own.priority)
    return simulate(step.problem, rounded).step_time


def _notes(schedule: str, held: list[int], count: int) -> list[str]:
    """Differences between the placement's order and that of its schedule."""
    if schedule in (INTERLEAVED, BREADTH_FIRST):
        return ["the step is simulated in the placement's own order"]
    least = [min(count, len(held) - stage) for stage in range(len(held))]
    if schedule == ONE_F_ONE_B and any(a > b for a, b in zip(held, least, strict=True)):
        had = f"the placement has {_listed(held)} microbatches under way"
        return [f"{had}, {schedule} has {_listed(least)}"]
    return []


def _points(step: UnrolledStep, busiest: Array) -> dict[str, str]:
    """The module before which each stage begins."""
    stage = _stages(step, busiest)
    firsts = [unit for unit in range(1, len(stage)) if stage[unit] != stage[unit - 1]]
    return {begins(step.units[unit], list(step.units[:unit])): "BEGINNING" for unit in firsts}


def _tied(step: UnrolledStep, busiest: Array) -> list[str]:
    """A note for each weight that several stages read."""
    graph = step.problem.graph
    stage = _stages(step, busiest)
    notes = []
    for op in np.flatnonzero(graph.is_parameter).tolist():
        readers = step.unit[graph.consumers_of(op)]
        on = sorted({int(stage[unit]) for unit in readers.tolist() if unit >= 0})
        if len(on) > 1:
            notes.append(
                f"weight {graph.op_names[op]!r} is used in stages {_listed([s + 1 for s in on])}: "
                "each needs a copy, and their gradients must be added up by hand"
            )
    return notes


def _why_no_data_parallelism(step: UnrolledStep) -> str:
    """The reason why a step is no plain data parallelism; empty if it is."""
    names = step.problem.cluster.device_names
    if _agreement(step.by_copy) < 1 - MINOR:
        copy = int((step.by_copy.sum(axis=1) - step.by_copy.max(axis=1)).argmax())
        return f"microbatch {copy} runs on {_shares(step.by_copy[copy], names)}"
    on, counts = np.unique(step.by_copy.argmax(axis=1), return_counts=True)
    if len(set(counts.tolist())) > 1:
        shares = [f"{many} on {names[d]}" for d, many in zip(on, counts.tolist(), strict=True)]
        return f"devices have unlike numbers of microbatches: {', '.join(shares)}"
    return ""


def _data_parallel(step: UnrolledStep) -> Microbatches:
    problem = step.problem
    of_copy = step.by_copy.argmax(axis=1)
    ranks = np.unique(of_copy).tolist()
    wanted = np.where(step.copy >= 0, of_copy[step.copy], step.placement.device)
    own = step.placement
    rounded = step.with_devices(step.moved(wanted), own.order, own.priority)
    placed = simulate(problem, own)
    state, fits = _state(step, ranks, placed.peak_memory)
    use = "FSDP" if state == "sharded" or not fits else "DDP"
    if not step.trains:
        use = "a whole model" if fits else "FSDP"
    settings = {
        "use": use,
        "ranks": len(ranks),
        "accumulate": step.count // len(ranks),
        "state": state,
    }
    return Microbatches(
        agreement=_agreement(step.by_copy),
        step_time=simulate(problem, rounded).step_time,
        placed_time=placed.step_time,
        form=DATA_PARALLEL,
        devices=tuple(problem.cluster.device_names[each] for each in ranks),
        count=step.count,
        settings=settings,
    )


def _state(step: UnrolledStep, ranks: list[int], peak: Array) -> tuple[str, bool]:
    """Where weights and optimizer states live, and true if each rank has room for all of them."""
    home = step.home_bytes
    total = home.sum()
    fits = bool((peak - home + total <= step.problem.cluster.memory)[ranks].all())
    most = int(home.argmax())
    if home[most] >= (1 - MINOR) * total:
        return f"at one home, {step.problem.cluster.device_names[most]}", fits
    away = total - home[ranks].sum()
    return ("sharded" if away <= MINOR * total else "partly on other devices"), fits


def _mixture(step: UnrolledStep, not_pipeline: str, not_parallel: str) -> str:
    """The words for a placement that is neither, and the cost of the nearest of both."""
    placed = simulate(step.problem, step.placement).step_time

    def cost(form: Form) -> str:
        lacks = "" if form.step.feasible else ", and does not fit"
        return (
            f"the nearest {form.name} takes {form.step.step_time / placed:.2f} times as long{lacks}"
        )

    return (
        f"this placement is no plain pipeline: {not_pipeline}. It is no plain data parallelism: "
        f"{not_parallel}. As simulated, {cost(nearest_pipeline(step))}; "
        f"{cost(nearest_data_parallel(step))}. Roost's own graph runtime runs it as it is"
    )


def _shares(seconds: Array, names: tuple[str, ...]) -> str:  # [devices]
    """`60% cuda:0, 40% cuda:1`."""
    on = [int(each) for each in np.argsort(-seconds, kind="stable") if seconds[each] > 0]
    return ", ".join(f"{names[each]} for {seconds[each] / seconds.sum():.0%}" for each in on)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
