"""The model of a measured search, as the worker process gets it."""

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
    """A model and the settings with which its step is captured.

    `model` is the name of a zoo model, `package.module:callable`, a picklable function that returns
    a module and its inputs, or a module and its inputs. Only names take `settings`.
    """

    model: str | Callable[[], tuple[nn.Module, Any]] | tuple[nn.Module, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    optimizer: str = "sgd"
    loss: Callable[..., Tensor] | None = None
    update: Optimizer | None = None  # settings of the optimizer; its defaults if None
    seed: int = 0  # of new weights, and of random ops

    def packed(self) -> bytes:
        """The source as bytes: the process gets a copy of the model."""
        try:
            return pickle.dumps(self)
        except Exception as error:  # each object in the model may fail in its own way
            raise InputError(
                f"the model cannot be given to another process: {error}; "
                "name it as package.module:callable"
            ) from error

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module in training or inference mode, with its arguments by place and by name."""
        import torch

        torch.manual_seed(self.seed)
        model, inputs = self._made()
        if any(tensor.is_meta for tensor in model.parameters()):
            raise InputError(
                "the model is on the meta device, without weights; to run it needs weights"
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
        from roost.frontends.torch import load_model

        return load_model(self.model, self.settings)

    def described(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
    ) -> CapturedStep:
        """The captured step of a model from `build`, as `capture` describes it."""
        from roost.frontends.tracing.captured_step import captured_step
        from roost.frontends.tracing.trace import trace

        program = trace(model, args, kwargs, train=self.train, loss=self.loss)
        return captured_step(program, name, self.optimizer if self.train else None)
