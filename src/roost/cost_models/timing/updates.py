"""The arithmetic of one step of each optimizer for one parameter, for timing.

It equals that of `runtime/step/optimizers.py` op for op, and a test checks that. This folder may
not import the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _copy(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def _sgd(parameter: Tensor, gradient: Tensor) -> None:
    parameter.add_(gradient, alpha=-1e-3)


def _momentum(parameter: Tensor, gradient: Tensor, velocity: Tensor) -> None:
    velocity.mul_(0.9).add_(gradient)
    parameter.add_(velocity, alpha=-1e-3)


def _adam(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    denominator = square.sqrt().div_(0.5).add_(1e-8)
    parameter.addcdiv_(mean, denominator, value=-1e-3)


def _adamw(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    parameter.mul_(0.99999)
    _adam(parameter, gradient, mean, square)


def _keep(parameter: Tensor, gradient: Tensor, *states: Tensor) -> None:
    states[-1].add_(gradient)


UPDATES: dict[str, Callable[..., Any]] = {
    "copy": _copy,
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "keep": _keep,
}
