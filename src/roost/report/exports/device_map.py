"""A `device_map` of accelerate and transformers.

What accelerate does with one: a module runs on the device of its entry. An entry "cpu" beside GPUs
means that the weights lie there and are copied to the first GPU before each use, with nothing else
going on meanwhile; computing on the CPU beside a GPU cannot be said. Buffers stay on the GPU that
computes with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.graph import INPUT
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.units import show_bytes
from roost.errors import InputError
from roost.report.exports._export import Export
from roost.report.exports._modules import Modules, within
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

_MINOR = 0.02  # a GPU with a smaller share of the computing than this may be rounded away


@dataclass(frozen=True)
class DeviceMap(Export):
    """The map, and how far it is from the placement that it was made of."""

    entries: Mapping[str, int | str]  # module, or tensor -> number of the GPU, or "cpu"
    agreement: float  # share of the ops that run where the placement has them
    step_time: float  # seconds, simulated, under the map
    placed_time: float  # seconds, simulated, under the placement
    missing_bytes: int  # what does not fit any more, on all devices together
    placement: Placement  # the map as a placement

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> DeviceMap:
        return device_map(model, problem, placement)

    @property
    def cost(self) -> float:
        """How many times as long a step takes as the placement's."""
        return self.step_time / self.placed_time if self.placed_time > 0 else 1.0

    @property
    def feasible(self) -> bool:
        return self.missing_bytes == 0

    def device_of(self, tensor: str) -> int | str | None:
        """The entry of a tensor, as accelerate finds it: the longest that it is within; None where
        it has none."""
        matching = [name for name in self.entries if within(tensor, name)]
        return self.entries[max(matching, key=len)] if matching else None

    def text(self) -> str:
        """As JSON, which `json.load` turns into what accelerate takes."""
        return json.dumps(dict(self.entries), indent=2) + "\n"

    def facts(self) -> dict[str, Any]:
        return {
            "device_map": dict(self.entries),
            "agreement": self.agreement,
            "step_time": self.step_time,
            "placed_time": self.placed_time,
            "cost": self.cost,
            "feasible": self.feasible,
            "missing_bytes": self.missing_bytes,
        }

    def __str__(self) -> str:
        lacks = "" if self.feasible else f"; does not fit: lacks {show_bytes(self.missing_bytes)}"
        return (
            f"{len(self.entries)} entries; {self.agreement:.1%} of the ops are where the "
            f"placement has them; a step takes {self.cost:.2f} times as long{lacks}"
        )


def device_map(model: nn.Module | None, problem: Problem, placement: Placement) -> DeviceMap:
    """Round a placement of inference to whole modules.

    Without the model only what the graph knows is in the map: no modules and buffers that the step
    does not use.
    """
    placement = problem.check(placement)
    rounding = _Rounding(Modules(problem.graph, model), problem, placement)
    entries = rounding.entries()
    rounded = rounding.rounded()
    before, after = simulate(problem, placement), simulate(problem, rounded)
    computes = ~problem.graph.is_parameter
    return DeviceMap(
        entries,
        float((rounded.device == placement.device)[computes].mean()) if computes.any() else 1.0,
        after.step_time,
        before.step_time,
        int(after.missing.sum()),
        rounded,
    )


