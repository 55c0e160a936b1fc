"""The graph runtime: runs a captured step op by op on the devices of its placement.

Launchers are threads, each with its own straight function (`device_code.py`): one for each device,
or one for GPUs and the CPU beside them (`merged.py`). A tensor is sent once to each device that
reads it, while both devices go on (`transfers.py`). As in the simulator, a parameter that lives
elsewhere is fetched into a window, and its new value goes home after all reads of the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.errors import ExecutionError, InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import CudaDevice, RuntimeDevice, device_named
from roost.runtime.ops.device_calls import DeviceCalls
from roost.runtime.ops.device_code import StepCode
from roost.runtime.ops.merged import has_time
from roost.runtime.ops.residents import HomeResidents
from roost.runtime.ops.transfers import launchers
from roost.runtime.step.calls import check_flags, input_tensors
from roost.runtime.step.device_threads import TaskThread
from roost.runtime.step.devices import CpuDevice, Event
from roost.runtime.step.optimizers import Optimizer, Updates
from roost.runtime.step.random_ops import RandomOps
from roost.runtime.step.unplaced import residents_of


class _Launcher(NamedTuple):
    """A thread, its devices and its function in a step."""

    thread: TaskThread
    devices: list[int]
    function: Callable[[], None]
    ops: dict[str, list[int]]  # title of a source -> the op of each of its lines


class GraphRuntime(DeviceCalls):
    """A captured step, placed: call `step` with inputs as often as you like, then `close`."""

    def __init__(
        self,
        step: CapturedStep,
        problem: Problem,
        placement: Placement,
        residents: Mapping[str, Tensor],
        optimizer: Updates | None = None,
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
        """Copy the residents, tensors by the names of the program, and start the launchers.

        - `cores`: for each device the cores of its thread; an empty set leaves them to the system.
          A launcher of several devices has the cores of the CPU.
        - `devices`: default: the devices of this machine that the cluster names.
        - `graphs`: launch segments as CUDA graphs from the second step on. Their outputs stay in
          memory from step to step.
        - `watch`: sees the output of each op (see `StepCode`); not with `graphs`.
        - `states`, `num_steps`: of an earlier run, which this run continues with its residents.
        - `record`: time the ops for `timeline`, which itself takes time; not with `graphs`.
        - `one_thread`: one launcher for the GPUs and one CPU. Default: if the simulator says that
          one thread has the time.
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
                    f"{what}: {len(given)} given, but the cluster has {len(names)} devices; give "
                    f"one for each device"
                )
        if devices is None:
            devices = [_device(name) for name in names]
        random_ops = RandomOps(seed)
        random_ops.step = _checked_steps(num_steps)
        super().__init__(
            step, placement, names, devices, optimizer or Optimizer(), random_ops, graphs, record
        )
        self.problem = problem
        self._resident_ops = step.resident_ops
        self._states = [state for update in step.updates.values() for state in update.states]
        code = StepCode(step, problem, placement, self, watch)
        gpus = [number for number, each in enumerate(devices) if isinstance(each, CudaDevice)]
        if one_thread is None:
            one_thread = 0 < len(gpus) < len(devices) and has_time(code.timeline, gpus)
        self.launchers = launchers(devices, one_thread)
        # Our threads write new values into residents, and no thread inherits the mode of another.
        with torch.inference_mode(False), torch.no_grad():
            self.home_residents = HomeResidents(
                step, placement, devices, code.copies, residents, states
            )
        self._closing = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._error: BaseException | None = None
        self._running: list[_Launcher] = []
        try:
            for members in self.launchers:
                self._launch(code, members, gpus, cores)
        except BaseException:
            self.close()  # or the threads made so far would stay
            raise

    def _launch(
        self,
        code: StepCode,
        devices: list[int],
        gpus: Sequence[int],
        cores: Sequence[set[int]] | None,
    ) -> None:
        function, ops = code.function(devices, gpus)
        # A launcher of GPUs only computes nothing: a pool of threads would be in the way of others.
        num_threads = int(set(devices) <= set(gpus))
        computing = next((device for device in devices if device not in gpus), devices[0])
        title = " and ".join(self.device_names[device] for device in devices)
        own_cores = None if cores is None else cores[computing]
        thread = TaskThread(title, self._fail, own_cores, num_threads)
        self._running.append(_Launcher(thread, devices, function, ops))
        for device in devices:
            thread.submit(self.devices[device].enter)

    # ------------------------------------------------------------------ use

    def step(self, *inputs: Any, **named: Any) -> list[Any]:
        """Run one step; give the outputs of the model.

        Inputs are as they were captured, in that order or by name. Threads that call it take turns.
        """
        with self._one_at_a_time:
            return self._step(inputs, named)

    def _step(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        self._check_usable()
        self._inputs = self._checked_inputs(inputs, named)
        for gpu in {value.device for value in self._inputs if value.is_cuda}:
            torch.cuda.current_stream(gpu).synchronize()  # it may still be computing the inputs
        self.random_ops.step += 1
        for device in self.devices:
            device.begin()
        if self._clock is not None:
            self._clock.begin()
        for launcher in self._running:
            launcher.thread.submit(lambda launcher=launcher: self._run(launcher))  # type: ignore[misc]
        self._await([self._next() for _ in range(len(self._running) + self._num_home)])
        if self._clock is not None:
            self._clock.end()
        results = self._results
        self._results = [None] * len(self._results)
        self._inputs = []
        return results

    def _check_usable(self) -> None:
        if self._error is not None:
            raise InputError("this run has failed before; make another") from self._error
        if not self._running:
            raise InputError("this run is closed; make another")

    def between_steps(self, task: Callable[[int], None]) -> None:
        """Call a task with the number of each device, in the thread that computes there."""
        with self._one_at_a_time:
            self._check_usable()
            for launcher in self._running:
                for device in launcher.devices:
                    launcher.thread.submit(lambda device=device: task(device))  # type: ignore[misc]
                launcher.thread.submit(lambda launcher=launcher: self._finish(launcher))  # type: ignore[misc]
            self._await([self._next() for _ in self._running])

    def _checked_inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        """Give the tensors among the inputs, in the order of the program.

        Sizes are part of the program: inputs of other sizes would give wrong numbers.
        """
        names = self.program.inputs
        if inputs and named:
            raise InputError(
                f"some inputs are given in order and some by name ({', '.join(named)}); give all "
                f"in one way"
            )
        tensors = {name for name, value in named.items() if isinstance(value, Tensor)}
        if named and (odd := tensors ^ set(names)):
            raise InputError(
                f"the step takes {', '.join(names)}; missing or unknown: {', '.join(sorted(odd))}"
            )
        given: Any = named or inputs
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            given = inputs[0]
        check_flags(given, self.program.flags)
        values = input_tensors(given, names)
        if len(values) != len(names):
            raise InputError(
                f"the step takes {len(names)} tensors ({', '.join(names)}), not {len(values)}"
            )
        for (name, node), value in zip(self.program.input_nodes.items(), values, strict=True):
            wanted = node.meta["val"]
            if value.shape != wanted.shape or value.dtype != wanted.dtype:
                raise InputError(
                    f"input {name!r} is {list(value.shape)} of {value.dtype}; the step was "
                    f"captured with {list(wanted.shape)} of {wanted.dtype}"
                )
        return values

    def residents(self) -> dict[str, Tensor]:
        """Give parameters, buffers and constants by name, as they are now; tied ones once."""
        tensor = self.home_residents.tensor
        return {name: tensor[self.graph.index_of(op)] for name, op in self._resident_ops.items()}

    def write_back(self, model: torch.nn.Module) -> None:
        """Copy the current values of parameters and buffers into a model."""
        tensors = residents_of(model)
        values = self.residents()
        for name, value in values.items():  # before anything is written
            own = tensors.get(name)
            if own is None and name not in self.program.constants:
                raise InputError(
                    f"the step was captured from another model: this model has no {name!r}"
                )
            if own is not None and (own.shape, own.dtype) != (value.shape, value.dtype):
                raise InputError(
                    f"the step was captured from another model: {name!r} is {list(value.shape)} of "
                    f"{value.dtype} in the step, {list(own.shape)} of {own.dtype} in this model"
                )
        with torch.no_grad():
            for name, value in values.items():
                if name in tensors:
                    tensors[name].copy_(value)

    def peak_memory(self) -> dict[str, int]:
        """Give the most bytes in use on each CUDA device in the last step.

        Residents and the window are included.
        """
        named = zip(self.device_names, self.devices, strict=True)
        return {
            name: device.peak_memory for name, device in named if isinstance(device, CudaDevice)
        }

    def timeline(self) -> Timeline:
        """Give the measured timeline of the last step; see `roost.runtime.ops.op_clock`."""
        if self._clock is None:
            raise InputError("ops were not timed; make the run with record=True")
        return self._clock.timeline(self.problem, self.placement, self.peak_memory())

    def states(self) -> dict[str, Tensor]:
        """Give the optimizer's states by the names of their ops, as they are now."""
        tensor = self.home_residents.tensor
        return {name: tensor[self.graph.index_of(name)] for name in self._states}

    @property
    def num_steps(self) -> int:
        """Steps that were taken, with those of an earlier run that this one continues."""
        return self.random_ops.step

    def close(self) -> None:
        """End all threads; the memory goes back with the last reference to this."""
        for thread in (*(launcher.thread for launcher in self._running), *self._links.values()):
            thread.close()
        for device in self.devices:
            device.close()
        # These refer back to this object.
        self._running.clear()
        self._links.clear()
        if self._error is not None:
            self._error = ExecutionError(str(self._error))

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _run(self, launcher: _Launcher) -> None:
        launcher.function()
        self._finish(launcher)

    def _finish(self, launcher: _Launcher) -> None:
        """Report that all work given to a launcher is done."""
        for device in launcher.devices:
            try:
                self.devices[device].finish()
            except RuntimeError as error:  # of an op that was launched long before
                name = self.device_names[device]
                raise ExecutionError(f"{name} failed: {error}", device=name) from error
        self._done.put(None)

    def _next(self) -> Event | None:
        """Wait for a launcher to end (None), or for a new value to be sent home."""
        done = self._done.get()
        if isinstance(done, BaseException):
            raise self._execution_error(done) from done
        return done

    def _await(self, events: Sequence[Event | None]) -> None:
        """Wait until new values are home.

        Only after all devices are done: until then they may need every core.
        """
        try:
            for event in events:
                if event is not None:
                    event.synchronize()
        except RuntimeError as error:
            self._fail(error)
            raise self._execution_error(error) from error

    def _fail(self, error: BaseException) -> None:
        """End the run after the first failure."""
        with self._closing:
            if self._error is None:
                self._error = error
                self._done.put(error)
        super()._fail(error)

    def _execution_error(self, error: BaseException) -> ExecutionError:
        """Name the op that failed, by the line of the function that raised the error."""
        if isinstance(error, ExecutionError):
            return error
        failed: int | None = None
        trace = error.__traceback__
        while trace is not None:
            title = trace.tb_frame.f_code.co_filename
            line = trace.tb_lineno
            for launcher in self._running:
                if title in launcher.ops:
                    failed = launcher.ops[title][line - 1]
            trace = trace.tb_next
        if failed is None:
            return ExecutionError(f"a transfer failed: {error}")
        name = self.graph.op_names[failed]
        on = self.device_names[self.placement.device[failed]]
        return ExecutionError(f"op {name!r} failed on {on}: {error}", name, on)


def _device(name: str) -> RuntimeDevice:
    device = device_named(name)
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def _checked_steps(num_steps: int) -> int:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
        raise InputError(f"num_steps is {num_steps!r}; it must be a whole number, not negative")
    return num_steps
