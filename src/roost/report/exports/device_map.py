"""A `device_map` of accelerate and transformers.

Under a map, accelerate runs a module on the device of its entry. An entry "cpu" beside GPUs means
that the weights lie in host memory, and accelerate copies them to the first GPU before each use,
while nothing else runs. A map cannot ask for computing on the CPU beside a GPU. Buffers stay on the
GPU that computes with them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.graph import INPUT
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.units import show_bytes
from roost.errors import InputError
from roost.report.exports._export import TimedExport, refuse_unrolled
from roost.report.exports._modules import Modules, Seconds, busiest, seconds_by_unit, within
from roost.simulator.compiled import simulate

if TYPE_CHECKING:
    from torch import nn

_MINOR = 0.02  # a GPU with a smaller share of the computing than this may be rounded away


@dataclass(frozen=True)
class DeviceMap(TimedExport):
    """The map, and its distance from the placement."""

    entries: Mapping[str, int | str]  # module, or tensor -> number of the GPU, or "cpu"
    missing_bytes: int  # of memory, on all devices together
    placement: Placement  # the map as a placement

    @classmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> DeviceMap:
        refuse_unrolled(problem)
        return device_map(model, problem, placement)

    @property
    def feasible(self) -> bool:
        """Tell whether the map fits into memory."""
        return self.missing_bytes == 0

    def device_of(self, tensor: str) -> int | str | None:
        """The entry of a tensor, as accelerate looks it up: the longest module name around it."""
        matching = [name for name in self.entries if within(tensor, name)]
        return self.entries[max(matching, key=len)] if matching else None

    def text(self) -> str:
        """The map as JSON; `json.load` gives the argument for accelerate."""
        return json.dumps(dict(self.entries), indent=2) + "\n"

    def facts(self) -> dict[str, Any]:
        memory = {"feasible": self.feasible, "missing_bytes": self.missing_bytes}
        return {"device_map": dict(self.entries)} | self.time_facts() | memory

    def __str__(self) -> str:
        lacks = "" if self.feasible else f"; does not fit: lacks {show_bytes(self.missing_bytes)}"
        return (
            f"{len(self.entries)} entries; {self.agreement:.1%} of the ops are where the "
            f"placement has them; a step takes {self.cost:.2f} times as long{lacks}"
        )


def device_map(model: nn.Module | None, problem: Problem, placement: Placement) -> DeviceMap:
    """Round a placement of inference to whole modules.

    Without the model the map lacks modules and buffers that the step does not use.
    """
    placement = problem.check(placement)
    rounding = _WholeModules(Modules(problem.graph, model), problem, placement)
    entries = rounding.entries()
    rounded = rounding.rounded()
    before = simulate(problem, placement)
    after = simulate(problem, rounded)
    computes = ~problem.graph.is_parameter
    agree = (rounded.device == placement.device)[computes]
    return DeviceMap(
        entries=entries,
        agreement=float(agree.mean()) if computes.any() else 1.0,
        step_time=after.step_time,
        placed_time=before.step_time,
        missing_bytes=int(after.missing.sum()),
        placement=rounded,
    )


class _WholeModules:
    """The device of each module: the one with most of its computing."""

    def __init__(self, modules: Modules, problem: Problem, placement: Placement) -> None:
        self.modules = modules
        self.problem = problem
        self.graph = problem.graph
        self.device: list[int] = placement.device.tolist()
        self.value = _values(problem, placement)
        gpus = [device for device, value in self.value.items() if value != "cpu"]
        self.gpus = sorted(gpus, key=lambda device: int(self.value[device]))
        self.cpu = next((d for d, value in self.value.items() if value == "cpu"), None)
        self.root: dict[str, str] = {}  # unit -> another unit that must share its device
        # Weights that are read while their module is not running, which are never offloaded.
        self.pinned: set[int] = set()
        self.seconds = seconds_by_unit(problem, placement.device, modules.unit)
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
        one = self._top(one)
        other = self._top(other)
        if one != other:
            self.root[other] = one

    def _tie(self) -> None:
        for names in self.modules.names_of.values():
            units = [self._owner(name) for name in names]
            for other in units[1:]:
                self._join(units[0], other)

    def _owner(self, tensor: str) -> str:
        """The unit of a tensor: its module's, or the tensor itself if the module has parts."""
        return self.modules.unit_of_module(tensor.rpartition(".")[0]) or tensor

    def _meet(self) -> None:
        self.reasons: list[tuple[str, str, int]] = []
        for one, other, op in self.modules.meetings():
            self._join(one, other)
            self.reasons.append((one, other, op))
        for op in self.modules.forward_ops().tolist():
            self.pinned |= {source for source, _ in self.modules.foreign(op)}
            # A tensor of a module with parts goes with the unit that it meets there.
            unit = self.modules.unit[op]
            for source in self.graph.inputs_of(op).tolist():
                for name in self.modules.names_of.get(source, ()):
                    if unit is not None and self._owner(name) == name:
                        self._join(unit, name)

    # ------------------------------------------------------------------ where it goes

    def _decide(self) -> tuple[dict[str, int], set[str]]:
        """The device of each set of units, and the sets or modules whose weights lie on the CPU."""
        sums: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        for unit, seconds in self.seconds.items():
            for device, time in seconds.items():
                sums[self._top(unit)][device] += time
        self.main = self.gpus[0] if self.gpus else self._only_cpu()
        device_of = {unit: self._most(seconds) for unit, seconds in sums.items()}
        offloaded = self._offloaded() if self.gpus and self.cpu is not None else set()
        if self.gpus:  # an offloaded module runs on the first GPU that still computes
            left = [device for unit, device in device_of.items() if unit not in offloaded]
            self.main = min(left, key=self.gpus.index, default=self.main)
        return device_of, offloaded

    def _most(self, seconds: Seconds) -> int:
        """The device of most of the computing; beside GPUs the CPU does not count."""
        able = {device: time for device, time in seconds.items() if device in self.gpus}
        return busiest(able) if able else self.main

    def _offloaded(self) -> set[str]:
        """The sets of units, or with one GPU the modules, with most of their bytes on the CPU."""
        sizes: Counter[str] = Counter()
        on_cpu: Counter[str] = Counter()
        pinned: set[str] = set()
        for name, op in self.modules.op_of.items():
            if name in self.modules.buffers:
                continue
            key = self._top(self._owner(name)) if len(self.gpus) > 1 else self._offload_key(name)
            size = int(self.graph.output_bytes[op])
            sizes[key] += size
            on_cpu[key] += size * (self.device[op] == self.cpu)
            if op in self.pinned:
                pinned.add(key)
        return {key for key, size in sizes.items() if 2 * on_cpu[key] > size} - pinned

    def _offload_key(self, tensor: str) -> str:
        """The module to offload with a tensor on one GPU; the tensor itself if that has parts."""
        module = tensor.rpartition(".")[0]
        return tensor if self.modules.children.get(module) or not module else module

    def _only_cpu(self) -> int:
        assert self.cpu is not None
        return self.cpu

    def _is_offloaded(self, tensor: str) -> bool:
        if len(self.gpus) > 1:
            return self._top(self._owner(tensor)) in self.offloaded
        tied = self.modules.names_of.get(self.modules.op_of.get(tensor, -1), [tensor])
        return any(self._offload_key(name) in self.offloaded for name in tied)

    def _computes_on(self, unit: str | None) -> int:
        if unit is None:
            return self.main
        top = self._top(unit)
        return self.main if top in self.offloaded else self.exec_of.get(top, self.main)

    def _check_sensible(self) -> None:
        """Raise if several GPUs became one because modules cannot be split like the placement."""
        total: defaultdict[int, float] = defaultdict(float)
        for op in self.modules.forward_ops().tolist():
            device = self.device[op]
            total[device] += float(self.problem.op_time[op, device])
        all_seconds = sum(total.values())
        major = {device for device in self.gpus if total[device] > _MINOR * all_seconds}
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
        """The entries, which cover every tensor and module; a module whose parts agree is one."""
        listed = self._listed("")
        filled: dict[str, int | str] = {}
        # A module without tensors gets the computing device before it.
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
        children = self.modules.children[module]
        tensors = self.modules.tensors.get(module, [])
        if not children:
            return {module: self._leaf(module, tensors)}
        listed: dict[str, int | str | None] = {}
        for child in children:
            listed |= self._listed(child)
        listed |= {tensor: self._tensor_value(tensor) for tensor in tensors}
        values = {value for value in listed.values() if value is not None}
        return {module: next(iter(values), None)} if len(values) <= 1 else listed

    def _leaf(self, module: str, tensors: list[str]) -> int | str | None:
        weights = [tensor for tensor in tensors if tensor not in self.modules.buffers]
        if any(self._is_offloaded(tensor) for tensor in weights):
            return "cpu"
        unit = self.modules.unit_of_module(module)
        if unit is None or self._top(unit) not in self.exec_of:
            return self.value[self.main] if tensors else None
        follows = unit != module or len(self.gpus) < 2 or self._top(unit) in self.offloaded
        if follows and not tensors:
            return None  # it runs wherever the modules around it run
        return self.value[self._computes_on(unit)]

    def _tensor_value(self, tensor: str) -> int | str:
        if self._is_offloaded(tensor) and tensor not in self.modules.buffers:
            return "cpu"
        return self.value[self._computes_on(self._owner(tensor))]

    def rounded(self) -> Placement:
        """The map as a placement without a window."""
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
        name = names[0]
        offloaded = self._is_offloaded(name) and name not in self.modules.buffers
        if self.cpu is not None and offloaded:
            return self.cpu
        return self._computes_on(self._owner(name))


def _values(problem: Problem, placement: Placement) -> dict[int, int | str]:
    """The names that accelerate has for the devices in use."""
    values: dict[int, int | str] = {}
    for number in sorted(set(placement.device.tolist())):
        device = problem.cluster.devices[number]
        cuda = re.fullmatch(r"cuda:(\d+)", device.name)
        if device.kind == "cuda" and cuda:
            values[number] = int(cuda[1])
        elif device.kind == "cpu":
            values[number] = "cpu"
        else:
            raise InputError(
                f"accelerate does not know device {device.name!r} of kind {device.kind!r}: only "
                "cpu, cuda:N"
            )
    cpus = [problem.cluster.device_names[d] for d, value in values.items() if value == "cpu"]
    if len(cpus) > 1:
        raise InputError(f"the placement uses {' and '.join(cpus)}; accelerate knows but one cpu")
    hosts = {problem.cluster.devices[number].host for number in values}
    if len(hosts) > 1:
        raise InputError(
            f"the placement uses hosts {', '.join(sorted(hosts))}; a device_map is for one"
        )
    return values
