"""Verification of a placed step: compares it with the unplaced model, op by op if they differ.

`roost verify` calls it. Every step starts from the same weights on both sides and is compared in
parts, so that no difference grows. Outputs and gradients are compared with those of PyTorch itself.
Then PyTorch's optimizer takes the placed gradients, and the new weights are compared. PyTorch
itself would draw other numbers in a step with random ops (dropout): such a step is compared with
the captured program only, run node by node on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roost.core.cluster import Cluster
from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.cuda import device_named
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.calls import input_tensors
from roost.runtime.step.differences import CAPTURED, EAGER, Difference, Differences, Verification
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import UnplacedStep, cpu_copy, residents_of

__all__ = ["Difference", "Verification", "check_devices", "check_weights", "verify"]

_PROBED_BYTES = 2**30  # of op outputs kept at a time, to find the first that differs


def verify(
    step: CapturedStep,
    problem: Problem,
    placement: Placement,
    model: nn.Module,
    inputs: Any,
    *,
    optimizer: Optimizer | None = None,
    steps: int = 1,
    seed: int = 0,
    tolerance: float | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> Verification:
    """Run a placed step and the unplaced model side by side. The model stays as it is.

    - `inputs`: a tensor, a tuple or a dict.
    - `loss`: the one that the step was captured with.
    - `tolerance`: relative to the largest magnitude of each tensor. Default: by the tensor's type.

    The unplaced model runs on the GPU that has most ops, or on the CPU if no GPU has any.
    """
    placement = problem.check(placement)
    check_devices(problem.cluster)
    check_weights(model)
    _check_residents(step, model)
    if steps < 1:
        raise InputError(f"steps is {steps}; it must be at least 1")
    sides = _Sides(
        step, problem, placement, model, inputs, optimizer or Optimizer(), seed, tolerance, loss
    )
    with _without_tf32():
        verification, _ = sides.compared(steps)
        if verification.same:
            return verification
        op = sides.first_op(verification)
    return replace(verification, first_op=step.graph.op_names[op], device=sides.device_of(op))


def check_devices(cluster: Cluster) -> None:
    """Raise if this machine does not have a device of the cluster."""
    for device in cluster.devices:
        try:
            kind = device_named(device.name).type
        except InputError as error:
            raise InputError(f"cluster {cluster.name!r}: {error}") from None
        if kind != device.kind:
            raise InputError(
                f"device {device.name!r} of cluster {cluster.name!r} is of kind {device.kind!r}; "
                f"only cpu, cpu:N and "
                "cuda:N can be run on"
            )


def check_weights(model: nn.Module) -> None:
    """Raise if a weight has no value."""
    for name, value in residents_of(model).items():
        if value.is_meta:
            raise InputError(
                f"{name!r} is on the meta device and has no value; build the model with its weights"
            )


def _check_residents(step: CapturedStep, model: nn.Module) -> None:
    """Raise if the step was captured from another model."""
    values = residents_of(model)
    program = step.program
    for name, node in program.resident_nodes.items():
        if name in program.constants:
            continue
        wanted = node.meta["val"]
        value = values.get(name)
        if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
            has = "has none" if value is None else f"has {list(value.shape)} of {value.dtype}"
            raise InputError(
                f"the step was captured from another model: it has {name!r}, {list(wanted.shape)} "
                f"of {wanted.dtype}; "
                f"this model {has}"
            )


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Turn off TF32, in which GPUs may multiply and convolve float32 values; no CPU has it."""
    settings: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = False
        yield
    finally:
        for setting, allowed in zip(settings, before, strict=True):
            setting.allow_tf32 = allowed


