"""Whether a placed step has the numbers of the unplaced model; and where not, which op is the first
to differ.

Every step starts from the same weights on both sides and is compared in parts, so that no
difference grows: what the model returns and its gradients with those of PyTorch itself, then what
the optimizer makes of the placed gradients with what PyTorch's makes of the same ones. A step that
draws at random (dropout) cannot be asked of PyTorch, which would draw other numbers: it is compared
with the captured program, run node by node on one device, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

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
from roost.runtime.step.differences import CAPTURED, EAGER, Difference, Differences, Verification
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import UnplacedStep, cpu_copy, flat, residents_of

__all__ = ["Difference", "Verification", "check_devices", "check_weights", "verify"]

_PROBED_BYTES = 2**30  # outputs of ops held at a time to find the first that differs


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
    """Run a placed step and the unplaced model side by side; `model` has weights and is left as it
    is.

    `inputs` are a tensor, a tuple or a dict, and `loss` is what the step was captured with. The
    unplaced model runs on the GPU that most ops are on, or on the CPU where none are. `tolerance`
    is relative to the largest magnitude of each tensor; without it, that of the tensor's type
    counts.
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
    with _exactly():
        found = sides.compared(steps)
        if found.same:
            return found
        op = sides.first_op(found)
    return replace(found, first_op=step.graph.op_names[op], device=sides.device_of(op))


def check_devices(cluster: Cluster) -> None:
    """Refuse devices that this machine does not have."""
    for device in cluster.devices:
        try:
            found = device_named(device.name)
        except InputError as error:
            raise InputError(f"cluster {cluster.name!r}: {error}") from None
        if found.type != device.kind:
            raise InputError(
                f"device {device.name!r} of cluster {cluster.name!r} is of kind {device.kind!r}; "
                f"only cpu, cpu:N and "
                "cuda:N can be run on"
            )


def check_weights(model: nn.Module) -> None:
    for name, value in residents_of(model).items():
        if value.is_meta:
            raise InputError(
                f"{name!r} is on the meta device and has no value; build the model with its weights"
            )


def _check_residents(step: CapturedStep, model: nn.Module) -> None:
    """Refuse a model that is not the one that was captured."""
    values, program = residents_of(model), step.program
    for name, node in zip(program.residents, program.placeholders, strict=False):
        if name in program.constants:
            continue
        wanted, value = node.meta["val"], values.get(name)
        if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
            has = "has none" if value is None else f"has {list(value.shape)} of {value.dtype}"
            raise InputError(
                f"the step was captured from another model: it has {name!r}, {list(wanted.shape)} "
                f"of {wanted.dtype}; "
                f"this model {has}"
            )


@contextmanager
def _exactly() -> Iterator[None]:
    """Without TF32, in which GPUs may multiply float32, and convolve it by themselves; no CPU
    does."""
    settings: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = False
        yield
    finally:
        for setting, allowed in zip(settings, before, strict=True):
            setting.allow_tf32 = allowed


