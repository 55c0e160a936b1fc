"""The step as it is without any placement, on one device: PyTorch's own model and optimizer, and
the captured program.

The captured program is run node by node, nothing in place and nothing freed early: slow, and with
nothing of the runtime in it but what ops draw at random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from roost.errors import InputError, RoostError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.trace import without_cache
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.random_ops import RandomOps, is_random

Watch = Callable[[int, Any], None]


def cpu_copy(value: Tensor) -> Tensor:
    """The tensor as it is now, apart from all devices that run."""
    return value.detach().to("cpu", copy=True)


def residents_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {name: value.detach() for name, value in found.items()}


class UnplacedStep:
    """The model and its optimizer, step after step. The model that was given is left alone."""

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
        """`draws_on` tells where an op draws in the placed step: devices of another kind draw other
        numbers."""
        self.step, self.loss, self.device, self.random_ops = step, loss, device, RandomOps(seed)
        self.draws_on = draws_on or (lambda op: device)
        self.train = step.optimizer is not None
        self.model = _moved(copy.deepcopy(model), device).train(self.train)
        self.inputs = _moved(inputs, device)
        self.number = {name: number for number, name in enumerate(step.graph.op_names)}
        values = dict(self.model.named_parameters(remove_duplicate=False))
        self.learning = {name: values[name] for name in step.program.gradients}
        self.optimizer = _optimizer(optimizer, step.optimizer, list(self.learning.values()))

    @property
    def draws(self) -> bool:
        """Whether the step draws at random: then the model itself would draw other numbers."""
        return any(is_random(node.target) for node in self.step.program.module.graph.nodes)

    def captured(self, watch: Watch) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Results, gradients and new values of buffers of the captured program, from where the
        model stands."""
        program, values = self.step.program, residents_of(self.model)
        self.random_ops.step += 1
        residents = []
        for name in program.residents:
            if name not in values and name not in program.constants:
                raise InputError(
                    f"the model has no {name!r}, which the captured step has; it is of another "
                    f"model"
                )
            residents.append(
                (values[name] if name in values else program.constants[name]).to(self.device)
            )
        # Types that autocast chooses are in the program, where it was captured so: they are not
        # chosen once more.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            runner = _ProgramInterpreter(self, watch)
            found = runner.run(
                *residents, *flat(self.inputs, program.inputs), enable_io_processing=False
            )
        flattened = iter([cpu_copy(value) for value in found])
        results = [next(flattened) for _ in program.results]
        gradients = {name: next(flattened) for name in program.gradients}
        return results, gradients, {name: next(flattened) for name in program.new_values}

    def eager(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Results and gradients of the model itself, which changes its buffers."""
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
        parameters = dict(self.model.named_parameters(remove_duplicate=True))
        other = self.step.program.tied
        found = {
            other.get(name, name): p.grad for name, p in parameters.items() if p.grad is not None
        }
        return results, {name: cpu_copy(gradient) for name, gradient in found.items()}

    def _called(self) -> Any:
        with torch.set_grad_enabled(self.train), without_cache(self.model):
            given = self.inputs
            if isinstance(given, Mapping):
                returned = self.model(**given)
            else:
                returned = (
                    self.model(*given) if isinstance(given, tuple | list) else self.model(given)
                )
            returned = returned if self.loss is None else self.loss(returned)
            if self.train:
                _loss_in(returned).backward()  # type: ignore[no-untyped-call]
        return returned

    def update(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """A step of PyTorch's optimizer with these gradients; buffers take these values."""
        for name, parameter in self.learning.items():
            parameter.grad = gradients[name].to(self.device) if name in gradients else None
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        values = residents_of(self.model)
        for name, value in buffers.items():
            values[name].copy_(value)

    def states(self) -> dict[str, Tensor]:
        """What the optimizer keeps for a parameter, named as the ops that keep it in the graph."""
        found: dict[str, Tensor] = {}
        if self.optimizer is not None:
            named = {op: name for name, op in self.resident_ops().items()}
            for update in self.step.updates.values():
                parameter = self.learning.get(named[update.resident])
                held = self.optimizer.state[parameter] if parameter is not None else {}
                for state in update.states:
                    value = held.get(state.rpartition(":")[2].partition("#")[0])
                    found[state] = torch.zeros(()) if value is None else value
        return found

    def resident_ops(self) -> dict[str, str]:
        """Resident of the program -> its op."""
        program = self.step.program
        return {
            n: self.step.op_of[node]
            for n, node in zip(program.residents, program.placeholders, strict=False)
        }


class _ProgramInterpreter(fx.Interpreter):
    """Runs the captured program on one device, and shows what each op makes."""

    def __init__(self, unplaced: UnplacedStep, watch: Watch) -> None:
        super().__init__(unplaced.step.program.module)
        self.unplaced, self.watch = unplaced, watch

    def run_node(self, node: fx.Node) -> Any:
        step = self.unplaced.step
        op = step.op_of.get(node)
        if is_random(node.target):
            assert op is not None
            device = self.unplaced.draws_on(self.unplaced.number[op])
            args, kwargs = _moved(self.fetch_args_kwargs_from_env(node), device)
            draw = self.unplaced.random_ops.seeded(node.target, self.unplaced.number[op], device)
            value = _moved(draw(*args, **kwargs), self.unplaced.device)
        else:
            value = super().run_node(node)
        if op is not None and step.maker[op] is node:
            self.watch(self.unplaced.number[op], value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _moved((args, kwargs), self.unplaced.device)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _moved(super().get_attr(target, args, kwargs), self.unplaced.device)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, and what names a device, on this one; a module with the tensors that are its plain
    attributes."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for name, each in vars(module).items():
                if isinstance(each, Tensor):
                    setattr(module, name, each.to(device))
        return value.to(device)

    def move(each: Any) -> Any:
        return (
            device
            if isinstance(each, torch.device)
            else each.to(device)
            if isinstance(each, Tensor)
            else each
        )

    return tree_map(move, value)


def flat(inputs: Any, names: tuple[str, ...]) -> list[Tensor]:
    """The tensors among the inputs, in the order the program takes them."""
    if isinstance(inputs, Mapping):
        found = {name: value for name, value in _by_name(inputs) if isinstance(value, Tensor)}
        missing = [name for name in names if name not in found]
        if not missing:
            return [found[name] for name in names]
        if len(missing) < len(names):
            raise InputError(
                f"the step takes {', '.join(names)}; it was not given {', '.join(missing)}"
            )
    return [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]


def _by_name(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is inside of inputs, named as exporting does."""
    if isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _by_name(each, f"{name}_{key}" if name else str(key))
    else:
        yield name, value


def check_flags(inputs: Any, flags: Mapping[str, Any]) -> None:
    """Refuse another value of what is no tensor: the program is what came of the one that was
    captured."""
    if isinstance(inputs, Mapping):
        given = {name: value for name, value in _by_name(inputs) if name in flags}
    else:
        values = [value for value in tree_leaves(inputs) if not isinstance(value, Tensor)]
        given = (
            dict(zip(flags, values, strict=True)) if values and len(values) == len(flags) else {}
        )
    for name, value in given.items():
        if value is not flags[name] and value != flags[name]:
            raise InputError(
                f"input {name!r} is {value!r}; it was captured with {flags[name]!r}: capture "
                f"another"
            )


def _loss_in(returned: Any) -> Tensor:
    """The loss among what a model returned, as capturing finds it."""
    if isinstance(returned, Mapping) and "loss" in returned:
        returned = returned["loss"]
    elif not isinstance(returned, Tensor):
        returned = (
            getattr(returned, "loss", None)
            if hasattr(returned, "loss")
            else tree_leaves(returned)[0]
        )
    assert isinstance(returned, Tensor), "it was captured with a loss"
    return returned


def _optimizer(
    settings: Optimizer, kind: str | None, parameters: list[Any]
) -> torch.optim.Optimizer | None:
    """PyTorch's own, one parameter after the other."""
    if kind is None or not parameters:
        return None
    if kind in ("sgd", "momentum"):
        momentum = settings.momentum if kind == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=settings.rate, momentum=momentum, foreach=False)
    common: dict[str, Any] = {
        "lr": settings.rate,
        "betas": settings.betas,
        "eps": settings.epsilon,
        "foreach": False,
    }
    if kind == "adam":
        return torch.optim.Adam(parameters, **common)
    return torch.optim.AdamW(parameters, weight_decay=settings.weight_decay, **common)