@dataclass(frozen=True)
class _Sides:
    """The placed and the unplaced step; both can start again as often as needed."""

    step: CapturedStep
    problem: Problem
    placement: Placement
    model: nn.Module
    inputs: Any
    optimizer: Optimizer
    seed: int
    tolerance: float | None
    loss: Callable[..., Tensor] | None

    def device_of(self, op: int) -> str:
        return self.problem.cluster.device_names[int(self.placement.device[op])]

    def _torch_device(self, op: int) -> torch.device:
        return device_named(self.device_of(op))

    @cached_property
    def unplaced_device(self) -> torch.device:
        """The device of the unplaced model."""
        devices = self.problem.cluster.devices
        ops = Counter(
            devices[number].name
            for number in self.placement.device.tolist()
            if devices[number].kind == "cuda"
        )
        return device_named(max(ops, key=ops.__getitem__, default="cpu"))

    def first_op(self, verification: Verification) -> int:
        """Give the first op in program order whose output differs."""
        for step in range(1, verification.steps + 1):
            for ops in self._chunks():
                _, wrong = self.compared(step, ops)
                if wrong:
                    return self._producer(min(wrong))
        # No op differs from the captured program. So the difference comes later (a value on its way
        # home), or from the program itself.
        differences = verification.differences.items()
        return min(
            (self._op_behind(name) for name, each in differences if not each.same), default=0
        )

    def _chunks(self) -> Iterator[set[int]]:
        """Give ops in program order, as many at a time as memory can hold."""
        graph = self.step.graph
        ops = set[int]()
        size = 0
        for op in np.flatnonzero(~graph.is_parameter).tolist():
            update = graph.phase[op] == UPDATE
            size += int(graph.bytes_written[op] if update else graph.output_bytes[op])
            ops.add(op)
            if size > _PROBED_BYTES:
                yield ops
                ops = set()
                size = 0
        yield ops

    def _producer(self, op: int) -> int:
        """Give the op itself, or the op with several outputs of which it is one."""
        graph = self.step.graph
        return int(graph.inputs_of(op)[0]) if graph.kinds[op] == "output" else op

    def _op_behind(self, name: str) -> int:
        """Give the op that makes the tensor which is compared by this name."""
        name = name.removesuffix(" (captured)")
        program = self.step.program
        graph = self.step.graph
        if name.startswith("gradient of "):
            node = program.gradients.get(name.removeprefix("gradient of "))
        else:
            node = dict(zip(self._result_names(), program.results, strict=True)).get(name)
        if node is not None:
            return self._producer(graph.index_of(self.step.op_of[node]))
        resident, _, _ = name.partition(" (tied to ")
        resident = program.tied.get(resident, resident)
        ops = self.step.resident_ops
        holder = ops.get(resident, next(iter(ops.values())))
        for op, update in self.step.updates.items():
            if name in update.states or holder == update.resident:
                return graph.index_of(op)
        return graph.index_of(resident) if resident in graph.op_names else 0

    def _result_names(self) -> list[str]:
        count = len(self.step.program.results)
        train = self.step.optimizer is not None
        first = "loss" if train else "output"
        return [first if number == 0 else f"output {number}" for number in range(count)]

    def compared(self, steps: int, probed: Collection[int] = ()) -> tuple[Verification, list[int]]:
        """Run some steps on both sides and compare all that they return and leave behind.

        Also gives those of the probed ops whose outputs differ in the last step.
        """
        step = self.step
        program = self.step.program
        updates = self.step.updates
        unplaced = UnplacedStep(
            step,
            self.model,
            self.inputs,
            self.optimizer,
            self.seed,
            self.unplaced_device,
            self.loss,
            self._torch_device,
        )
        resident_of = {op: name for name, op in step.resident_ops.items()}
        learned = {step.graph.index_of(op): resident_of[u.resident] for op, u in updates.items()}
        gradients: dict[str, Tensor] = {}
        ours: dict[int, list[Tensor]] = {}
        theirs: dict[int, list[Tensor]] = {}
        last = False

        def watch_placed(op: int, value: Any) -> None:
            if op in learned:
                new, made_of, *states = value
                if learned[op] in program.gradients:
                    gradients[learned[op]] = cpu_copy(made_of)
                value = [new, *states]
            if last and op in probed and not isinstance(value, tuple):
                ours[op] = [cpu_copy(each) for each in tree_leaves(value)]

        def watch_unplaced(op: int, value: Any) -> None:
            if last and op in probed and isinstance(value, Tensor):
                theirs[op] = [cpu_copy(value)]

        differences = Differences(self.tolerance)
        captured = " (captured)"
        given = input_tensors(self.inputs, program.inputs)
        names = self._result_names()
        with GraphRuntime(
            step,
            self.problem,
            self.placement,
            residents_of(self.model),
            self.optimizer,
            seed=self.seed,
            watch=watch_placed,
        ) as placed:
            for differences.step in range(1, steps + 1):
                last = differences.step == steps
                gradients.clear()
                outputs = placed.step(*given)
                returned = [cpu_copy(value) for value in outputs if isinstance(value, Tensor)]
                results, slopes, buffers = unplaced.captured(watch_unplaced)
                differences.outputs(CAPTURED, names, returned, results, captured)
                differences.gradients(CAPTURED, gradients, slopes, captured)
                if not unplaced.draws:
                    results, slopes = unplaced.eager()
                    differences.outputs(EAGER, names, returned, results)
                    differences.gradients(EAGER, gradients, slopes)
                unplaced.update(gradients, buffers if unplaced.draws else {})
                self._compare_residents(differences, placed, unplaced, buffers)
        values = residents_of(unplaced.model)
        states = unplaced.states()
        for op in learned.keys() & ours.keys():
            kept = updates[step.graph.op_names[op]].states
            theirs[op] = [values[learned[op]], *(states[state] for state in kept)]
        wrong = [
            op
            for op, value in ours.items()
            if op in theirs and not differences.all_close(value, theirs[op])
        ]
        used = sorted(set(self.placement.device.tolist()))
        devices = tuple(self.problem.cluster.device_names[device] for device in used)
        note = ""
        if unplaced.draws:
            note = "The step draws at random: compared with the captured program on one device."
        return Verification(differences.largest, steps, devices, note=note), wrong

    def _compare_residents(
        self,
        differences: Differences,
        placed: GraphRuntime,
        unplaced: UnplacedStep,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Compare parameters, optimizer states, buffers and tied weights after a step."""
        mine = placed.residents()
        theirs = residents_of(unplaced.model)
        program = self.step.program
        parameters = dict(unplaced.model.named_parameters(remove_duplicate=False))

        def compare(what: str, name: str, one: Tensor, other: Tensor, by: str = EAGER) -> None:
            differences.one(what, by, name, cpu_copy(one), cpu_copy(other))

        for name, value in buffers.items():
            compare("buffer", f"{name} (captured)", mine[name], value, CAPTURED)
        for name in program.residents:
            if name in theirs and not (unplaced.draws and name in buffers):
                what = "parameter" if name in parameters else "buffer"
                compare(what, name, mine[name], theirs[name])
        for other, name in program.tied.items():
            if other in theirs:
                compare("tied weight", f"{other} (tied to {name})", mine[name], theirs[other])
        states = placed.states()
        for name, value in unplaced.states().items():
            compare("optimizer state", name, states[name], value)
