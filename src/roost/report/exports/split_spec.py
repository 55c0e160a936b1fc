"""A `split_spec` for `torch.distributed.pipelining.pipeline`: before which modules a new stage
begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports._export import Export
from roost.report.exports._modules import Modules, ancestors, within
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

_MINOR = 0.02  # a device with a smaller share of the computing than this may be rounded away


@dataclass(frozen=True)
class SplitSpec(Export):
    """Where the stages begin, and on which devices they are."""

    points: Mapping[str, str]  # module -> name of a SplitPoint
    devices: tuple[str, ...]  # [stages]
    agreement: float  # share of the forward ops on the device of their stage
    step_time: float  # seconds, simulated, of one batch with whole modules in stages
    placed_time: float  # seconds, simulated, under the placement

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> SplitSpec:
        return split_spec(model, problem, placement)

    @property
    def cost(self) -> float:
        """How many times as long a step takes as the placement's, one batch after the other."""
        return self.step_time / self.placed_time if self.placed_time > 0 else 1.0

    def text(self) -> str:
        return (
            json.dumps({"split_spec": dict(self.points), "devices": list(self.devices)}, indent=2)
            + "\n"
        )

    def facts(self) -> dict[str, Any]:
        return {
            "split_spec": dict(self.points),
            "devices": list(self.devices),
            "agreement": self.agreement,
            "step_time": self.step_time,
            "placed_time": self.placed_time,
            "cost": self.cost,
        }

    def __str__(self) -> str:
        stages = f"{len(self.devices)} stages on {', '.join(self.devices)}"
        if len(self.devices) == 1:
            stages = f"one stage, on {self.devices[0]}: there is nothing to split"
        return (
            f"{stages}; {self.agreement:.1%} of the forward ops are on the device of their stage; "
            f"a batch by itself takes {self.cost:.2f} times as long"
        )


def split_spec(model: nn.Module | None, problem: Problem, placement: Placement) -> SplitSpec:
    """The stages of a placement that goes from device to device along the model, never back.

    A module counts as being where most of its computing is. Raises InputError with the first module
    that goes back, or whose weights lie elsewhere, and where a device that computes would get no
    stage.
    """
    placement = problem.check(placement)
    graph, names = problem.graph, problem.cluster.device_names
    modules = Modules(graph, model)
    device = _majority(modules, problem, placement)
    calls: list[str] = []  # units as they are called, one after the other
    for op in modules.forward_ops().tolist():
        unit = modules.unit_of_module(modules.path[op])
        if unit is not None and (not calls or calls[-1] != unit):
            calls.append(unit)
    if not calls:
        raise InputError(
            f"graph {graph.name!r} has no modules to split at; capture it from a model of PyTorch"
        )
    stages: list[int] = []
    points: dict[str, str] = {}
    seen: list[str] = []
    for unit in calls:
        if not stages:
            stages.append(device[unit])
        elif device[unit] != stages[-1]:
            if device[unit] in stages:
                raise InputError(
                    f"module {unit!r} goes back to {names[device[unit]]} after "
                    f"{names[stages[-1]]}; a pipeline goes from stage to stage once"
                )
            stages.append(device[unit])
            points[_begins(unit, seen)] = "BEGINNING"
        seen.append(unit)
    _check_weights(modules, problem, placement, device)
    _check_devices(modules, problem, placement, device, stages)
    ops = modules.forward_ops()
    agree = [
        int(placement.device[op]) == device[unit]
        for op in ops.tolist()
        if (unit := modules.unit[op]) is not None
    ]
    before, after = (
        simulate(problem, each)
        for each in (placement, _staged(modules, problem, placement, device))
    )
    return SplitSpec(
        points,
        tuple(names[stage] for stage in stages),
        sum(agree) / len(agree),
        after.step_time,
        before.step_time,
    )


