"""The code of a placed step: one straight Python function for each launcher.

`GraphRuntime` makes a `StepCode`, and each launcher runs its function in every step. The work of a
device is known before the step: its ops in order, the tensors that it receives and sends, when it
asks for the next parameter, and when a tensor is read for the last time. All of it is written as
source and compiled; a running step decides nothing. Names in the source are our numbers; no text of
the model gets into it.

Each device makes its own views: only the tensor that a view looks into is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.runnable import runnable
from roost.runtime.ops.compiled_source import compiled
from roost.runtime.ops.device_calls import DeviceCalls
from roost.runtime.ops.in_place import in_place
from roost.runtime.ops.lines import Key, Line, Ref
from roost.runtime.ops.merged import merged
from roost.runtime.ops.segments import segmented
from roost.runtime.step.random_ops import is_random
from roost.simulator.compiled import simulate
from roost.simulator.order import dispatch_order
from roost.simulator.reference import plan_fetches

aten = torch.ops.aten


class StepCode:
    """The functions of all launchers for one placement."""

    def __init__(
        self,
        step: CapturedStep,
        problem: Problem,
        placement: Placement,
        calls: DeviceCalls,
        watch: Callable[[int, Any], None] | None = None,
    ) -> None:
        """`watch` is called after each op with its number and output, which is only valid then.

        Of an update it gets the new value, the value that it was made of (such as the gradient),
        and the new states.
        """
        if placement.order == "fifo":
            raise InputError(
                "a placement in fifo order cannot be run: each device needs a fixed order; use "
                "program or rank"
            )
        self.step = step
        self.problem = problem
        self.placement = placement
        self.calls = calls
        self.watch = watch
        graph = step.graph
        self.device: list[int] = placement.device.tolist()
        self.order: list[int] = dispatch_order(problem, placement).tolist()
        self.place = {op: place for place, op in enumerate(self.order)}
        self.inputs = graph.input_lists()
        self.consumers = graph.consumer_lists()
        self.is_parameter = graph.is_parameter.tolist()
        self.is_update = (graph.phase == UPDATE).tolist()
        self.copies, self.window = plan_fetches(problem, placement, self.order)
        self.results: dict[int, list[int]] = {}  # op -> results that look into its output
        for number, node in enumerate(step.program.results):
            self.results.setdefault(graph.index_of(step.op_of[node]), []).append(number)

    def function(
        self, devices: Sequence[int], launched_ahead: Sequence[int] = ()
    ) -> tuple[Callable[[], None], dict[str, list[int]]]:
        """Give the function of a launcher, and for each title of its sources the op of each line.

        `launched_ahead`: the devices that work later than they are called.
        """
        names = self.problem.cluster.device_names
        parts = dict[str, list[int]]()
        rows: dict[int, list[Line]] = {}
        for device in devices:
            rows[device] = _DeviceWriter(self, device).written()
            capture = self.calls.capturing(device)
            if capture is not None:
                title = f"<step of {names[device]}>"
                rows[device], more = segmented(rows[device], title, capture, f"d{device}")
                parts |= more
        title = f"<step of {' and '.join(names[device] for device in devices)}>"
        if len(rows) == 1:
            (lines,) = rows.values()
        else:
            timeline = self.timeline
            assert timeline.start is not None
            assert timeline.finish is not None
            lines = merged(rows, launched_ahead, timeline.start, timeline.finish)
        function, ops = compiled(lines, title)
        return function, {**parts, title: ops}

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulate(self.problem, self.placement, full=True)

    def copies_of(self, parameter: int) -> int:
        return sum(copy.parameter == parameter for row in self.copies for copy in row)

    def last_read_at_home(self, parameter: int) -> int | None:
        """Give the last op at its home that reads a parameter, updates excepted."""
        home = self.device[parameter]
        readers = [
            op
            for op in self.consumers[parameter]
            if self.device[op] == home and not self.is_update[op]
        ]
        return max(readers, key=self.place.__getitem__, default=None)


class _DeviceWriter:
    """Writes the lines of one device."""

    def __init__(self, code: StepCode, device: int) -> None:
        self.code = code
        self.device = device
        self.lines = list[Line]()
        self.step = code.step
        self.calls = code.calls
        self.names: dict[Any, str] = {}  # node, or copy -> name
        self.copy_of = {
            (op, copy.parameter): number
            for number, copy in enumerate(code.copies[device])
            for op in copy.users
        }
        self.sent: set[str] = set()  # names whose tensor another device or the caller may read
        self.num_values = 0

    def written(self) -> list[Line]:
        code = self.code
        device = self.device
        mine = [op for op in code.order if code.device[op] == device]
        asks = self._asks({op: place for place, op in enumerate(mine)})
        self._ask(asks.get(-1, ()), -1)
        leaving = self._leaving()
        for place, op in enumerate(mine):
            self._op(op)
            for parameter in leaving.get(op, ()):
                self._call(op, self.calls.noting_read(parameter), gives=(_read(parameter),))
            self._ask(asks.get(place, ()), op)
        # The model may return a view of a parameter, or a constant.
        for op in code.results:
            if code.is_parameter[op] and code.device[op] == device:
                self._keep_results(op)
        return in_place(self.lines, self.sent)

    def _asks(self, place: Mapping[int, int]) -> dict[int, list[int]]:
        """Give the copies to ask for after each place in the order of this device; -1: at first."""
        asks: dict[int, list[int]] = {}
        at = -1
        for number, copy in enumerate(self.code.copies[self.device]):
            at = max([at, *(place[user] for old in copy.replaces for user in old.users)])
            asks.setdefault(at, []).append(number)
        return asks

    def _ask(self, numbers: Iterable[int], op: int) -> None:
        for number in numbers:
            copy = self.code.copies[self.device][number]
            fetch = self.calls.fetching(self.device, number, copy)
            gives = (("copy", number, self.device), _read(copy.parameter))
            self._call(copy.users[0] if op < 0 else op, fetch, gives=gives)

    def _leaving(self) -> dict[int, list[int]]:
        """Give the parameters at home here that each op is the last to read.

        Only those whose new value comes from another device.
        """
        code = self.code
        leaving = dict[int, list[int]]()
        for update, is_update in enumerate(code.is_update):
            if not is_update or code.device[update] == self.device:
                continue
            for parameter in code.inputs[update]:
                if code.is_parameter[parameter] and code.device[parameter] == self.device:
                    last = code.last_read_at_home(parameter)
                    if last is not None:
                        leaving.setdefault(last, []).append(parameter)
        return leaving

    def _op(self, op: int) -> None:
        code = self.code
        if code.is_update[op]:
            self._update(op)
            return
        node = self.step.maker[self.step.graph.op_names[op]]
        if node.op == "placeholder":
            with self._timed(op):
                self.sent.add(self._define(op, node, self.calls.input_of(op, self.device), ()))
        else:
            self._run(op, node)
        name = self.names[node]
        self._watch(op, Ref(name))
        readers = {code.device[consumer] for consumer in code.consumers[op]}
        for target in sorted(readers - {self.device}):
            send = self.calls.sending(op, self.device, target)
            self._call(op, send, Ref(name), gives=(("value", op, target),))
            self.sent.add(name)
        if op in code.results:
            self._keep_results(op)
            self.sent.add(name)

    def _keep_results(self, op: int) -> None:
        for number in self.code.results[op]:
            value = self._value(self.step.program.results[number], op)
            self._call(op, self.calls.keeping_result(number), value)

    def _run(self, op: int, node: fx.Node) -> str:
        """Write a call of the program, on values of this device."""
        target = runnable(node.target)
        if is_random(target):
            target = self.calls.drawing(target, op, self.device)
        args = self._values(node.args, op)
        kwargs = self._values(dict(node.kwargs), op)
        if _says_no_device(node):  # it would be made on the CPU
            kwargs["device"] = self.calls.torch_device(self.device)
        if self.step.maker.get(self.step.graph.op_names[op]) is not node:
            return self._define(op, node, target, args, kwargs)  # a view, on the way to the op
        with self._timed(op):
            return self._define(op, node, target, args, kwargs)

    @contextmanager
    def _timed(self, op: int) -> Iterator[None]:
        """Time the line that is written inside: the op, without its waiting."""
        timing = self.calls.timing(op, self.device)
        if timing is not None:
            self._call(op, timing[0])
        yield
        if timing is not None:
            self._call(op, timing[1])

    def _update(self, op: int) -> None:
        code = self.code
        step = self.step
        update = step.updates[step.graph.op_names[op]]
        touched = [step.graph.index_of(name) for name in (update.resident, *update.states)]
        held = [self._held(resident, op) for resident in touched]
        reads = [code.copies_of(p) if code.device[p] == self.device else 0 for p in touched]
        value = self._value(update.value, op)
        keys = [_read(resident) for resident in touched]
        write = self.calls.updating(op, touched, reads)
        with self._timed(op):
            needs = tuple(zip(keys, reads, strict=True))
            self._call(op, write, held[0], value, *held[1:], needs=needs)
        self._watch(op, (held[0], value, *held[1:]))
        for resident, tensor in zip(touched, held, strict=True):
            if code.device[resident] != self.device:
                before = code.copies_of(resident) + (code.last_read_at_home(resident) is not None)
                send = self.calls.sending_home(resident, self.device, before)
                self._call(op, send, tensor, needs=((_read(resident), before),))

    def _values(self, value: Any, op: int) -> Any:
        """Translate arguments of the program into arguments of a line."""
        if isinstance(value, fx.Node):
            return self._value(value, op)
        if isinstance(value, tuple | list):
            return type(value)(self._values(each, op) for each in value)
        if isinstance(value, dict):
            return {key: self._values(each, op) for key, each in value.items()}
        return self.calls.torch_device(self.device) if isinstance(value, torch.device) else value

    def _value(self, node: fx.Node, op: int) -> Any:
        """Give a tensor of the program on this device: at home, received, fetched, or a view."""
        code = self.code
        step = self.step
        if node in self.names:
            return Ref(self.names[node])
        owner = step.graph.index_of(step.op_of[node])
        if step.maker[step.op_of[node]] is not node:
            view = self._run(op, node)
            if code.is_parameter[owner]:  # the parameter may be gone when the next op reads it
                del self.names[node]
            return Ref(view)
        if code.is_parameter[owner]:
            return self._held(owner, op)
        assert code.device[owner] != self.device, "what is made here comes before what reads it"
        receive = self.calls.receiving(owner, code.device[owner], self.device)
        return Ref(self._define(op, node, receive, (), needs=((("value", owner, self.device), 1),)))

    def _held(self, parameter: int, op: int) -> Any:
        """Give a parameter as an op reads it: itself at home, or the copy fetched for this op."""
        if self.code.device[parameter] == self.device:
            return self.calls.resident(parameter)
        number = self.copy_of[op, parameter]
        if ("copy", number) not in self.names:
            copy = self.code.copies[self.device][number]
            name = self.names["copy", number] = f"c{number}d{self.device}"
            take = self.calls.awaiting_fetch(self.device, number, copy)
            needs = ((("copy", number, self.device), 1),)
            self.lines.append(Line(op, take, (), name=name, needs=needs))
            self.sent.add(name)  # only an update may write into it
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
        self.num_values += 1
        name = self.names[node] = f"v{self.num_values}d{self.device}"
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
    """Give the key of a read of the old value of a parameter."""
    return "read", parameter, -1


def _says_no_device(node: fx.Node) -> bool:
    """Tell if an op makes a tensor without inputs, and its arguments name no device."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    has_device = any(argument.name == "device" for argument in target._schema.arguments)
    return has_device and not node.kwargs.get("device")
