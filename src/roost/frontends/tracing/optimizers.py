"""The optimizers that a captured training step may end with."""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """The states and the work of an optimizer."""

    states: tuple[str, ...]  # kept for each parameter
    flop: int  # for each element of a parameter


OPTIMIZERS = {
    "sgd": Optimizer((), 2),
    "momentum": Optimizer(("momentum_buffer",), 4),
    "adam": Optimizer(("exp_avg", "exp_avg_sq"), 12),
    "adamw": Optimizer(("exp_avg", "exp_avg_sq"), 13),
}
