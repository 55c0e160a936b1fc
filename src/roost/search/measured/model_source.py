"""How a process that measures gets the model: by name, from a function, or itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roost.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roost.frontends.tracing.captured_step import CapturedStep
    from roost.runtime.step.optimizers import Optimizer


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model and how its step is captured.

    `model` is the name of a zoo model, `package.module:callable`, a function that gives a module
    and its inputs (one that can be pickled: at the top of a module), or a module and its inputs.
    Settings are for names alone.
    """

    model: str | Callable[[], tuple[nn.Module, Any]] | tuple[nn.Module, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    optimizer: str = "sgd"
    loss: Callable[..., Tensor] | None = None
    update: Optimizer | None = None  # settings of the optimizer; those it has by itself where None
    seed: int = 0  # of the weights, where they are made in the process, and of what the step draws

    def packed(self) -> bytes:
        """Itself as bytes. By value: what a process does to its model does not reach back into
        ours."""
        try:
            return pickle.dumps(self)
        # Pickling asks every object in the model, and each may fail in its own way.
        except Exception as error:
            raise InputError(
                f"the model cannot be given to another process: {error}; name it as "
                f"package.module:callable"
            ) from error

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module, in the mode that is asked for, with its arguments by place and by name."""
        import torch

        torch.manual_seed(self.seed)
        model, inputs = self._made()
        if any(tensor.is_meta for tensor in model.parameters()):
            raise InputError(
                "the model is on the meta device, without weights; what is measured must have some"
            )
        if isinstance(inputs, Mapping):
            return model.train(self.train), (), dict(inputs)
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        return model.train(self.train), args, {}

    def _made(self) -> tuple[nn.Module, Any]:
        if isinstance(self.model, tuple):
            return self.model
        if not isinstance(self.model, str):
            return self.model()
        if ":" not in self.model:
            from roost import zoo

            return zoo.model(self.model, self.train, **self.settings)
        if not self.settings:
            from roost.frontends.torch import load_model

            return load_model(self.model)
        from roost import catalog

        made = catalog.imported(self.model)(**self.settings)
        model, inputs = made if isinstance(made, tuple) else (made, made.example_inputs)
        return model, inputs() if callable(inputs) else inputs

    def described(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
    ) -> CapturedStep:
        """The captured step of what `build` made, as `capture` would have it."""
        from roost.frontends.tracing.captured_step import captured_step
        from roost.frontends.tracing.trace import trace

        program = trace(model, args, kwargs, train=self.train, loss=self.loss)
        return captured_step(program, name, self.optimizer if self.train else None)
