"""The optimizers that a captured training step may end with."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerCost(NamedTuple):
    """The states and the work of an optimizer."""

    states: tuple[str, ...]  # kept for each parameter
    flop: int  # for each element of a parameter


# The update of a step that keeps its gradients: it adds the gradient to a state of this name. The
# parameter changes after the step, when all gradients are there.
KEEP = "keep"
KEPT = "gradient"

OPTIMIZERS = {
    "sgd": OptimizerCost((), 2),
    "momentum": OptimizerCost(("momentum_buffer",), 4),
    "adam": OptimizerCost(("exp_avg", "exp_avg_sq"), 12),
    "adamw": OptimizerCost(("exp_avg", "exp_avg_sq"), 13),
}