def _staged(
    modules: Modules, problem: Problem, placement: Placement, device: Mapping[str, int]
) -> Placement:
    """The placement with whole units, and their weights, on the devices of their stages."""
    moved = np.array(placement.device)
    for op in modules.forward_ops().tolist():
        unit = modules.unit[op]
        moved[op] = device.get(unit, moved[op]) if unit is not None else moved[op]
    for op, tensors in modules.names_of.items():
        units = [modules.unit_of_module(tensor.rpartition(".")[0]) for tensor in tensors]
        moved[op] = next(
            (device[unit] for unit in units if unit is not None and unit in device), moved[op]
        )
    members = np.flatnonzero(problem.graph.group >= 0)
    moved[members] = moved[problem.group_leader[problem.graph.group[members]]]
    return replace(placement, device=moved, order="program", priority=None)


def _check_devices(
    modules: Modules,
    problem: Problem,
    placement: Placement,
    device: Mapping[str, int],
    stages: list[int],
) -> None:
    """A device that goes in and out of modules would have no stage, and what it does would be
    somebody else's."""
    ops = modules.forward_ops()
    seconds = np.zeros(problem.cluster.num_devices)
    np.add.at(seconds, placement.device[ops], problem.op_time[ops, placement.device[ops]])
    for lost in np.flatnonzero(seconds >= max(1e-30, _MINOR * seconds.sum())).tolist():
        if lost in stages:
            continue
        name = problem.cluster.device_names[lost]
        first = next(op for op in ops.tolist() if placement.device[op] == lost)
        inside = modules.unit[first]
        there = (
            "elsewhere"
            if inside is None
            else problem.cluster.device_names[device.get(inside, stages[0])]
        )
        raise InputError(
            f"{name} computes {seconds[lost] / seconds.sum():.0%} of the step, but most of no "
            f"module: the first of its ops, {problem.graph.op_names[first]!r}, is in {inside!r}, "
            f"which is on {there} for the most part; a pipeline has whole modules in its stages: "
            "place with contiguous or expert, or on fewer devices"
        )


def _begins(unit: str, seen: list[str]) -> str:
    """The outermost module that begins with this unit."""
    return next(path for path in ancestors(unit) if not any(within(other, path) for other in seen))


def _majority(modules: Modules, problem: Problem, placement: Placement) -> dict[str, int]:
    """Unit -> the device of most of its computing."""
    seconds: dict[str, dict[int, float]] = {}
    for op in modules.forward_ops().tolist():
        unit, on = modules.unit_of_module(modules.path[op]), int(placement.device[op])
        if unit is not None:
            there = seconds.setdefault(unit, {})
            there[on] = there.get(on, 0.0) + float(problem.op_time[op, on]) + 1e-12
    return {unit: max(there, key=lambda d: (there[d], -d)) for unit, there in seconds.items()}


def _check_weights(
    modules: Modules, problem: Problem, placement: Placement, device: Mapping[str, int]
) -> None:
    """A stage holds its own weights: most of each unit's must be where it computes, and a tied one
    in one stage."""
    names = problem.cluster.device_names
    sizes: dict[str, dict[int, int]] = {}  # unit -> bytes by where they lie
    for op, tensors in modules.names_of.items():
        units = {tensor: modules.unit_of_module(tensor.rpartition(".")[0]) for tensor in tensors}
        homes = {
            device[unit]: tensor
            for tensor, unit in units.items()
            if unit is not None and unit in device
        }
        if len(homes) > 1:
            raise InputError(
                f"{' and '.join(map(repr, homes.values()))} are one weight, used on "
                f"{' and '.join(names[home] for home in homes)}; a pipeline has it in one stage"
            )
        lies = int(placement.device[op])
        for unit in {unit for unit in units.values() if unit is not None and unit in device}:
            there = sizes.setdefault(unit, {})
            there[lies] = there.get(lies, 0) + int(problem.graph.output_bytes[op])
    for unit, there in sizes.items():
        if 2 * there.get(device[unit], 0) < sum(there.values()):
            lies = max(there, key=lambda home: (there[home], -home))
            raise InputError(
                f"weights of module {unit!r} lie on {names[lies]} while it computes on "
                f"{names[device[unit]]}; a stage of a pipeline holds its own weights"
            )