class _Sides:
    """The placed and the unplaced step, from the start as often as wished."""

    def __init__(
        self,
        step: CapturedStep,
        problem: Problem,
        placement: Placement,
        model: nn.Module,
        inputs: Any,
        optimizer: Optimizer,
        seed: int,
        tolerance: float | None,
        loss: Callable[..., Tensor] | None,
    ) -> None:
        self.step, self.problem, self.placement = step, problem, placement
        self.model, self.inputs, self.optimizer = model, inputs, optimizer
        self.seed, self.tolerance, self.loss = seed, tolerance, loss
        self.names = problem.cluster.device_names
        self.number = {name: number for number, name in enumerate(step.graph.op_names)}
        self.update_of = {update.resident: op for op, update in step.updates.items()}

    def device_of(self, op: int) -> str:
        return self.names[int(self.placement.device[op])]

    def _torch_device(self, op: int) -> torch.device:
        return device_named(self.device_of(op))

    @cached_property
    def on(self) -> torch.device:
        """Where the unplaced model runs."""
        counts: dict[str, int] = {}
        for device in self.placement.device.tolist():
            if self.problem.cluster.devices[device].kind == "cuda":
                counts[self.names[device]] = counts.get(self.names[device], 0) + 1
        return device_named(max(counts, key=counts.__getitem__, default="cpu"))

    def compared(self, steps: int) -> Verification:
        """Everything that the step returns, and leaves behind."""
        return self._run(steps, set())[0]

    def first_op(self, found: Verification) -> int:
        """The first op in program order whose output differs."""
        for step in range(1, found.steps + 1):
            for ops in self._chunks():
                if wrong := self._run(step, ops)[1]:
                    return self._producer(min(wrong))
        # No op differs from the captured program: it is what comes after (a value on its way home),
        # or the program.
        return min(
            (self._op_behind(name) for name, each in found.differences.items() if not each.same),
            default=0,
        )

    def _chunks(self) -> Iterator[set[int]]:
        """Ops in program order, as many at a time as can be held."""
        graph, ops, size = self.step.graph, set[int](), 0
        for op in (op for op, yes in enumerate(graph.is_parameter.tolist()) if not yes):
            update = graph.phase[op] == UPDATE
            size += int(graph.bytes_written[op] if update else graph.output_bytes[op])
            ops.add(op)
            if size > _PROBED_BYTES:
                yield ops
                ops, size = set(), 0
        yield ops

    def _producer(self, op: int) -> int:
        """An op with several outputs has an op of kind `output` for each."""
        graph = self.step.graph
        return int(graph.inputs_of(op)[0]) if graph.kinds[op] == "output" else op

    def _op_behind(self, name: str) -> int:
        """The op that makes what is compared by this name."""
        name, program, op_of = name.removesuffix(" (captured)"), self.step.program, self.step.op_of
        if name.startswith("gradient of "):
            node = program.gradients.get(name.removeprefix("gradient of "))
        else:
            node = dict(zip(self._result_names(), program.results, strict=True)).get(name)
        if node is not None:
            return self._producer(self.number[op_of[node]])
        resident, _, _ = name.partition(" (tied to ")
        resident = program.tied.get(resident, resident)
        for op, update in self.step.updates.items():
            if name in update.states or op_of[self._holder(resident)] == update.resident:
                return self.number[op]
        return self.number.get(resident, 0)

    def _holder(self, resident: str) -> Any:
        holders = dict(
            zip(self.step.program.residents, self.step.program.placeholders, strict=False)
        )
        return holders.get(resident, next(iter(holders.values())))

    def _result_names(self) -> list[str]:
        count, train = len(self.step.program.results), self.step.optimizer is not None
        first = "loss" if train else "output"
        return [first if number == 0 else f"output {number}" for number in range(count)]

    def _run(self, steps: int, probed: set[int]) -> tuple[Verification, list[int]]:
        """Some steps on both sides; in the last, the outputs of some ops as well: those that
        differ."""
        program, updates = self.step.program, self.step.updates
        unplaced = UnplacedStep(
            self.step,
            self.model,
            self.inputs,
            self.optimizer,
            self.seed,
            self.on,
            self.loss,
            self._torch_device,
        )
        resident_of = {op: name for name, op in unplaced.resident_ops().items()}
        learned = {self.number[op]: resident_of[u.resident] for op, u in updates.items()}
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
        given = flat(self.inputs, program.inputs)
        with GraphRuntime(
            self.step,
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
                returned = [
                    cpu_copy(value) for value in placed.step(*given) if isinstance(value, Tensor)
                ]
                results, slopes, buffers = unplaced.captured(watch_unplaced)
                differences.several(
                    "output", CAPTURED, self._result_names(), returned, results, " (captured)"
                )
                differences.gradients(CAPTURED, gradients, slopes, " (captured)")
                if not unplaced.draws:
                    results, slopes = unplaced.eager()
                    differences.several("output", EAGER, self._result_names(), returned, results)
                    differences.gradients(EAGER, gradients, slopes)
                unplaced.update(gradients, buffers if unplaced.draws else {})
                self._residents(differences, placed, unplaced, buffers)
        values, states = residents_of(unplaced.model), unplaced.states()
        for op, name in learned.items():
            if op in ours:
                theirs[op] = [
                    values[name],
                    *(states[s] for s in updates[self.step.graph.op_names[op]].states),
                ]
        wrong = [
            op
            for op, value in ours.items()
            if op in theirs and not differences.all_close(value, theirs[op])
        ]
        names = tuple(self.names[device] for device in sorted(set(self.placement.device.tolist())))
        note = (
            "The step draws at random: compared with the captured program on one device."
            if unplaced.draws
            else ""
        )
        return Verification(differences.largest, steps, names, note=note), wrong

    def _residents(
        self,
        differences: Differences,
        placed: GraphRuntime,
        unplaced: UnplacedStep,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Parameters, states, buffers and tied weights after a step."""
        mine, theirs, program = placed.residents(), residents_of(unplaced.model), self.step.program
        parameters = dict(unplaced.model.named_parameters(remove_duplicate=False))
        for name, value in buffers.items():
            differences.one("buffer", CAPTURED, f"{name} (captured)", cpu_copy(mine[name]), value)
        for name in program.residents:
            if name in theirs and not (unplaced.draws and name in buffers):
                what = "parameter" if name in parameters else "buffer"
                differences.one(what, EAGER, name, cpu_copy(mine[name]), cpu_copy(theirs[name]))
        for other, name in program.tied.items():
            if other in theirs:
                differences.one(
                    "tied weight",
                    EAGER,
                    f"{other} (tied to {name})",
                    cpu_copy(mine[name]),
                    cpu_copy(theirs[other]),
                )
        states = placed.states()
        for name, value in unplaced.states().items():
            differences.one("optimizer state", EAGER, name, cpu_copy(states[name]), cpu_copy(value))
