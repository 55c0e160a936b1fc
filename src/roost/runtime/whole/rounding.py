"""What a placement of ops says about modules.

A search decides about graphs in which a module is one group (`transforms/by_module.py`); any other
placement is rounded to that: a module runs where most of its time is spent. Cheap ops between
modules that all run elsewhere go with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
_SMALL = 2**20  # bytes: what the graph does not know of is kept on the main device up to this size


def by_modules(
    problem: Problem,
    placement: Placement,
    model: nn.Module,
    tied: Mapping[str, str] | None = None,
    light: bool = False,
    on_the_spot: Collection[str] = (),
) -> tuple[ModulePlacement, Placement]:
    """The placement for a model that stays Python, and the same as a placement of all ops, to be
    simulated.

    `problem` is of the graph as captured, without limits on where ops may run; `tied` has other
    names of parameters. `light`: modules without weights may run elsewhere as well
    (`ByModule.light`). `on_the_spot`: modules whose weights, if they have to be brought, come in
    their calls, and not through the window.
    """
    work = _ModuleRounding(problem, placement, tied or {}, light, _never_called(model), on_the_spot)
    work.place_modules()
    work.place_parameters()
    return work.for_model(model), work.for_simulator()


def _never_called(model: nn.Module) -> set[str]:
    """Modules that only hold others, as `nn.ModuleList`: nothing can be put around a call of
    them."""
    named = model.named_modules(remove_duplicate=False)
    return {
        name
        for name, module in named
        if getattr(module.forward, "__func__", None) is nn.Module.forward
    }


class _ModuleRounding:
    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        tied: Mapping[str, str],
        light: bool,
        never_called: set[str],
        on_the_spot: Collection[str],
    ) -> None:
        self.problem, self.graph, self.placement = problem, problem.graph, problem.check(placement)
        self.names, self.light, self.never_called = (
            problem.cluster.device_names,
            light,
            never_called,
        )
        self.on_the_spot = set(on_the_spot)
        self.device = np.array(self.placement.device)
        self.main = self._main()
        kinds = [one.kind for one in problem.cluster.devices]
        # From which all is streamed, where there is one.
        self.store = kinds.index(MEMORY) if MEMORY in kinds else None
        self.readers = readers_of(self.graph)
        self.ops: dict[str, list[int]] = {}  # of each module
        for op, (module, parameter) in enumerate(
            zip(self.graph.modules, self.graph.is_parameter.tolist(), strict=True)
        ):
            if not parameter:
                self.ops.setdefault(plain(module), []).append(op)
        self.known: dict[int, list[str]] = {op: [self.graph.op_names[op]] for op in self.readers}
        number = {names[0]: op for op, names in self.known.items()}
        for other, name in tied.items():
            self.known[number[name]].append(other)
        with_weights = dict.fromkeys(
            module for modules in self.readers.values() for module in modules if module
        )
        # Modules that something is decided of, in the order they are called, and the device each
        # runs on.
        decided = [*with_weights, *(weightless(self.graph) if light else ())]
        self.runs = {
            module: self._majority(self.ops[module])
            for module in sorted(decided, key=lambda each: self.ops[each][0])
        }
        self.streamed: dict[str, list[str]] = {module: [] for module in self.runs}
        self.tops: dict[str, int] = {}  # outermost modules that run elsewhere

    def place_modules(self) -> None:
        self.device[~self.graph.is_parameter] = self.main
        for module in self.runs:
            device = self.runs[module]  # which may be that of a module around it by now
            self.device[self.ops[module]] = device
            if device != self.main and not any(module.startswith(f"{top}.") for top in self.tops):
                top = self._top(module, device)
                self.tops = {
                    each: where
                    for each, where in self.tops.items()
                    if not each.startswith(f"{top}.")
                }
                self.tops[top] = device
                for inside in self._within(top, self.ops):
                    self.device[self.ops[inside]] = device
                self.runs |= dict.fromkeys(self._within(top, self.runs), device)

    def place_parameters(self) -> None:
        """Weights of a module that runs elsewhere live there; others where they were placed, if
        they can be brought."""
        for parameter, modules in self.readers.items():
            away = [module for module in modules if self.runs.get(module, self.main) != self.main]
            if away:
                self.device[parameter] = self.runs[away[0]]
            if self.device[parameter] == self.main:
                continue
            brought = {
                module: self._name_inside(module, parameter)
                for module in modules
                if module not in away
            }
            if not away and not all(brought.values()):
                self.device[parameter] = self.main
                continue
            if not away and brought and self.store is not None:
                self.device[parameter] = self.store
            for module, name in brought.items():
                if name is not None:
                    self.streamed[module].append(name)

    def for_model(self, model: nn.Module) -> ModulePlacement:
        tensors = named_tensors(model)
        home = {
            name: self._home(parameter)
            for parameter, names in self.known.items()
            for name in names
            if name in tensors
        }
        streamed = {module: tuple(names) for module, names in self.streamed.items() if names}
        host = self._host()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        large = (
            name
            for name in parameters
            if tensors[name].numel() * tensors[name].element_size() >= _SMALL
        )
        # Nothing was said of it: not used, or rarely.
        for name in sorted(name for name in large if name not in home):
            module, _, _ = name.rpartition(".")
            if module and module not in streamed and host != self.names[self.main]:
                home[name], streamed[module] = host, (name,)
        runs_on = {module: self.names[device] for module, device in self.tops.items()}
        loads = [
            sum(aligned(tensors[name].nbytes) for name in names)
            for module, names in streamed.items()
            if module not in self.on_the_spot
        ]
        window = max([int(self._windows()[self.main]), *loads])
        return ModulePlacement(
            self.names[self.main],
            home,
            runs_on,
            streamed,
            window,
            signature(model),
            stays=self._staying() if self.light else (),
            on_the_spot=tuple(module for module in streamed if module in self.on_the_spot),
        )

    def _staying(self) -> tuple[str, ...]:
        """Modules that run elsewhere whose output is read by such alone, on the same device."""
        top_of = {
            op: top
            for top in self.tops
            for inside in self._within(top, self.ops)
            for op in self.ops[inside]
        }
        consumers, found = self.graph.consumer_lists(), []
        for top, device in self.tops.items():
            mine = [op for op, other in top_of.items() if other == top]
            readers = {
                reader for op in mine for reader in consumers[op] if top_of.get(reader) != top
            }
            returned = any(not consumers[op] for op in mine)
            if (
                readers
                and not returned
                and all(self.tops.get(top_of.get(each, ""), -1) == device for each in readers)
            ):
                found.append(top)
        return tuple(found)

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
        """As large as was planned, and as the weights that one module needs together."""
        windows = np.array(
            np.broadcast_to(self.placement.prefetch_bytes, len(self.names)), dtype=np.int64
        )
        number = {name: op for op, names in self.known.items() for name in names}
        loads = [
            sum(aligned(int(self.graph.output_bytes[number[name]])) for name in names)
            for module, names in self.streamed.items()
            if module not in self.on_the_spot
        ]
        windows[self.main] = max([int(windows[self.main]), *loads])
        return windows

    def _home(self, parameter: int) -> str:
        """Memory that is a device of its own is a CPU's."""
        device = self.problem.cluster.devices[self.device[parameter]]
        return self._host() if device.kind == MEMORY else device.name

    def _host(self) -> str:
        found = [one.name for one in self.problem.cluster.devices if one.kind == "cpu"]
        return found[0] if found else self.names[self.main]

    def _main(self) -> int:
        """The device that has most to do, one that is no CPU where there is one."""
        spent = np.zeros(self.problem.cluster.num_devices)
        np.add.at(spent, self.device, self._seconds()[np.arange(self.graph.num_ops), self.device])
        faster = [
            number
            for number, one in enumerate(self.problem.cluster.devices)
            if one.kind not in ("cpu", MEMORY)
        ]
        return max(faster or range(len(spent)), key=lambda number: spent[number])

    def _seconds(self) -> Array:
        return self.problem.op_time

    def _majority(self, ops: list[int]) -> int:
        spent = np.zeros(len(self.names))
        np.add.at(spent, self.device[ops], self._seconds()[ops].mean(axis=1) + 1e-12)
        return int(spent.argmax())

    def _top(self, module: str, device: int) -> str:
        """The outermost module around one of which all may run on that device."""
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

    def _within(self, around: str, modules: Mapping[str, object]) -> list[str]:
        return [module for module in modules if module == around or module.startswith(f"{around}.")]

    def _name_inside(self, module: str, parameter: int) -> str | None:
        """The name under which a module, or one inside it, has a parameter."""
        return next(
            (name for name in self.known[parameter] if module and name.startswith(f"{module}.")),
            None,
        )
