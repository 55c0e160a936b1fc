"""Steps of an optimizer for one parameter, in place, equal to `torch.optim` to the last bit.

Op for op, `cost_models/timing/updates.py` times the same arithmetic; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Optimizer:
    """Settings of a captured step's optimizer; PyTorch's defaults, except for the rate of SGD."""

    rate: float = 1e-3
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2  # adamw only

    def of_torch(
        self, kind: str, parameters: Iterable[Any], foreach: bool | None = None
    ) -> torch.optim.Optimizer:
        """Make PyTorch's own optimizer of a kind with these settings."""
        if kind in ("sgd", "momentum"):
            momentum = self.momentum if kind == "momentum" else 0.0
            return torch.optim.SGD(parameters, lr=self.rate, momentum=momentum, foreach=foreach)
        settings: dict[str, Any] = {
            "lr": self.rate,
            "betas": self.betas,
            "eps": self.epsilon,
            "foreach": foreach,
        }
        if kind == "adam":
            return torch.optim.Adam(parameters, **settings)
        return torch.optim.AdamW(parameters, weight_decay=self.weight_decay, **settings)

    def update(self, kind: str) -> Callable[..., None]:
        """Give the function that updates a parameter.

        It takes the number of the step, counted from 1, the parameter, its gradient and its states.
        """
        update: Callable[..., None] = getattr(self, f"_{kind}")
        return update

    def _sgd(self, step: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.add_(gradient, alpha=-self.rate)

    def _momentum(self, step: int, parameter: Tensor, gradient: Tensor, velocity: Tensor) -> None:
        velocity.mul_(self.momentum).add_(gradient)
        parameter.add_(velocity, alpha=-self.rate)

    def _adam(
        self, step: int, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
    ) -> None:
        first, second = self.betas
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = self.rate / (1 - first**step)
        denominator = square.sqrt().div_(sqrt(1 - second**step)).add_(self.epsilon)
        parameter.addcdiv_(mean, denominator, value=-size)

    def _adamw(
        self, step: int, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
    ) -> None:
        parameter.mul_(1 - self.rate * self.weight_decay)
        self._adam(step, parameter, gradient, mean, square)

    def _keep(self, step: int, parameter: Tensor, gradient: Tensor, *states: Tensor) -> None:
        states[-1].add_(gradient)


class Updates(Protocol):
    """The functions that write new values of parameters, such as an `Optimizer`."""

    def update(self, kind: str) -> Callable[..., None]:
        """Give the function that updates a parameter; see `Optimizer.update`."""


class AdjustableOptimizer:
    """An optimizer whose settings may change between steps, and that counts updates by itself."""

    def __init__(self, settings: Optimizer, number: int = 0) -> None:
        self.settings = settings
        self.number = number  # of the update that runs now or ran last, counted from 1

    def update(self, kind: str) -> Callable[..., None]:
        """Give the function that updates a parameter with the settings of that moment."""

        def write(step: int, *tensors: Tensor) -> None:
            self.settings.update(kind)(self.number, *tensors)

        return write
