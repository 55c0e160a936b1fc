"""Runs a captured step op by op on the devices of its placement, several steps in a row.

Every device is a thread that runs its own straight function (`code.py`). Tensors that cross are sent once to each
device that reads them while both go on: by a thread for each way between two devices of the kind `cpu`, on a stream
where one of them is a CUDA device (`cuda.py`). A parameter that lives elsewhere is fetched for its uses into a window,
and a new value goes home, exactly as the simulator has it; and no new value is written before all reads of the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import ExecutionError, InputError
from roost.frontends.torch import Described, Update
from roost.runtime.chance import Chance
from roost.runtime.code import Code
from roost.runtime.cuda import Cuda, Pins, device_named
from roost.runtime.lanes import Box, Reads, Worker
from roost.runtime.optimizers import Optimizer
from roost.runtime.places import Carry, Cpu, Mark, Parcel, Place, copied
from roost.runtime.window import lives, packed
from roost.simulator.reference import Copy

_SMALL = 2**18  # bytes that are copied in less time than a thread takes to wake up


class GraphRuntime:
    """A captured step, placed: call `step` with inputs as often as wished, then `close`."""

    def __init__(
        self,
        step: Described,
        problem: Problem,
        placement: Placement,
        residents: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        cores: Sequence[set[int]] | None = None,
        seed: int = 0,
        places: Sequence[Place] | None = None,
    ) -> None:
        """`residents` has a tensor for each resident of the program by name; they are copied.

        `cores` are those of the thread of each device; an empty set leaves it to the system. `places` are the devices,
        by default those of this machine that have the names of the cluster's.
        """
        placement = problem.check(placement)
        if problem.graph.digest != step.graph.digest:
            raise InputError(
                f"the problem is of graph {problem.graph.digest}, the captured step is {step.graph.digest}"
            )
        self.program, self.graph, self.placement = step.program, step.graph, placement
        self.device_names = problem.cluster.device_names
        self.places = [_place(name) for name in self.device_names] if places is None else list(places)
        self.optimizer, self.chance = optimizer or Optimizer(), Chance(seed)
        self._number = {name: number for number, name in enumerate(step.graph.op_names)}
        self._boxes: dict[tuple[str, int, int], Box] = {}
        self._reads: dict[int, Reads] = {}
        self._links: dict[tuple[int, int, str], Worker] = {}
        code = Code(step, problem, placement, self)
        self._resident = self._at_home(step, residents, code.copies)
        self._slots = [self._window(device, copies) for device, copies in enumerate(code.copies)]
        self._written = {self._number[name] for update in step.updates.values() for name in _touched(update)}
        self._inputs: list[Any] = []
        self._results: list[Any] = [None] * len(step.program.results)
        self._done: SimpleQueue[BaseException | Mark | None] = SimpleQueue()  # what a step waits for
        self._closing, self._num_home = threading.Lock(), 0
        self._error: BaseException | None = None
        self._functions = [code.function(device) for device in range(len(self.device_names))]
        self._workers = [
            Worker(name, self._fail, None if cores is None else cores[device])
            for device, name in enumerate(self.device_names)
        ]
        for worker, place in zip(self._workers, self.places, strict=True):
            worker.give(place.enter)

    # ------------------------------------------------------------------ use

    def step(self, *inputs: Any) -> list[Any]:
        """Run one step: what the model returns."""
        if self._error is not None:
            raise InputError("this run has failed before, and cannot go on; make another") from self._error
        wanted = len(self.program.inputs)
        self._inputs = [value for value in torch.utils._pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
        if len(self._inputs) != wanted:
            raise InputError(f"the step takes {wanted} tensors, not {len(self._inputs)}")
        for device in {value.device for value in self._inputs if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # whoever made them may still be at it
        self.chance.step += 1
        for place in self.places:
            place.begin()
        for device in range(len(self._workers)):
            self._workers[device].give(lambda device=device: self._run(device))  # type: ignore[misc]
        for _ in range(len(self._workers) + self._num_home):
            self._await(self._done.get())
        results, self._results = self._results, [None] * len(self._results)
        self._inputs = []
        return results

    def residents(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by name, as they are now; those of the program, tied ones once."""
        holders = zip(self.program.residents, self.program.placeholders, strict=False)
        return {name: self._resident[self._number[self._op_of[node]]] for name, node in holders}

    def peak_memory(self) -> dict[str, int]:
        """The most bytes in use on each CUDA device in the last step, residents and window among them."""
        named = zip(self.device_names, self.places, strict=True)
        return {name: place.peak_memory for name, place in named if isinstance(place, Cuda)}

    def close(self) -> None:
        """End all threads."""
        for worker in (*self._workers, *self._links.values()):
            worker.close()
        for place in self.places:
            place.close()

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _at_home(
        self, step: Described, residents: Mapping[str, Tensor], copies: Sequence[Sequence[Copy]]
    ) -> dict[int, Tensor]:
        """Every parameter of the graph, on the device where it lives; pinned, where a CUDA device fetches it."""
        found: dict[int, Tensor] = {}
        self._op_of = step.op_of
        names = dict(zip(step.program.placeholders, step.program.residents, strict=False))
        streamed = {
            copy.parameter: place
            for place, row in zip(self.places, copies, strict=True)
            for copy in row
            if isinstance(place, Cuda)
        }
        pins = Pins()

        def settle(op: int, value: Tensor) -> None:
            place, fetcher = self.places[int(self.placement.device[op])], streamed.get(op)
            if fetcher is not None and not isinstance(place, Cuda):
                found[op] = pins.home(value, fetcher.engine.pinned)
            else:
                found[op] = place.home(value)

        for op in (number for number, yes in enumerate(step.graph.is_parameter) if yes):
            node = step.maker.get(step.graph.op_names[op])
            if node is None:
                continue  # of an optimizer, below
            if node in names:
                given = residents.get(names[node], step.program.constants.get(names[node]))
                if given is None:
                    raise InputError(f"residents lacks {names[node]!r}")
            else:
                given = getattr(step.program.module, str(node.target))
            settle(op, given)
        for update in step.updates.values():
            zeros = torch.zeros_like(found[self._number[update.resident]], device="cpu")
            for state in update.states:
                settle(self._number[state], zeros)
        return found

    def _window(self, device: int, copies: Sequence[Copy]) -> list[Tensor]:
        """On a CUDA device, where each copy will lie."""
        place = self.places[device]
        if not isinstance(place, Cuda) or not copies:
            return []
        likes = [self._resident[copy.parameter] for copy in copies]
        return place.window(likes, *packed([like.nbytes for like in likes], lives(copies)))

    def _run(self, device: int) -> None:
        function, _ = self._functions[device]
        function()
        try:
            self.places[device].finish()
        except RuntimeError as error:  # of an op told long before
            name = self.device_names[device]
            raise ExecutionError(f"{name} failed: {error}", device=name) from error
        self._done.put(None)

    def _await(self, what: BaseException | Mark | None) -> None:
        if isinstance(what, BaseException):
            raise self._told(what) from what
        if what is not None:
            try:
                what.synchronize()
            except RuntimeError as error:
                self._fail(error)
                raise self._told(error) from error

    def _fail(self, error: BaseException) -> None:
        """The first failure ends all: whoever waits for something is told that nothing will come."""
        with self._closing:
            if self._error is None:
                self._error = error
                self._done.put(error)
        for box in self._boxes.values():
            box.end()
        for reads in self._reads.values():
            reads.end()

    def _told(self, error: BaseException) -> ExecutionError:
        """The error with the op that failed, by the line of the function that it came from."""
        if isinstance(error, ExecutionError):
            return error
        names = {f"<step of {name}>": device for device, name in enumerate(self.device_names)}
        trace = error.__traceback__
        while trace is not None:
            device = names.get(trace.tb_frame.f_code.co_filename)
            if device is not None:
                op = self._functions[device][1][trace.tb_lineno - 1]
                name, on = self.graph.op_names[op], self.device_names[device]
                return ExecutionError(f"op {name!r} failed on {on}: {error}", name, on)
            trace = trace.tb_next
        return ExecutionError(f"a transfer failed: {error}")

    def _box(self, kind: str, number: int, device: int) -> Box:
        return self._boxes.setdefault((kind, number, device), Box())

    def _link(self, source: int, target: int, what: str = "values") -> Worker:
        """A thread that copies from one device to another; one for new values, which may have to wait."""
        key = source, target, what
        if key not in self._links:
            name = f"{what} from {self.device_names[source]} to {self.device_names[target]}"
            self._links[key] = Worker(name, self._fail)
        return self._links[key]

    def _carry(self, source: int, target: int) -> Carry:
        """How a tensor gets from one device to another."""
        start, end = self.places[source], self.places[target]
        if isinstance(end, Cuda):
            return partial(end.bring, source=start) if isinstance(start, Cuda) else end.bring
        return start.take if isinstance(start, Cuda) else copied

    def _reads_of(self, parameter: int) -> Reads:
        return self._reads.setdefault(parameter, Reads())

    # ------------------------------------------------------------------ what the code calls

    def torch_device(self, device: int) -> torch.device:
        return self.places[device].device

    def resident(self, op: int) -> Tensor:
        return self._resident[op]

    def given(self, op: int, device: int) -> Callable[[], Any]:
        names = {node: number for number, node in enumerate(self.program.placeholders[len(self.program.residents) :])}
        number = next(place for node, place in names.items() if self._number[self._op_of[node]] == op)
        place = self.places[device]
        return lambda: place.given(self._inputs[number])

    def sending(self, op: int, source: int, target: int) -> Callable[[Tensor], None]:
        box, carry = self._box("value", op, target), self._carry(source, target)
        start, end = self.places[source], self.places[target]
        if isinstance(start, Cuda):
            return lambda tensor: box.put(carry(tensor, (start.mark(),)))
        link = self._link(source, target)
        at_once = _SMALL if isinstance(end, Cuda) else -1

        def send(tensor: Tensor) -> None:
            if tensor.nbytes <= at_once:
                box.put(carry(tensor))
            else:
                link.give(lambda: box.put(carry(tensor)))

        return send

    def receiving(self, op: int, source: int, target: int) -> Callable[[], Tensor]:
        box, place = self._box("value", op, target), self.places[target]
        return lambda: place.received(box.take())

    def fetching(self, device: int, number: int, copy: Copy) -> Callable[[], None]:
        parameter = copy.parameter
        box, home = self._box("copy", number, device), int(self.placement.device[parameter])
        value, start, end = self._resident[parameter], self.places[home], self.places[device]
        # Where nobody writes a new value, nobody takes what is added.
        reads = self._reads_of(parameter) if parameter in self._written else None

        def fetched(parcel: Parcel) -> None:
            box.put(parcel)
            if reads is not None:
                reads.add(parcel.arrival)

        if isinstance(end, Cuda):
            slot, source = self._slots[device][number], start if isinstance(start, Cuda) else None
            return lambda: fetched(end.fetch(value, slot, source))
        if isinstance(start, Cuda):
            return lambda: fetched(start.take(value))
        link = self._link(home, device)
        return lambda: link.give(lambda: fetched(copied(value)))

    def fetched(self, device: int, number: int, copy: Copy) -> Callable[[], Tensor]:
        box, place = self._box("copy", number, device), self.places[device]

        def take() -> Tensor:
            parcel: Parcel = box.take()
            place.wait(parcel.arrival)
            return parcel.tensor

        return take

    def read_at_home(self, parameter: int) -> Callable[[], None]:
        reads, place = self._reads_of(parameter), self.places[int(self.placement.device[parameter])]
        return lambda: reads.add(place.mark())

    def updating(self, op: int, touched: list[int], reads: list[int]) -> Callable[..., None]:
        waits = [(self._reads_of(parameter), count) for parameter, count in zip(touched, reads, strict=True) if count]
        write = _copy if self.graph.kinds[op] == "copy" else self.optimizer.update(self.graph.kinds[op])
        place = self.places[int(self.placement.device[op])]

        def update(*tensors: Tensor) -> None:
            for read, count in waits:
                for mark in read.take(count):
                    place.wait(mark)
            write(self.chance.step, *tensors)

        return update

    def going_home(self, parameter: int, source: int, reads: int) -> Callable[[Tensor], None]:
        home = int(self.placement.device[parameter])
        link, carry, start = self._link(source, home, "new values"), self._carry(source, home), self.places[source]
        value, read = self._resident[parameter], self._reads_of(parameter)
        self._num_home += 1

        def write(tensor: Tensor, ready: Mark | None) -> Mark | None:
            arrival = carry(tensor, (ready, *read.take(reads)), value).arrival
            self._done.put(arrival)
            return arrival

        def go(tensor: Tensor) -> None:
            if not isinstance(start, Cuda):
                link.give(lambda: write(tensor, None))
                return
            new = start.leaving(tensor)
            ready = start.mark()
            if read.there(reads):  # as nearly always: then nobody has to be woken
                start.left(write(new, ready), new.nbytes)
            else:
                link.give(lambda: write(new, ready))

        return go

    def drawing(self, target: Any, number: int, device: int) -> Callable[..., Any]:
        return self.chance.drawing(target, number, self.torch_device(device))

    def result(self, number: int) -> Callable[[Any], None]:
        def keep(value: Any) -> None:
            self._results[number] = value

        return keep


def _place(name: str) -> Place:
    device = device_named(name)
    return Cuda(device) if device.type == "cuda" else Cpu()


def _touched(update: Update) -> tuple[str, ...]:
    return update.resident, *update.states


def _copy(step: int, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
