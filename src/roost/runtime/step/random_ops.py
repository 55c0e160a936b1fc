"""Random ops, such as dropout, whose numbers depend on the seed, the step and the op only.

So a step draws the same numbers under every placement on devices of one kind.
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
    """The seed of a run and the number of its step, which all its random ops use."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0

    def seeded(self, target: Any, number: int, device: torch.device) -> Callable[..., Any]:
        """Give the function to call instead of a random op: the op with its own generator."""
        generator = torch.Generator(device=device)
        call = _with_generator(target)

        def draw(*args: Any, **kwargs: Any) -> Any:
            generator.manual_seed(_mixed_seed(self.seed, self.step, number))
            return call(generator, *args, **kwargs)

        return draw


def _with_generator(target: Any) -> Callable[..., Any]:
    if target is aten.native_dropout.default:
        return _dropout
    if any(argument.name == "generator" for argument in target._schema.arguments):
        return lambda generator, *args, **kwargs: target(*args, **kwargs | {"generator": generator})
    fills = {aten.rand_like.default: Tensor.uniform_, aten.randn_like.default: Tensor.normal_}
    if target in fills:
        return lambda generator, like, **kwargs: fills[target](
            torch.empty_like(like, **kwargs), generator=generator
        )
    raise UnsupportedOp(
        f"{target} draws random numbers without a generator, so it cannot be placed; use dropout, "
        f"bernoulli or rand_like"
    )


def _dropout(
    generator: torch.Generator, values: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if not train or p == 0.0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return values * kept * (0.0 if p == 1.0 else 1 / (1 - p)), kept


def _mixed_seed(*numbers: int) -> int:
    """Mix several numbers into one of 63 bits (splitmix64)."""
    mask = 2**64 - 1
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed >> 1
