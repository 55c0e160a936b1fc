"""Runs a captured step op by op on the devices of its placement, several steps in a row.

Devices are run by hosts, each a thread with its own straight function (`code.py`): one for each
device, or one for GPUs and a CPU beside them (`merged.py`). Tensors that cross are sent once to
each device that reads them while both go on (`transfers.py`). A parameter that lives elsewhere is
fetched for its uses into a window, and a new value goes home, exactly as the simulator has it; and
no new value is written before all reads of the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.errors import ExecutionError, InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import CudaDevice, device_named
from roost.runtime.ops.device_code import StepCode
from roost.runtime.ops.merged import has_time
from roost.runtime.ops.op_clock import OpClock
from roost.runtime.ops.residents import HomeResidents
from roost.runtime.ops.segments import Capture
from roost.runtime.ops.transfers import TransferCalls, launchers
from roost.runtime.step.device_threads import TaskThread
from roost.runtime.step.devices import CpuDevice, Event, RuntimeDevice
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.random_ops import RandomOps
from roost.runtime.step.unplaced import check_flags, flat


class GraphRuntime(TransferCalls):
    """A captured step, placed: call `step` with inputs as often as wished, then `close`."""

    def __init__(
        self,
        step: CapturedStep,
        problem: Problem,
        placement: Placement,
        residents: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        cores: Sequence[set[int]] | None = None,
        seed: int = 0,
        devices: Sequence[RuntimeDevice] | None = None,
        graphs: bool = False,
        watch: Callable[[int, Any], None] | None = None,
        states: Mapping[str, Tensor] | None = None,
        num_steps: int = 0,
        record: bool = False,
        one_thread: bool | None = None,
    ) -> None:
        """`residents` has a tensor for each resident of the program by name; they are copied.

        `cores` are those of the thread of each device, of the CPU's where others share it; an empty
        set leaves it to the system. `devices` are by default those of this machine that
        have the names of the cluster's. With `graphs` runs of ops without transfers are launched as
        CUDA graphs from the second step on; what they make is kept from step to step. `watch` sees
        the output of every op (see `Code`); not with `graphs`. `states` and `num_steps` are those
        of a run that this one goes on from, with its residents: it then does what that would have
        done. With `record` ops are timed, for `timeline`, which takes some time itself; not with
        `graphs`. Whether one thread has the GPUs and the CPU beside them (one CPU, not several) is
        up to what the simulator says of its time, or to `one_thread`.
        """
        placement = problem.check(placement)
        if problem.graph.digest != step.graph.digest:
            raise InputError(
                f"the problem is of graph {problem.graph.digest}, the captured step is "
                f"{step.graph.digest}"
            )
        if graphs and (watch is not None or record):
            raise InputError(
                "ops that are launched as CUDA graphs cannot be watched or timed; leave out graphs"
            )
        names = problem.cluster.device_names
        for what, given in (("cores", cores), ("devices", devices)):
            if given is not None and len(given) != len(names):
                raise InputError(
                    f"{what} are {len(given)}; the cluster has {len(names)} devices, so give one "
                    f"for each"
                )
        super().__init__(names, [_place(name) for name in names] if devices is None else devices)
        self.program, self.graph, self.placement, self.problem = (
            step.program,
            step.graph,
            placement,
            problem,
        )
        self._clock = OpClock(self.devices) if record else None
        self.optimizer, self.random_ops = optimizer or Optimizer(), RandomOps(seed)
        self.random_ops.step = _checked_steps(num_steps)
        self._number = {name: number for number, name in enumerate(step.graph.op_names)}
        self._op_of, self._graphs = step.op_of, graphs
        self._states = [state for update in step.updates.values() for state in update.states]
        code = StepCode(step, problem, placement, self, watch)
        launched_ahead = [
            device for device, place in enumerate(self.devices) if isinstance(place, CudaDevice)
        ]
        if one_thread is None:
            one_thread = 0 < len(launched_ahead) < len(self.devices) and has_time(
                code.timeline, launched_ahead
            )
        self.launchers = launchers(self.devices, one_thread)
        with torch.inference_mode(False), torch.no_grad():
            # Threads of ours write new values into them, and no thread takes over the mode of
            # another.
            self.home_residents = HomeResidents(
                step, placement, self.devices, code.copies, residents, states
            )
        self._inputs: list[Any] = []
        self._results: list[Any] = [None] * len(step.program.results)
        self._closing, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._error: BaseException | None = None
        self._functions: list[tuple[Callable[[], None], dict[str, list[int]]]] = []
        self._workers: list[TaskThread] = []
        try:
            for host in self.launchers:
                self._functions.append(code.function(host, launched_ahead))
                # Whoever only tells a GPU what to do computes nothing: a pool of threads would be
                # in the way of others.
                threads = int(set(host) <= set(launched_ahead))
                mine = next((device for device in host if device not in launched_ahead), host[0])
                title = " and ".join(names[device] for device in host)
                self._workers.append(
                    TaskThread(title, self._fail, None if cores is None else cores[mine], threads)
                )
                for device in host:
                    self._workers[-1].submit(self.devices[device].enter)
        except BaseException:
            self.close()  # or the threads that were made so far would stay
            raise

    # ------------------------------------------------------------------ use

    def step(self, *inputs: Any, **named: Any) -> list[Any]:
        """Run one step: what the model returns. Inputs are as they were captured, in that order or
        by name.

        Threads that call it take turns.
        """
        with self._one_at_a_time:
            return self._step(inputs, named)

    def _step(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        if self._error is not None:
            raise InputError(
                "this run has failed before, and cannot go on; make another"
            ) from self._error
        if not self._workers:
            raise InputError("this run is closed; make another")
        given: Any = named or inputs
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            given = inputs[0]
        if inputs and named:
            raise InputError(
                f"inputs are given in order and by name ({', '.join(named)}); give them all in "
                f"one way"
            )
        tensors = {name for name, value in named.items() if isinstance(value, Tensor)}
        if named and (odd := tensors ^ set(self.program.inputs)):
            takes = ", ".join(self.program.inputs)
            raise InputError(
                f"the step takes {takes}; missing, or not one of these: {', '.join(sorted(odd))}"
            )
        check_flags(given, self.program.flags)
        self._inputs = self._checked(flat(given, self.program.inputs))
        for gpu in {value.device for value in self._inputs if value.is_cuda}:
            torch.cuda.current_stream(gpu).synchronize()  # whoever made them may still be at it
        self.random_ops.step += 1
        for place in self.devices:
            place.begin()
        if self._clock is not None:
            self._clock.begin()
        for host in range(len(self._workers)):
            self._workers[host].submit(lambda host=host: self._run(host))  # type: ignore[misc]
        self._await([self._next() for _ in range(len(self._workers) + self._num_home)])
        if self._clock is not None:
            self._clock.end()
        results, self._results = self._results, [None] * len(self._results)
        self._inputs = []
        return results

    def _checked(self, given: list[Tensor]) -> list[Tensor]:
        """Refuse other inputs than were captured: sizes are in the program, and others would give
        wrong numbers."""
        names, nodes = self.program.inputs, self.program.placeholders[len(self.program.residents) :]
        if len(given) != len(names):
            raise InputError(
                f"the step takes {len(names)} tensors ({', '.join(names)}), not {len(given)}"
            )
        for name, node, value in zip(names, nodes, given, strict=True):
            wanted = node.meta["val"]
            if value.shape != wanted.shape or value.dtype != wanted.dtype:
                raise InputError(
                    f"input {name!r} is {list(value.shape)} of {value.dtype}; the step was "
                    f"captured with "
                    f"{list(wanted.shape)} of {wanted.dtype}"
                )
        return given

    def residents(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by name, as they are now; those of the program, tied
        ones once."""
        holders = zip(self.program.residents, self.program.placeholders, strict=False)
        return {
            name: self.home_residents.tensor[self._number[self._op_of[node]]]
            for name, node in holders
        }

    def write_back(self, model: torch.nn.Module) -> None:
        """Give a model the values that its parameters and buffers have now; tied ones under all
        their names."""
        there = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        with torch.no_grad():
            for name, value in self.residents().items():
                if name in there:
                    there[name].copy_(value)
                elif name not in self.program.constants:
                    raise InputError(
                        f"the model has no {name!r}, which the captured step has; it is another "
                        f"model"
                    )

    def peak_memory(self) -> dict[str, int]:
        """The most bytes in use on each CUDA device in the last step, residents and window among
        them."""
        named = zip(self.device_names, self.devices, strict=True)
        return {name: place.peak_memory for name, place in named if isinstance(place, CudaDevice)}

    def timeline(self) -> Timeline:
        """When each op of the last step began and ended; see `roost.runtime.ops.op_clock`."""
        if self._clock is None:
            raise InputError("ops were not timed; make the run with record=True")
        return self._clock.timeline(self.problem, self.placement, self.peak_memory())

    def states(self) -> dict[str, Tensor]:
        """What the optimizer keeps, by the name of its op, as it is now."""
        return {name: self.home_residents.tensor[self._number[name]] for name in self._states}

    @property
    def num_steps(self) -> int:
        """Steps that were taken, those of a run that this one went on from included."""
        return self.random_ops.step

    def close(self) -> None:
        """End all threads; the memory goes back with the last reference to this, and no later."""
        for worker in (*self._workers, *self._links.values()):
            worker.close()
        for place in self.devices:
            place.close()
        # All of these lead back here.
        self._workers.clear()
        self._links.clear()
        self._functions.clear()
        if self._error is not None:
            self._error = ExecutionError(str(self._error))

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _run(self, host: int) -> None:
        function, _ = self._functions[host]
        function()
        for device in self.launchers[host]:
            try:
                self.devices[device].finish()
            except RuntimeError as error:  # of an op told long before
                name = self.device_names[device]
                raise ExecutionError(f"{name} failed: {error}", device=name) from error
        self._done.put(None)

    def _next(self) -> Event | None:
        """The next thing that a step waits for: a host that is done (None), or a new value on its
        way home."""
        found = self._done.get()
        if isinstance(found, BaseException):
            raise self._execution_error(found) from found
        return found

    def _await(self, events: Sequence[Event | None]) -> None:
        """Wait for new values to be home; after all devices are done, which may need every core
        till then."""
        try:
            for event in events:
                if event is not None:
                    event.synchronize()
        except RuntimeError as error:
            self._fail(error)
            raise self._execution_error(error) from error

    def _fail(self, error: BaseException) -> None:
        """The first failure ends all: whoever waits for something is told that nothing will
        come."""
        with self._closing:
            if self._error is None:
                self._error = error
                self._done.put(error)
        super()._fail(error)

    def _execution_error(self, error: BaseException) -> ExecutionError:
        """The error with the op that failed, by the line of the function that it came from."""
        if isinstance(error, ExecutionError):
            return error
        told = ExecutionError(f"a transfer failed: {error}")
        trace = error.__traceback__
        while trace is not None:
            for _, parts in self._functions:
                if (ops := parts.get(trace.tb_frame.f_code.co_filename)) is not None:
                    op = ops[trace.tb_lineno - 1]
                    name, on = self.graph.op_names[op], self.device_names[self.placement.device[op]]
                    told = ExecutionError(f"op {name!r} failed on {on}: {error}", name, on)
            trace = trace.tb_next
        return told

    # ------------------------------------------------------------------ what the code calls

    def torch_device(self, device: int) -> torch.device:
        return self.devices[device].device

    def resident(self, op: int) -> Tensor:
        return self.home_residents.tensor[op]

    def input_of(self, op: int, device: int) -> Callable[[], Any]:
        names = {
            node: number
            for number, node in enumerate(self.program.placeholders[len(self.program.residents) :])
        }
        number = next(
            place for node, place in names.items() if self._number[self._op_of[node]] == op
        )
        place = self.devices[device]
        return lambda: place.bring_input(self._inputs[number])

    def updating(self, op: int, touched: list[int], reads: list[int]) -> Callable[..., None]:
        waits = [
            (self._reads_of(parameter), count)
            for parameter, count in zip(touched, reads, strict=True)
            if count
        ]
        write = (
            _copy if self.graph.kinds[op] == "copy" else self.optimizer.update(self.graph.kinds[op])
        )
        place = self.devices[int(self.placement.device[op])]

        def update(*tensors: Tensor) -> None:
            for read, count in waits:
                for event in read.take(count):
                    place.wait(event)
            write(self.random_ops.step, *tensors)

        return update

    def drawing(self, target: Any, number: int, device: int) -> Callable[..., Any]:
        return self.random_ops.seeded(target, number, self.torch_device(device))

    def capturing(self, device: int) -> Capture | None:
        place = self.devices[device]
        return (
            place.engine.capturing(place.device)
            if self._graphs and isinstance(place, CudaDevice)
            else None
        )

    def timing(self, op: int, device: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
        return None if self._clock is None else self._clock.around(op, device)

    def keeping_result(self, number: int) -> Callable[[Any], None]:
        def keep(value: Any) -> None:
            # A graph makes it there the next time too.
            self._results[number] = value.clone() if self._graphs else value

        return keep


def _place(name: str) -> RuntimeDevice:
    device = device_named(name)
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def _checked_steps(num_steps: int) -> int:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
        raise InputError(f"num_steps is {num_steps!r}; it must be a whole number, not negative")
    return num_steps


def _copy(step: int, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
