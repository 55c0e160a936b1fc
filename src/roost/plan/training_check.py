"""The numbers of a placed training step, compared with those of the model in plain PyTorch."""

from __future__ import annotations

from torch import Tensor, nn

from roost.errors import InputError
from roost.plan.training_search import PlacedTraining
from roost.plan.training_settings import TrainerSettings
from roost.runtime.ops.accumulated_model import accumulated_model
from roost.runtime.ops.verify import verify
from roost.runtime.step.differences import Verification


def verified(
    placed: PlacedTraining,
    settings: TrainerSettings,
    model: nn.Module,
    feed: list[Tensor],
    steps: int,
    tolerance: float | None,
) -> Verification:
    """Run the placed step and the model side by side on one batch, from the weights of the model.

    The model calls one microbatch after the other and adds up their gradients.
    """
    if settings.keeps_gradients:
        raise InputError(
            "verify compares steps that end with their updates; make a trainer without clip_norm "
            "and accumulate for it"
        )
    kept = list(placed.step.program.new_values)
    if kept and placed.found.count > 1:
        raise InputError(
            f"{kept[0]} is the mean over microbatches here, and in PyTorch that of one after the "
            "other, so verify cannot compare them; make a trainer with microbatches=1 for it"
        )
    names = placed.step.program.inputs
    own = {
        label: name for name, label in zip(placed.one.program.inputs, placed.inputs, strict=True)
    }
    count = placed.found.count
    every = accumulated_model(
        model,
        placed.one,
        count,
        [own[label] for label in placed.steps.split.shared],
        placed.steps.scaled_loss(count),
    )
    return verify(
        placed.step,
        placed.found.problem,
        placed.found.result.best.placement,
        every,
        dict(zip(names, feed, strict=True)),
        optimizer=settings.update,
        steps=steps,
        seed=settings.seed,
        tolerance=tolerance,
    )
