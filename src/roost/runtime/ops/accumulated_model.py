"""A model that takes all microbatches of a step in one call: what an unrolled step is checked by.

`verify` compares a placed step with a model that takes the same inputs and returns the same
results. For an unrolled step that is this model: it calls the model itself for one microbatch after
the other, and its loss has the gradients of all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.step.calls import loss_of


def accumulated_model(
    model: nn.Module,
    step: CapturedStep,
    count: int,
    shared: Sequence[str] = (),
    loss: Callable[..., Tensor] = loss_of,
) -> nn.Module:
    """The model with a forward that takes the inputs of an unrolled step, by name.

    It shares its weights with the model. `step` is the captured step of one microbatch, `shared`
    names inputs that all microbatches share, and `loss` gives the loss from the output of a
    microbatch, divided by their number. Inputs must be tensors that the model takes by name.
    """
    kind: Any = type(model)
    names = step.program.inputs
    flags = dict(step.program.flags)

    class AccumulatedModel(kind):  # type: ignore[misc]
        def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
            losses = []
            whole = names if count == 1 else shared
            for number in range(count):
                own = {n: inputs[n if n in whole else f"{n}#{number}"] for n in names}
                losses.append(loss(super().forward(**own, **flags)))
            return _WithAllGradients.apply(*losses), *losses[1:]  # type: ignore[no-untyped-call]

    # A class, and no function kept in the module: a deep copy of the module must call itself.
    other = copy.copy(model)
    other.__class__ = AccumulatedModel
    return other


class _WithAllGradients(torch.autograd.Function):
    """The first loss, with the gradients of the sum of all losses."""

    @staticmethod
    def forward(context: Any, *losses: Tensor) -> Tensor:
        context.count = len(losses)
        return losses[0].clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0],) * int(context.count)
