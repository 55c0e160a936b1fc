"""A step without any placement, on one device: the reference that a placed step is compared with.

It runs PyTorch's own model and optimizer, and the captured program node by node. In the captured
program nothing is done in place or freed early: slow, but independent of the graph runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from roost.errors import InputError, RoostError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.trace import without_cache
from roost.runtime.step.calls import call_arguments, input_tensors, loss_of
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.random_ops import RandomOps, is_random

Watch = Callable[[int, Any], None]  # sees the number of each op, and its output


def cpu_copy(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU, where no running device writes into it."""
    return value.detach().to("cpu", copy=True)


def residents_of(model: nn.Module) -> dict[str, Tensor]:
    """Give parameters and buffers by all of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in tensors.items()}


class UnplacedStep:
    """A copy of a model with its optimizer, on one device, for step after step."""

    def __init__(
        self,
        step: CapturedStep,
        model: nn.Module,
        inputs: Any,
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        loss: Callable[..., Tensor] | None = None,
        draws_on: Callable[[int], torch.device] | None = None,
    ) -> None:
        """`draws_on` gives the device where the placed step draws the numbers of a random op.

        Devices of another kind draw other numbers.
        """
        self.step = step
        self.loss = loss
        self.device = device
        self.random_ops = RandomOps(seed)
        self.draws_on = draws_on or (lambda op: device)
        self.train = step.optimizer is not None
        self.model = _moved(copy.deepcopy(model), device).train(self.train)
        self.inputs = _moved(inputs, device)
        values = dict(self.model.named_parameters(remove_duplicate=False))
        self.learning = {name: values[name] for name in step.program.gradients}
        self.optimizer: torch.optim.Optimizer | None = None
        if step.optimizer is not None and self.learning:
            # One parameter after the other, as the graph runtime updates them.
            learning = self.learning.values()
            self.optimizer = optimizer.of_torch(step.optimizer, learning, foreach=False)

    @property
    def draws(self) -> bool:
        """Tell if the step has random ops: the model itself would draw other numbers."""
        return any(is_random(node.target) for node in self.step.program.module.graph.nodes)

    def captured(self, watch: Watch) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Run the captured program from the current weights.

        Returns its results, gradients by parameter and new values of buffers.
        """
        program = self.step.program
        values = {**program.constants, **residents_of(self.model)}
        self.random_ops.step += 1
        for name in program.residents:
            if name not in values:
                raise InputError(
                    f"the step was captured from another model: this model has no {name!r}"
                )
        residents = [values[name].to(self.device) for name in program.residents]
        # The program already has the types that autocast chose when it was captured.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            given = [*residents, *input_tensors(self.inputs, program.inputs)]
            interpreter = _ProgramInterpreter(self, watch)
            outputs = interpreter.run(*given, enable_io_processing=False)
        copies = iter([cpu_copy(value) for value in outputs])
        results = [next(copies) for _ in program.results]
        gradients = {name: next(copies) for name in program.gradients}
        return results, gradients, {name: next(copies) for name in program.new_values}

    def eager(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Call the model itself, which changes its buffers; give results and gradients."""
        self.model.zero_grad(set_to_none=True)
        try:
            returned = self._called()
        except RoostError:
            raise
        except Exception as error:  # whatever the model raises
            raise InputError(
                f"the model itself fails, unplaced: {type(error).__name__}: {error}; there is "
                f"nothing to compare with"
            ) from error
        results = [cpu_copy(value) for value in tree_leaves(returned) if isinstance(value, Tensor)]
        tied = self.step.program.tied
        return results, {
            tied.get(name, name): cpu_copy(parameter.grad)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def _called(self) -> Any:
        args, kwargs = call_arguments(self.inputs)
        with torch.set_grad_enabled(self.train), without_cache(self.model):
            returned = self.model(*args, **kwargs)
            if self.loss is not None:
                returned = self.loss(returned)
            if self.train:
                loss_of(returned).backward()  # type: ignore[no-untyped-call]
        return returned

    def update(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take a step of PyTorch's optimizer with these gradients, and set these buffers."""
        for name, parameter in self.learning.items():
            parameter.grad = gradients[name].to(self.device) if name in gradients else None
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        values = residents_of(self.model)
        for name, value in buffers.items():
            values[name].copy_(value)

    def states(self) -> dict[str, Tensor]:
        """Give the optimizer's states by the names of their ops in the graph."""
        states: dict[str, Tensor] = {}
        if self.optimizer is None:
            return states
        named = {op: name for name, op in self.step.resident_ops.items()}
        for update in self.step.updates.values():
            parameter = self.learning.get(named[update.resident])
            held = self.optimizer.state[parameter] if parameter is not None else {}
            for state in update.states:
                value = held.get(state.rpartition(":")[2].partition("#")[0])
                states[state] = torch.zeros(()) if value is None else value
        return states


class _ProgramInterpreter(fx.Interpreter):
    """Runs the captured program on one device, and shows the output of each op."""

    def __init__(self, unplaced: UnplacedStep, watch: Watch) -> None:
        super().__init__(unplaced.step.program.module)
        self.unplaced = unplaced
        self.watch = watch

    def run_node(self, node: fx.Node) -> Any:
        unplaced = self.unplaced
        step = self.unplaced.step
        op = step.op_of.get(node)
        if op is None:
            return super().run_node(node)
        number = step.graph.index_of(op)
        if is_random(node.target):
            device = unplaced.draws_on(number)
            args, kwargs = _moved(self.fetch_args_kwargs_from_env(node), device)
            draw = unplaced.random_ops.seeded(node.target, number, device)
            value = _moved(draw(*args, **kwargs), unplaced.device)
        else:
            value = super().run_node(node)
        if step.maker[op] is node:
            self.watch(number, value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _moved((args, kwargs), self.unplaced.device)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _moved(super().get_attr(target, args, kwargs), self.unplaced.device)


def _moved(value: Any, device: torch.device) -> Any:
    """Move tensors, and arguments that name a device, to a device; all tensors of a module."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for name, each in vars(module).items():
                if isinstance(each, Tensor):  # a plain attribute, which `to` leaves alone
                    setattr(module, name, each.to(device))
        return value.to(device)

    def move(each: Any) -> Any:
        if isinstance(each, torch.device):
            return device
        return each.to(device) if isinstance(each, Tensor) else each

    return tree_map(move, value)