class _Rounding:
    """Which device each module is on, by what most of its computing is on."""

    def __init__(self, modules: Modules, problem: Problem, placement: Placement) -> None:
        self.modules, self.problem, self.placement, self.graph = (
            modules,
            problem,
            placement,
            problem.graph,
        )
        self.device: list[int] = placement.device.tolist()
        self.value = _values(problem, placement)
        self.gpus = sorted(
            (d for d, value in self.value.items() if value != "cpu"),
            key=lambda d: int(self.value[d]),
        )
        self.cpu = next((d for d, value in self.value.items() if value == "cpu"), None)
        self.root: dict[str, str] = {}  # unit -> another that it must go with
        # Weights that are read while their module is not running: never offloaded.
        self.pinned: set[int] = set()
        self._tie()
        self._meet()
        self.exec_of, self.offloaded = self._decide()
        self._check_sensible()

    # ------------------------------------------------------------------ what goes together

    def _top(self, unit: str) -> str:
        while unit in self.root:
            unit = self.root[unit]
        return unit

    def _join(self, one: str, other: str) -> None:
        one, other = self._top(one), self._top(other)
        if one != other:
            self.root[other] = one

    def _tie(self) -> None:
        for names in self.modules.names_of.values():
            units = [self._owner(name) for name in names]
            for other in units[1:]:
                self._join(units[0], other)

    def _owner(self, tensor: str) -> str:
        """The unit of a tensor: that of its module, or itself where that has parts elsewhere."""
        return self.modules.unit_of_module(tensor.rpartition(".")[0]) or tensor

    def _meet(self) -> None:
        self.reasons: list[tuple[str, str, int]] = []
        for one, other, op in self.modules.meetings():
            self._join(one, other)
            self.reasons.append((one, other, op))
        for op in self.modules.forward_ops().tolist():
            self.pinned |= {source for source, _ in self.modules.foreign(op)}
            # And a tensor of a module with parts goes with what it meets there.
            unit = self.modules.unit[op]
            for source in self.graph.inputs_of(op).tolist():
                for name in self.modules.names_of.get(source, ()):
                    if unit is not None and self._owner(name) == name:
                        self._join(unit, name)

    # ------------------------------------------------------------------ where it goes

    def _decide(self) -> tuple[dict[str, int], set[str]]:
        """Where each set of units computes, and which sets, or modules, have their weights on the
        CPU."""
        self.seconds: dict[str, dict[int, float]] = {}  # by unit and device
        for op in self.modules.forward_ops().tolist():
            if (unit := self.modules.unit[op]) is not None:
                there = self.seconds.setdefault(unit, {})
                time = float(self.problem.op_time[op, self.device[op]])
                there[self.device[op]] = there.get(self.device[op], 0.0) + time + 1e-12
        sums: dict[str, dict[int, float]] = {}
        for unit, there in self.seconds.items():
            added = sums.setdefault(self._top(unit), {})
            for device, time in there.items():
                added[device] = added.get(device, 0.0) + time
        self.main = self.gpus[0] if self.gpus else self._only_cpu()
        found = {unit: self._most(there) for unit, there in sums.items()}
        offloaded = self._offloaded() if self.gpus and self.cpu is not None else set()
        if self.gpus:  # what is offloaded runs on the first GPU that is left
            left = [device for unit, device in found.items() if unit not in offloaded]
            self.main = min(left, key=self.gpus.index, default=self.main)
        return found, offloaded

    def _most(self, seconds: Mapping[int, float]) -> int:
        """The device of most of the computing; beside GPUs the CPU does not count."""
        able = {device: time for device, time in seconds.items() if device in self.gpus}
        return max(able, key=lambda device: (able[device], -device)) if able else self.main

    def _offloaded(self) -> set[str]:
        # Set of units, or module where there is but one GPU -> bytes, on the CPU.
        sizes: dict[str, list[int]] = {}
        pinned: set[str] = set()
        for name, op in self._weights():
            key = self._top(self._owner(name)) if len(self.gpus) > 1 else self._place_of(name)
            size = sizes.setdefault(key, [0, 0])
            size[0] += int(self.graph.output_bytes[op])
            size[1] += int(self.graph.output_bytes[op]) * (self.device[op] == self.cpu)
            if op in self.pinned:
                pinned.add(key)
        return {key for key, (size, there) in sizes.items() if 2 * there > size} - pinned

    def _weights(self) -> list[tuple[str, int]]:
        return [
            (name, op)
            for name, op in self.modules.op_of.items()
            if name not in self.modules.buffers
        ]

    def _place_of(self, tensor: str) -> str:
        """What a tensor is offloaded with where there is one GPU: its module, or itself where that
        has parts."""
        module = tensor.rpartition(".")[0]
        return tensor if self.modules.children.get(module) or not module else module

    def _only_cpu(self) -> int:
        assert self.cpu is not None
        return self.cpu

    def _is_offloaded(self, tensor: str) -> bool:
        if len(self.gpus) > 1:
            return self._top(self._owner(tensor)) in self.offloaded
        tied = self.modules.names_of.get(self.modules.op_of.get(tensor, -1), [tensor])
        return any(self._place_of(name) in self.offloaded for name in tied)

    def _computes_on(self, unit: str | None) -> int:
        if unit is None:
            return self.main
        top = self._top(unit)
        return self.main if top in self.offloaded else self.exec_of.get(top, self.main)

    def _check_sensible(self) -> None:
        """Refuse where several GPUs became one only because whole modules cannot be split as the
        placement splits."""
        total: dict[int, float] = {}
        for op in self.modules.forward_ops().tolist():
            device = self.device[op]
            total[device] = total.get(device, 0.0) + float(self.problem.op_time[op, device])
        major = {d for d in self.gpus if total.get(d, 0.0) > _MINOR * sum(total.values())}
        used = {self._computes_on(unit) for unit in self.exec_of}
        if len(major) < 2 or len(used) > 1:
            return
        names = ", ".join(sorted(self.problem.cluster.device_names[d] for d in major))
        for one, other, op in self.reasons:
            if self._most(self.seconds.get(one, {})) != self._most(self.seconds.get(other, {})):
                path = self.modules.path[op] or "the model"
                raise InputError(
                    f"the placement computes on {names}, but {one!r} and {other!r} meet in op "
                    f"{self.graph.op_names[op]!r} of {path}, where accelerate moves nothing: they "
                    "must share a device, and so all of it would"
                )
        unit = max(self.seconds, key=lambda unit: len(self.seconds[unit]))
        raise InputError(
            f"the placement splits {unit!r} over {names}; accelerate can only place it whole, and "
            "nothing else is left"
        )

    # ------------------------------------------------------------------ what comes out

    def entries(self) -> dict[str, int | str]:
        """Every tensor and every module covered; a module whose parts agree is one entry."""
        listed = self._listed("")
        filled: dict[str, int | str] = {}
        # For modules that hold nothing: a device that computes, the one before.
        latest = self.value[self.main]
        for name, value in listed.items():
            latest = value if value is not None and (value != "cpu" or not self.gpus) else latest
            filled[name] = latest if value is None else value
        if self.gpus and set(filled.values()) == {"cpu"}:
            raise InputError(
                "every weight lies on the CPU while GPUs compute; a device_map of 'cpu' alone "
                "would compute there too. accelerate.cpu_offload does this"
            )
        return filled

    def _listed(self, module: str) -> dict[str, int | str | None]:
        modules = self.modules
        found: dict[str, int | str | None] = {}
        for child in modules.children[module]:
            found |= self._listed(child)
        tensors = modules.tensors.get(module, [])
        if not modules.children[module]:
            return {module: self._leaf(module, tensors)}
        found |= {tensor: self._tensor_value(tensor) for tensor in tensors}
        values = {value for value in found.values() if value is not None}
        return {module: next(iter(values), None)} if len(values) <= 1 else found

    def _leaf(self, module: str, tensors: list[str]) -> int | str | None:
        weights = [tensor for tensor in tensors if tensor not in self.modules.buffers]
        if any(self._is_offloaded(tensor) for tensor in weights):
            return "cpu"
        unit = self.modules.unit_of_module(module)
        if unit is None or self._top(unit) not in self.exec_of:
            return self.value[self.main] if tensors else None
        if not tensors and (
            unit != module or len(self.gpus) < 2 or self._top(unit) in self.offloaded
        ):
            return None  # it has nothing to hold, and runs where all around it does
        return self.value[self._computes_on(unit)]

    def _tensor_value(self, tensor: str) -> int | str:
        if self._is_offloaded(tensor) and tensor not in self.modules.buffers:
            return "cpu"
        return self.value[self._computes_on(self._owner(tensor))]

    def rounded(self) -> Placement:
        """The map as a placement, with nothing fetched ahead."""
        device = np.array(self.device)
        for op in range(self.graph.num_ops):
            if self.graph.is_parameter[op]:
                device[op] = self._home(op)
            elif self.graph.phase[op] != INPUT:
                device[op] = self._computes_on(self.modules.unit[op])
        members = np.flatnonzero(self.graph.group >= 0)
        device[members] = device[self.problem.group_leader[self.graph.group[members]]]
        try:
            return self.problem.check(self.problem.placement(device))
        except InputError as error:
            raise InputError(f"rounded to whole modules, {error}") from None

    def _home(self, op: int) -> int:
        names = self.modules.names_of.get(op)
        if not names:
            return self.main  # a constant
        if (
            self.cpu is not None
            and self._is_offloaded(names[0])
            and names[0] not in self.modules.buffers
        ):
            return self.cpu
        return self._computes_on(self._owner(names[0]))


def _values(problem: Problem, placement: Placement) -> dict[int, int | str]:
    """How accelerate calls the devices in use."""
    found: dict[int, int | str] = {}
    for number in sorted(set(placement.device.tolist())):
        device = problem.cluster.devices[number]
        cuda = re.fullmatch(r"cuda:(\d+)", device.name)
        if device.kind == "cuda" and cuda:
            found[number] = int(cuda[1])
        elif device.kind == "cpu":
            found[number] = "cpu"
        else:
            raise InputError(
                f"accelerate does not know device {device.name!r} of kind {device.kind!r}: only "
                "cpu, cuda:N"
            )
    if (cpus := [problem.cluster.device_names[d] for d, value in found.items() if value == "cpu"])[
        1:
    ]:
        raise InputError(f"the placement uses {' and '.join(cpus)}; accelerate knows but one cpu")
    hosts = {problem.cluster.devices[number].host for number in found}
    if len(hosts) > 1:
        raise InputError(
            f"the placement uses hosts {', '.join(sorted(hosts))}; a device_map is for one"
        )
    return found
