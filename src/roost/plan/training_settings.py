"""The optimizer of a training run and what comes before it, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roost.errors import InputError, UnknownName
from roost.frontends.tracing.optimizers import OPTIMIZERS
from roost.runtime.step.optimizers import Optimizer


@dataclass(frozen=True)
class TrainerSettings:
    """The optimizer of a training run, and what is done with gradients before it."""

    optimizer: str
    update: Optimizer
    clip_norm: float | None = None
    accumulate: int = 1  # batches whose gradients an update takes
    seed: int = 0

    @property
    def keeps_gradients(self) -> bool:
        """True if updates follow a step instead of being part of it."""
        return self.clip_norm is not None or self.accumulate > 1

    def __post_init__(self) -> None:
        clip = self.clip_norm
        if clip is not None and (not _is_number(clip) or clip <= 0):
            raise InputError(f"clip_norm is {clip!r}; it must be a number above 0, or None")
        batches = self.accumulate
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise InputError(f"accumulate is {batches!r}; it must be a whole number, 1 or more")


def checked_optimizer(
    optimizer: object,
    lr: object,
    momentum: object,
    betas: object,
    eps: object,
    weight_decay: object,
) -> Optimizer:
    """The settings of the optimizer, checked."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise UnknownName("optimizer", str(optimizer), OPTIMIZERS)
    if weight_decay is not None and optimizer != "adamw":
        raise InputError(
            f"weight_decay is {weight_decay!r}, but {optimizer} has none; take adamw, or leave it "
            "out"
        )
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"betas is {betas!r}; give two numbers, such as (0.9, 0.999)")
    decay = 1e-2 if weight_decay is None else weight_decay
    rows: dict[str, Any] = {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": decay}
    rows |= {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name, value in rows.items():
        most = 1.0 if name.startswith("betas") else math.inf
        if not _is_number(value) or not 0 <= value < most:
            below = " and below 1" if most == 1.0 else ""
            raise InputError(f"{name} is {value!r}; it must be a number, not negative{below}")
    return Optimizer(rows["lr"], rows["momentum"], tuple(betas), rows["eps"], rows["weight_decay"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
