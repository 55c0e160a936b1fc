"""A `split_spec` for `torch.distributed.pipelining.pipeline`: the first module of each stage."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.report.exports._export import TimedExport, refuse_unrolled
from roost.report.exports._modules import Modules, ancestors, busiest, seconds_by_unit, within
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

_MINOR = 0.02  # a device with a smaller share of the computing than this may be rounded away


@dataclass(frozen=True)
class SplitSpec(TimedExport):
    """The beginnings of the stages, and their devices."""

    points: Mapping[str, str]  # module -> name of a SplitPoint
    devices: tuple[str, ...]  # [stages]

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> SplitSpec:
        refuse_unrolled(problem)
        return split_spec(model, problem, placement)

    def text(self) -> str:
        return json.dumps(self._content(), indent=2) + "\n"

    def facts(self) -> dict[str, Any]:
        return self._content() | self.time_facts()

    def _content(self) -> dict[str, Any]:
        return {"split_spec": dict(self.points), "devices": list(self.devices)}

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

    A module belongs to the device of most of its computing. Raises InputError with the first module
    that goes back or whose weights lie elsewhere, or if a device that computes would get no stage.
    """
    placement = problem.check(placement)
    graph = problem.graph
    names = problem.cluster.device_names
    modules = Modules(graph, model)
    ops = modules.forward_ops().tolist()
    units = [modules.unit_of_module(path) for path in modules.path]
    seconds = seconds_by_unit(problem, placement.device, units)
    device = {unit: busiest(each) for unit, each in seconds.items()}
    calls = [unit for unit, _ in groupby(filter(None, (units[op] for op in ops)))]
    if not calls:
        raise InputError(
            f"graph {graph.name!r} has no modules to split at; capture it from a model of PyTorch"
        )
    stages = [device[calls[0]]]
    points: dict[str, str] = {}
    for number, unit in enumerate(calls):
        if device[unit] != stages[-1]:
            if device[unit] in stages:
                raise InputError(
                    f"module {unit!r} goes back to {names[device[unit]]} after "
                    f"{names[stages[-1]]}; a pipeline goes from stage to stage once"
                )
            stages.append(device[unit])
            points[begins(unit, calls[:number])] = "BEGINNING"
    _check_weights(modules, problem, placement, device)
    _check_devices(modules, problem, placement, device, stages)
    pairs = ((int(placement.device[op]), modules.unit[op]) for op in ops)
    agree = [placed == device[unit] for placed, unit in pairs if unit is not None]
    staged = _staged(modules, problem, placement, device)
    return SplitSpec(
        points=points,
        devices=tuple(names[stage] for stage in stages),
        agreement=sum(agree) / len(agree),
        step_time=simulate(problem, staged).step_time,
        placed_time=simulate(problem, placement).step_time,
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
        units = (modules.unit_of_module(tensor.rpartition(".")[0]) for tensor in tensors)
        homes = (device[unit] for unit in units if unit is not None and unit in device)
        moved[op] = next(homes, moved[op])
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
    """Raise if a device computes parts of modules, but most of none: it would have no stage."""
    ops = modules.forward_ops()
    seconds = np.zeros(problem.cluster.num_devices)
    np.add.at(seconds, placement.device[ops], problem.op_time[ops, placement.device[ops]])
    for lost in np.flatnonzero(seconds >= max(1e-30, _MINOR * seconds.sum())).tolist():
        if lost in stages:
            continue
        name = problem.cluster.device_names[lost]
        first = next(op for op in ops.tolist() if placement.device[op] == lost)
        inside = modules.unit[first]
        other = "elsewhere"
        if inside is not None:
            other = problem.cluster.device_names[device.get(inside, stages[0])]
        raise InputError(
            f"{name} computes {seconds[lost] / seconds.sum():.0%} of the step, but most of no "
            f"module: the first of its ops, {problem.graph.op_names[first]!r}, is in {inside!r}, "
            f"which is on {other} for the most part; a pipeline has whole modules in its stages: "
            "place with contiguous or expert, or on fewer devices"
        )


def begins(unit: str, seen: list[str]) -> str:
    """The outermost module that begins with a unit, after the units that were called before."""
    return next(path for path in ancestors(unit) if not any(within(other, path) for other in seen))


def _check_weights(
    modules: Modules, problem: Problem, placement: Placement, device: Mapping[str, int]
) -> None:
    """Raise unless each stage holds its own weights, and each tied weight is in one stage."""
    names = problem.cluster.device_names
    sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)  # unit -> bytes on each device
    for op, tensors in modules.names_of.items():
        owners = {tensor: modules.unit_of_module(tensor.rpartition(".")[0]) for tensor in tensors}
        units = {tensor: unit for tensor, unit in owners.items() if unit and unit in device}
        homes = {device[unit]: tensor for tensor, unit in units.items()}
        if len(homes) > 1:
            raise InputError(
                f"{' and '.join(map(repr, homes.values()))} are one weight, used on "
                f"{' and '.join(names[home] for home in homes)}; a pipeline has it in one stage"
            )
        for unit in set(units.values()):
            sizes[unit][int(placement.device[op])] += int(problem.graph.output_bytes[op])
    for unit, size in sizes.items():
        if 2 * size[device[unit]] < size.total():
            raise InputError(
                f"weights of module {unit!r} lie on {names[busiest(size)]} while it computes on "
                f"{names[device[unit]]}; a stage of a pipeline holds its own weights"
            )
