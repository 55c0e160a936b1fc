"""Runs a captured step op by op on the devices of its placement, several steps in a row.

Every device is a thread that runs its own straight function (`code.py`). Tensors that cross are sent once to each
device that reads them, by a thread for each way between two devices, while both go on. A parameter that lives elsewhere
is fetched for its uses into a window, and a new value goes home, exactly as the simulator has it; and no new value is
written before all reads of the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import ExecutionError, InputError
from roost.frontends.torch import Described
from roost.runtime.chance import Chance
from roost.runtime.code import Code
from roost.runtime.lanes import Box, Reads, Worker, copied
from roost.runtime.optimizers import Optimizer
from roost.simulator.reference import Copy


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
        watch: Callable[[int, Any], None] | None = None,
    ) -> None:
        """`residents` has a tensor for each resident of the program by name; they are copied.

        `cores` are those of each device of the kind `cpu`. `watch` sees the output of every op (see `Code`).
        """
        placement = problem.check(placement)
        if problem.graph.digest != step.graph.digest:
            raise InputError(
                f"the problem is of graph {problem.graph.digest}, the captured step is {step.graph.digest}"
            )
        self.program, self.graph, self.placement = step.program, step.graph, placement
        self.device_names = problem.cluster.device_names
        self.optimizer, self.chance = optimizer or Optimizer(), Chance(seed)
        self._number = {name: number for number, name in enumerate(step.graph.op_names)}
        self._boxes: dict[tuple[str, int, int], Box] = {}
        self._reads: dict[int, Reads] = {}
        self._links: dict[tuple[int, int], Worker] = {}
        self._resident = self._at_home(step, residents)
        self._states = [state for update in step.updates.values() for state in update.states]
        self._inputs: list[Any] = []
        self._results: list[Any] = [None] * len(step.program.results)
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._closing, self._num_home = threading.Lock(), 0
        self._error: BaseException | None = None
        code = Code(step, problem, placement, self, watch)
        self._functions = [code.function(device) for device in range(len(self.device_names))]
        self._workers = [
            Worker(name, self._fail, None if cores is None else cores[device])
            for device, name in enumerate(self.device_names)
        ]

    # ------------------------------------------------------------------ use

    def step(self, *inputs: Any) -> list[Any]:
        """Run one step: what the model returns."""
        if self._error is not None:
            raise InputError("this run has failed before, and cannot go on; make another") from self._error
        wanted = len(self.program.inputs)
        self._inputs = [value for value in torch.utils._pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
        if len(self._inputs) != wanted:
            raise InputError(f"the step takes {wanted} tensors, not {len(self._inputs)}")
        self.chance.step += 1
        for device in range(len(self._workers)):
            self._workers[device].give(lambda device=device: self._run(device))  # type: ignore[misc]
        for _ in range(len(self._workers) + self._num_home):
            error = self._done.get()
            if error is not None:
                raise self._told(error) from error
        results, self._results = self._results, [None] * len(self._results)
        self._inputs = []
        return results

    def residents(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by name, as they are now; those of the program, tied ones once."""
        holders = zip(self.program.residents, self.program.placeholders, strict=False)
        return {name: self._resident[self._number[self._op_of[node]]] for name, node in holders}

    def states(self) -> dict[str, Tensor]:
        """What the optimizer keeps, by the name of its op, as it is now."""
        return {name: self._resident[self._number[name]] for name in self._states}

    def close(self) -> None:
        """End all threads."""
        for worker in (*self._workers, *self._links.values()):
            worker.close()

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _at_home(self, step: Described, residents: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Every parameter of the graph, on the device where it lives."""
        found: dict[int, Tensor] = {}
        self._op_of = step.op_of
        names = dict(zip(step.program.placeholders, step.program.residents, strict=False))
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
            found[op] = given.detach().clone()
        for update in step.updates.values():
            like = found[self._number[update.resident]]
            found |= {self._number[state]: torch.zeros_like(like) for state in update.states}
        return found

    def _run(self, device: int) -> None:
        function, _ = self._functions[device]
        function()
        self._done.put(None)

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

    def _link(self, source: int, target: int) -> Worker:
        if (source, target) not in self._links:
            name = f"{self.device_names[source]} to {self.device_names[target]}"
            self._links[source, target] = Worker(name, self._fail)
        return self._links[source, target]

    # ------------------------------------------------------------------ what the code calls

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cpu")

    def resident(self, op: int) -> Tensor:
        return self._resident[op]

    def given(self, op: int, device: int) -> Callable[[], Any]:
        names = {node: number for number, node in enumerate(self.program.placeholders[len(self.program.residents) :])}
        number = next(place for node, place in names.items() if self._number[self._op_of[node]] == op)
        return lambda: self._inputs[number]

    def sending(self, op: int, source: int, target: int) -> Callable[[Tensor], None]:
        box, link = self._box("value", op, target), self._link(source, target)
        return lambda tensor: link.give(lambda: box.put(copied(tensor)))

    def receiving(self, op: int, source: int, target: int) -> Callable[[], Tensor]:
        return self._box("value", op, target).take

    def fetching(self, device: int, number: int, copy: Copy) -> Callable[[], None]:
        parameter = copy.parameter
        box, home = self._box("copy", number, device), int(self.placement.device[parameter])
        link, value = self._link(home, device), self._resident[parameter]
        reads = self._reads.setdefault(parameter, Reads())

        def fetch() -> None:
            box.put(copied(value))
            reads.add()

        return lambda: link.give(fetch)

    def fetched(self, device: int, number: int, copy: Copy) -> Callable[[], Tensor]:
        return self._box("copy", number, device).take

    def read_at_home(self, parameter: int) -> Callable[[], None]:
        return self._reads.setdefault(parameter, Reads()).add

    def updating(self, op: int, touched: list[int], reads: list[int]) -> Callable[..., None]:
        waits = [
            (self._reads.setdefault(parameter, Reads()), count)
            for parameter, count in zip(touched, reads, strict=True)
            if count
        ]
        write = _copy if self.graph.kinds[op] == "copy" else self.optimizer.update(self.graph.kinds[op])

        def update(*tensors: Tensor) -> None:
            for read, count in waits:
                read.wait(count)
            write(self.chance.step, *tensors)

        return update

    def going_home(self, parameter: int, source: int, reads: int) -> Callable[[Tensor], None]:
        home = int(self.placement.device[parameter])
        link, value = self._link(source, home), self._resident[parameter]
        read = self._reads.setdefault(parameter, Reads())
        self._num_home += 1

        def write(tensor: Tensor) -> None:
            read.wait(reads)
            value.copy_(tensor)
            self._done.put(None)

        return lambda tensor: link.give(lambda: write(tensor))

    def drawing(self, target: Any, number: int, device: int) -> Callable[..., Any]:
        return self.chance.drawing(target, number, self.torch_device(device))

    def result(self, number: int) -> Callable[[Any], None]:
        def keep(value: Any) -> None:
            self._results[number] = value

        return keep


def _copy(step: int, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
