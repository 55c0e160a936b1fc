"""A placed step as one straight function of Python for each host, a thread that has one device or
all of them.

What a device does is known beforehand: which ops it runs in which order, what it receives and
sends, when it asks for the next parameter, when a tensor is read for the last time. All of that is
written out as source and compiled; at run time nothing is decided. Names in the source are numbers
of ours; nothing of the model's own text gets into it.

A view is made anew on each device that looks at one: only what the view looks into is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.compiled_source import compiled as _compiled
from roost.runtime.ops.in_place import reused
from roost.runtime.ops.lines import Key, Line, Ref
from roost.runtime.ops.merged import merged
from roost.runtime.ops.segments import Capture, segmented
from roost.runtime.step.random_ops import is_random
from roost.simulator.compiled import simulate
from roost.simulator.order import dispatch_order
from roost.simulator.reference import Copy, plan_fetches

aten = torch.ops.aten


class DeviceCalls(Protocol):
    """What the code of a device calls, apart from ops of PyTorch. Ops are named by their number."""

    def torch_device(self, device: int) -> torch.device: ...
    def resident(self, op: int) -> Tensor:
        """A parameter at home."""

    def given(self, op: int, device: int) -> Callable[[], Any]:
        """An input of the step."""

    def sending(self, op: int, source: int, target: int) -> Callable[[Tensor], None]: ...
    def receiving(self, op: int, source: int, target: int) -> Callable[[], Tensor]: ...
    def fetching(self, device: int, number: int, copy: Copy) -> Callable[[], None]:
        """Ask for a copy of a parameter that lives elsewhere."""

    def fetched(self, device: int, number: int, copy: Copy) -> Callable[[], Tensor]:
        """Wait for it."""

    def read_at_home(self, parameter: int) -> Callable[[], None]:
        """Tell that no op at its home reads the old value of a parameter any more."""

    def updating(self, op: int, touched: list[int], reads: list[int]) -> Callable[..., None]:
        """Write new values of a parameter and its states in place, each once so many copies of the
        old were taken."""

    def going_home(self, parameter: int, source: int, reads: int) -> Callable[[Tensor], None]:
        """Send the new value of a parameter home, to be written there after so many reads of the
        old one."""

    def drawing(self, target: Any, number: int, device: int) -> Callable[..., Any]: ...
    def capturing(self, device: int) -> Capture | None:
        """How runs of ops are recorded, where they are."""

    def result(self, number: int) -> Callable[[Any], None]: ...
    def timing(self, op: int, device: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """What is called before an op and after it, where ops are timed."""


class StepCode:
    """The functions of all devices for one placement."""

    def __init__(
        self,
        step: CapturedStep,
        problem: Problem,
        placement: Placement,
        calls: DeviceCalls,
        watch: Callable[[int, Any], None] | None = None,
    ) -> None:
        """`watch` is called after each op with its number and its output, which is only valid then.

        Of an update it is given the new value, what it was made of (such as the gradient), and the
        new states.
        """
        if placement.order == "fifo":
            raise InputError(
                "a placement in fifo order cannot be run: devices follow one order; take program "
                "or rank"
            )
        self.step, self.problem, self.placement, self.calls = step, problem, placement, calls
        self.watch = watch
        graph = step.graph
        self.device: list[int] = placement.device.tolist()
        self.number = {name: number for number, name in enumerate(graph.op_names)}
        self.order: list[int] = dispatch_order(problem, placement).tolist()
        self.place = {op: place for place, op in enumerate(self.order)}
        self.inputs, self.consumers = graph.input_lists(), graph.consumer_lists()
        self.is_parameter, self.is_update = (
            graph.is_parameter.tolist(),
            (graph.phase == UPDATE).tolist(),
        )
        self.copies, self.window = plan_fetches(problem, placement, self.order)
        self.results: dict[int, list[int]] = {}  # op -> which results look into its output
        for number, node in enumerate(step.program.results):
            self.results.setdefault(self.number[step.op_of[node]], []).append(number)

    def function(
        self, devices: Sequence[int], launched_ahead: Sequence[int] = ()
    ) -> tuple[Callable[[], None], dict[str, list[int]]]:
        """What a host runs in a step; and for the title of each source of it, the op that each line
        belongs to.

        `launched_ahead` are those of its devices that it only tells what to do.
        """
        names, parts = self.problem.cluster.device_names, dict[str, list[int]]()
        rows: dict[int, list[Line]] = {}
        for device in devices:
            rows[device] = _DeviceWriter(self, device).written()
            if (capture := self.calls.capturing(device)) is not None:
                rows[device], more = segmented(
                    rows[device], f"<step of {names[device]}>", capture, f"d{device}"
                )
                parts |= more
        title = f"<step of {' and '.join(names[device] for device in devices)}>"
        if len(rows) == 1:
            (lines,) = rows.values()
        else:
            assert self.timeline.start is not None
            assert self.timeline.finish is not None
            lines = merged(rows, launched_ahead, self.timeline.start, self.timeline.finish)
        function, ops = _compiled(lines, title)
        return function, {**parts, title: ops}

    @cached_property
    def timeline(self) -> Timeline:
        """The step as simulated, in full."""
        return simulate(self.problem, self.placement, full=True)

    def copies_of(self, parameter: int) -> int:
        return sum(copy.parameter == parameter for row in self.copies for copy in row)

    def last_read_at_home(self, parameter: int) -> int | None:
        """The last op at its home that reads a parameter, updates aside."""
        home = self.device[parameter]
        there = [
            op
            for op in self.consumers[parameter]
            if self.device[op] == home and not self.is_update[op]
        ]
        return max(there, key=self.place.__getitem__, default=None)


class _DeviceWriter:
    """Writes the lines of one device."""

    def __init__(self, code: StepCode, device: int) -> None:
        self.code, self.device, self.lines = code, device, list[Line]()
        self.names: dict[Any, str] = {}  # node, or copy -> name
        self.node_number = {
            node: number for number, node in enumerate(code.step.program.module.graph.nodes)
        }
        self.copy_of = {
            (op, copy.parameter): number
            for number, copy in enumerate(code.copies[device])
            for op in copy.users
        }
        self.sent: set[str] = set()  # names whose tensor somebody else may still be reading
        self.temporary = 0

    def written(self) -> list[Line]:
        code, device = self.code, self.device
        mine = [op for op in code.order if code.device[op] == device]
        asks = self._asks({op: place for place, op in enumerate(mine)})
        self._ask(asks.get(-1, ()), -1)
        leaving = self._leaving()
        for place, op in enumerate(mine):
            self._op(op)
            for parameter in leaving.get(op, ()):
                self._call(op, code.calls.read_at_home(parameter), gives=(_read(parameter),))
            self._ask(asks.get(place, ()), op)
        self._results_of_parameters()
        return reused(self.lines, self.sent)

    def _asks(self, place: Mapping[int, int]) -> dict[int, list[int]]:
        """After which place in the order of this device each copy is asked for; -1 at the start."""
        found: dict[int, list[int]] = {}
        at = -1
        for number, copy in enumerate(self.code.copies[self.device]):
            at = max([at, *(place[user] for old in copy.replaces for user in old.users)])
            found.setdefault(at, []).append(number)
        return found

    def _ask(self, numbers: Iterable[int], op: int) -> None:
        for number in numbers:
            copy = self.code.copies[self.device][number]
            fetch = self.code.calls.fetching(self.device, number, copy)
            gives = (("copy", number, self.device), _read(copy.parameter))
            self._call(copy.users[0] if op < 0 else op, fetch, gives=gives)

    def _leaving(self) -> dict[int, list[int]]:
        """Op -> parameters at home here that it is the last to read, where their new value comes
        from elsewhere."""
        code, found = self.code, dict[int, list[int]]()
        for update in (
            op for op, yes in enumerate(code.is_update) if yes and code.device[op] != self.device
        ):
            for parameter in (p for p in code.inputs[update] if code.is_parameter[p]):
                if (
                    code.device[parameter] == self.device
                    and (last := code.last_read_at_home(parameter)) is not None
                ):
                    found.setdefault(last, []).append(parameter)
        return found

    def _op(self, op: int) -> None:
        code, name = self.code, self.code.step.graph.op_names[op]
        if code.is_update[op]:
            self._update(op)
            return
        node = code.step.maker[name]
        if node.op == "placeholder":
            with self._timed(op):
                self.sent.add(self._define(op, node, code.calls.given(op, self.device), ()))
        else:
            self._run(op, node)
        self._watch(op, Ref(self.names[node]))
        for target in sorted(
            {code.device[consumer] for consumer in code.consumers[op]} - {self.device}
        ):
            send = code.calls.sending(op, self.device, target)
            self._call(op, send, Ref(self.names[node]), gives=(("value", op, target),))
            self.sent.add(self.names[node])
        for number in code.results.get(op, ()):
            self._call(
                op, code.calls.result(number), self._value(code.step.program.results[number], op)
            )
            self.sent.add(self.names[node])

    def _results_of_parameters(self) -> None:
        """What the model returns may look into a parameter, or a constant."""
        code = self.code
        for op, numbers in code.results.items():
            if code.is_parameter[op] and code.device[op] == self.device:
                for number in numbers:
                    self._call(
                        op,
                        code.calls.result(number),
                        self._value(code.step.program.results[number], op),
                    )

    def _run(self, op: int, node: fx.Node) -> str:
        """A call as it is in the program, on values of this device."""
        target: Any = node.target
        if is_random(target):
            target = self.code.calls.drawing(target, op, self.device)
        elif target in (aten.view.default, aten._unsafe_view.default):
            # Kernels of another device may lay out their outputs in another way.
            target = aten.reshape.default
        args, kwargs = self._values(node.args, op), self._values(dict(node.kwargs), op)
        if _says_no_device(node):  # it would be made on the host
            kwargs["device"] = self.code.calls.torch_device(self.device)
        if self.code.step.maker.get(self.code.step.graph.op_names[op]) is not node:
            return self._define(op, node, target, args, kwargs)  # a view, on the way to the op
        with self._timed(op):
            return self._define(op, node, target, args, kwargs)

    @contextmanager
    def _timed(self, op: int) -> Iterator[None]:
        """The line that is written within is the op, without what it waits for."""
        timing = self.code.calls.timing(op, self.device)
        if timing is not None:
            self._call(op, timing[0])
        yield
        if timing is not None:
            self._call(op, timing[1])

    def _update(self, op: int) -> None:
        code, step = self.code, self.code.step
        update = step.updates[step.graph.op_names[op]]
        touched = [code.number[update.resident], *(code.number[state] for state in update.states)]
        holds = [self._held(parameter, op) for parameter in touched]
        reads = [code.copies_of(p) if code.device[p] == self.device else 0 for p in touched]
        value = self._value(update.value, op)
        needs = tuple(
            (_read(parameter), count) for parameter, count in zip(touched, reads, strict=True)
        )
        with self._timed(op):
            self._call(
                op,
                code.calls.updating(op, touched, reads),
                holds[0],
                value,
                *holds[1:],
                needs=needs,
            )
        self._watch(op, (holds[0], value, *holds[1:]))
        for parameter, held in zip(touched, holds, strict=True):
            if code.device[parameter] != self.device:
                before = code.copies_of(parameter) + (code.last_read_at_home(parameter) is not None)
                go = code.calls.going_home(parameter, self.device, before)
                self._call(op, go, held, needs=((_read(parameter), before),))

    def _values(self, value: Any, op: int) -> Any:
        """Arguments of the program as arguments here."""
        if isinstance(value, fx.Node):
            return self._value(value, op)
        if isinstance(value, tuple | list):
            return type(value)(self._values(each, op) for each in value)
        if isinstance(value, dict):
            return {key: self._values(each, op) for key, each in value.items()}
        return (
            self.code.calls.torch_device(self.device) if isinstance(value, torch.device) else value
        )

    def _value(self, node: fx.Node, op: int) -> Any:
        """A tensor of the program as this device has it: at home, received, fetched, or a view of
        such."""
        code, step = self.code, self.code.step
        if node in self.names:
            return Ref(self.names[node])
        owner = code.number[step.op_of[node]]
        if step.maker[step.op_of[node]] is not node:
            return Ref(self._view(node, op, keep=not code.is_parameter[owner]))
        if code.is_parameter[owner]:
            return self._held(owner, op)
        assert code.device[owner] != self.device, "what is made here comes before what reads it"
        receive = code.calls.receiving(owner, code.device[owner], self.device)
        return Ref(self._define(op, node, receive, (), needs=((("value", owner, self.device), 1),)))

    def _view(self, node: fx.Node, op: int, keep: bool) -> str:
        """Looks into what is here; kept for later, unless what it looks into may be gone by
        then."""
        name = self._run(op, node)
        if not keep:
            del self.names[node]
        return name

    def _held(self, parameter: int, op: int) -> Any:
        """A parameter as an op reads it: itself at home, or the copy that was fetched for this
        op."""
        code = self.code
        if code.device[parameter] == self.device:
            return code.calls.resident(parameter)
        number = self.copy_of[op, parameter]
        if ("copy", number) not in self.names:
            copy = code.copies[self.device][number]
            name = self.names["copy", number] = f"c{number}d{self.device}"
            take, needs = (
                code.calls.fetched(self.device, number, copy),
                ((("copy", number, self.device), 1),),
            )
            self.lines.append(Line(op, take, (), name=name, needs=needs))
            self.sent.add(name)  # an update writes into it, and nobody else may
        return Ref(self.names["copy", number])

    def _define(
        self,
        op: int,
        node: fx.Node,
        call: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        needs: tuple[tuple[Key, int], ...] = (),
    ) -> str:
        self.temporary += 1
        name = self.names[node] = f"v{self.node_number[node]}_{self.temporary}d{self.device}"
        self.lines.append(Line(op, call, args, kwargs or {}, name, node, needs=needs))
        return name

    def _watch(self, op: int, value: Any) -> None:
        if self.code.watch is not None:
            self._call(op, partial(self.code.watch, op), value)

    def _call(
        self,
        op: int,
        call: Any,
        *args: Any,
        gives: tuple[Key, ...] = (),
        needs: tuple[tuple[Key, int], ...] = (),
    ) -> None:
        self.lines.append(Line(op, call, args, gives=gives, needs=needs))


def _read(parameter: int) -> Key:
    """Word that someone reads the old value of a parameter no more."""
    return "read", parameter, -1


def _says_no_device(node: fx.Node) -> bool:
    """Whether an op makes a tensor of nothing, on whatever device."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or node.all_input_nodes
        or node.kwargs.get("device")
    ):
        return False
    return any(argument.name == "device" for argument in node.target._schema.arguments)
