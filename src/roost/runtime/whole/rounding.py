"""A placement of ops, rounded to whole modules.

`plan/module_search.py` calls it. The search decides about graphs in which a module is one group
(`transforms/by_module.py`); any other placement is rounded to that: a module runs where most of its
time is spent. Cheap ops between modules that all run elsewhere go with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.kinds import class_of
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.runtime.whole.module_placement import ModulePlacement, named_tensors, signature
from roost.runtime.whole.weight_window import aligned
from roost.transforms.by_module import plain, readers_of, weightless

_CHEAP = 0.05  # of the FLOP of the modules they stand between
_SMALL = 2**20  # bytes: unused parameters up to this size stay on the main device


def by_modules(
    problem: Problem,
    placement: Placement,
    model: nn.Module,
    tied: Mapping[str, str] | None = None,
    light: bool = False,
    on_the_spot: Collection[str] = (),
) -> tuple[ModulePlacement, Placement]:
    """Give the placement of the model's modules, and the same as a placement of all ops.

    - `problem`: of the captured graph, without limits on where ops may run.
    - `tied`: other names of parameters -> their name in the graph.
    - `light`: modules without weights may run elsewhere as well (`ByModule.light`).
    - `on_the_spot`: modules whose weights, if they are brought, are copied in their calls.
    """
    rounding = _ModuleRounding(
        problem, placement, tied or {}, light, _never_called(model), set(on_the_spot)
    )
    rounding.place_modules()
    rounding.place_parameters()
    return rounding.for_model(model), rounding.for_simulator()


def _never_called(model: nn.Module) -> set[str]:
    """Give modules that only hold others, as `nn.ModuleList`: they have no call to change."""
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if getattr(module.forward, "__func__", None) is nn.Module.forward
    }


def _inside(name: str, around: str) -> bool:
    """Tell if a module is another one, or inside it."""
    return name == around or name.startswith(f"{around}.")


class _ModuleRounding:
    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        tied: Mapping[str, str],
        light: bool,
        never_called: set[str],
        on_the_spot: set[str],
    ) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.placement = problem.check(placement)
        self.light = light
        self.never_called = never_called
        self.on_the_spot = on_the_spot
        self.names = problem.cluster.device_names
        self.kinds = [device.kind for device in problem.cluster.devices]
        self.device = np.array(self.placement.device)
        self.main = self._main()
        # Host memory that weights are streamed from, if it is a device of its own.
        self.store = self.kinds.index(MEMORY) if MEMORY in self.kinds else None
        self.readers = readers_of(self.graph)
        self.ops: dict[str, list[int]] = {}  # of each module
        for op in np.flatnonzero(~self.graph.is_parameter).tolist():
            self.ops.setdefault(plain(self.graph.modules[op]), []).append(op)
        self.number = {self.graph.op_names[op]: op for op in self.readers}
        self.known = {op: [name] for name, op in self.number.items()}  # all names of a parameter
        for other, name in tied.items():
            self.known[self.number[name]].append(other)
        self.number |= {name: op for op, names in self.known.items() for name in names}
        # The modules that can be placed, in the order of their calls, and the device of each.
        decided = {module for modules in self.readers.values() for module in modules if module}
        if light:
            decided |= set(weightless(self.graph))
        self.runs = {
            module: self._majority(self.ops[module])
            for module in sorted(decided, key=lambda each: self.ops[each][0])
        }
        self.streamed: dict[str, list[str]] = {module: [] for module in self.runs}
        self.tops: dict[str, int] = {}  # outermost modules that run elsewhere

    def place_modules(self) -> None:
        self.device[~self.graph.is_parameter] = self.main
        for module in self.runs:
            device = self.runs[module]  # by now perhaps that of a module around it
            self.device[self.ops[module]] = device
            if device != self.main and not any(module.startswith(f"{top}.") for top in self.tops):
                top = self._top(module, device)
                self.tops = {
                    other: where
                    for other, where in self.tops.items()
                    if not other.startswith(f"{top}.")
                }
                self.tops[top] = device
                for inside in self._within(top, self.ops):
                    self.device[self.ops[inside]] = device
                self.runs |= dict.fromkeys(self._within(top, self.runs), device)

    def place_parameters(self) -> None:
        """Place weights with modules that run elsewhere; others as placed, if they can come."""
        for parameter, modules in self.readers.items():
            elsewhere = [each for each in modules if self.runs.get(each, self.main) != self.main]
            if elsewhere:
                self.device[parameter] = self.runs[elsewhere[0]]
            if self.device[parameter] == self.main:
                continue
            brought = {
                module: self._name_inside(module, parameter)
                for module in modules
                if module not in elsewhere
            }
            if not elsewhere and not all(brought.values()):
                self.device[parameter] = self.main
                continue
            if not elsewhere and brought and self.store is not None:
                self.device[parameter] = self.store
            for module, name in brought.items():
                if name is not None:
                    self.streamed[module].append(name)

    def for_model(self, model: nn.Module) -> ModulePlacement:
        tensors = named_tensors(model)
        main = self.names[self.main]
        host = self._host()
        home = {
            name: self._home(parameter)
            for parameter, names in self.known.items()
            for name in names
            if name in tensors
        }
        streamed = {module: tuple(names) for module, names in self.streamed.items() if names}
        # Large parameters that the graph does not know: they are used rarely, or never.
        for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
            module, _, _ = name.rpartition(".")
            if name in home or parameter.nbytes < _SMALL:
                continue
            if module and module not in streamed and host != main:
                home[name] = host
                streamed[module] = (name,)
        size = {name: tensor.nbytes for name, tensor in tensors.items()}
        window = max(int(self._windows()[self.main]), self._largest_load(streamed, size))
        return ModulePlacement(
            main,
            home,
            {module: self.names[device] for module, device in self.tops.items()},
            streamed,
            window,
            signature(model),
            stays=self._staying() if self.light else (),
            on_the_spot=tuple(module for module in streamed if module in self.on_the_spot),
        )

    def _staying(self) -> tuple[str, ...]:
        """Give modules that run elsewhere whose outputs are read only there."""
        top_of = {
            op: top
            for top in self.tops
            for inside in self._within(top, self.ops)
            for op in self.ops[inside]
        }
        consumers = self.graph.consumer_lists()

        def stays(top: str) -> bool:
            mine = [op for op, other in top_of.items() if other == top]
            if any(not consumers[op] for op in mine):  # the model returns it
                return False
            tops = {top_of.get(reader) for op in mine for reader in consumers[op]} - {top}
            devices = {self.tops.get(each or "", -1) for each in tops}
            return devices == {self.tops[top]}

        return tuple(top for top in self.tops if stays(top))

    def for_simulator(self) -> Placement:
        return replace(
            self.placement,
            device=self.device,
            order="program",
            priority=None,
            graph=self.graph.digest,
            prefetch_bytes=self._windows(),
        )

    def _windows(self) -> Array:  # [devices] bytes
        """Give windows as large as planned, or as the weights that one module needs."""
        windows = np.array(
            np.broadcast_to(self.placement.prefetch_bytes, len(self.names)), dtype=np.int64
        )
        size = {name: int(self.graph.output_bytes[op]) for name, op in self.number.items()}
        largest = self._largest_load(self.streamed, size)
        windows[self.main] = max(int(windows[self.main]), largest)
        return windows

    def _largest_load(self, streamed: Mapping[str, Sequence[str]], size: Mapping[str, int]) -> int:
        """Bytes of the largest weights that one module needs together in the window."""
        loads = (
            sum(aligned(size[name]) for name in names)
            for module, names in streamed.items()
            if module not in self.on_the_spot
        )
        return max(loads, default=0)

    def _home(self, parameter: int) -> str:
        """Give the home of a parameter: the CPU if its device is host memory."""
        device = self.device[parameter]
        return self._host() if self.kinds[device] == MEMORY else self.names[device]

    def _host(self) -> str:
        return self.names[self.kinds.index("cpu") if "cpu" in self.kinds else self.main]

    def _main(self) -> int:
        """Give the device that is busy longest, no CPU if there is any other."""
        ops = np.arange(self.graph.num_ops)
        spent = np.zeros(len(self.names))
        np.add.at(spent, self.device, self.problem.op_time[ops, self.device])
        others = [n for n, kind in enumerate(self.kinds) if kind not in ("cpu", MEMORY)]
        return max(others or range(len(spent)), key=lambda number: spent[number])

    def _majority(self, ops: list[int]) -> int:
        spent = np.zeros(len(self.names))
        np.add.at(spent, self.device[ops], self.problem.op_time[ops].mean(axis=1) + 1e-12)
        return int(spent.argmax())

    def _top(self, module: str, device: int) -> str:
        """Give the outermost module around one that may run on that device as a whole."""
        parts = module.split(".")
        for count in range(1, len(parts)):
            around = ".".join(parts[:count])
            if around in self.never_called:
                continue
            units = self._within(around, self.runs)
            between = [
                op
                for name in self._within(around, self.ops)
                if name not in self.runs
                for op in self.ops[name]
            ]
            cheap = all(class_of(self.graph.kinds[op]) == "other" for op in between)
            work = sum(float(self.graph.flop[self.ops[unit]].sum()) for unit in units)
            few = float(self.graph.flop[between].sum()) <= _CHEAP * work
            if cheap and few and all(self.runs[unit] == device for unit in units):
                return around
        return module

    def _within(self, around: str, modules: Iterable[str]) -> list[str]:
        return [module for module in modules if _inside(module, around)]

    def _name_inside(self, module: str, parameter: int) -> str | None:
        """Give the name under which a module, or one inside it, has a parameter."""
        names = self.known[parameter] if module else []
        return next((name for name in names if name.startswith(f"{module}.")), None)
