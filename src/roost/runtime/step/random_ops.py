"""Ops that draw at random, such as dropout: what each draws depends on the seed, the step and the
op alone.

So a step draws the same under every placement on devices of one kind, in whatever order they come
to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roost.errors import UnsupportedOp

aten = torch.ops.aten


def is_random(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


class RandomOps:
    """The number of the step that all random ops of a run look at."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0

    def seeded(self, target: Any, number: int, device: torch.device) -> Callable[..., Any]:
        """The function to call in place of a random op: the same, with a generator of its own."""
        generator = torch.Generator(device=device)
        call = _with_generator(target)

        def draw(*args: Any, **kwargs: Any) -> Any:
            generator.manual_seed(_mixed(self.seed, self.step, number))
            return call(generator, *args, **kwargs)

        return draw


def _with_generator(target: Any) -> Callable[..., Any]:
    if target is aten.native_dropout.default:
        return _dropout
    if any(argument.name == "generator" for argument in target._schema.arguments):
        return lambda generator, *args, **kwargs: target(
            *args, **{**kwargs, "generator": generator}
        )
    if target is aten.rand_like.default:
        return lambda generator, like, **kwargs: torch.empty_like(like, **kwargs).uniform_(
            generator=generator
        )
    if target is aten.randn_like.default:
        return lambda generator, like, **kwargs: torch.empty_like(like, **kwargs).normal_(
            generator=generator
        )
    raise UnsupportedOp(
        f"{target} draws at random in a way that cannot be placed; use dropout, bernoulli or "
        f"rand_like"
    )


def _dropout(
    generator: torch.Generator, values: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if not train or p == 0.0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return values * kept * (0.0 if p == 1.0 else 1 / (1 - p)), kept


def _mixed(*numbers: int) -> int:
    """One number of 63 bits from several (splitmix64)."""
    found = 0
    for number in numbers:
        found = (found + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        found = ((found ^ found >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        found = ((found ^ found >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
        found ^= found >> 31
    return found >> 1
