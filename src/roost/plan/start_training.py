"""Training in one call: capture, costs, search, and a `Trainer` that is ready for steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from roost.core.cluster import Cluster
from roost.errors import InputError, UnknownName
from roost.frontends.torch import split_inputs
from roost.frontends.tracing.dispatched import refuse_dispatched
from roost.placers import Placer
from roost.plan.batches import BatchDims, batch_split, bound_call, named_inputs
from roost.plan.clusters import capped_cluster, without_libraries
from roost.plan.placing import check_where
from roost.plan.training import Schedule, Trainer
from roost.plan.training_search import (
    MicrobatchSteps,
    counts_of,
    placed_training,
)
from roost.plan.training_settings import TrainerSettings, checked_optimizer
from roost.plan.training_trials import fastest
from roost.runtime.ops.verify import check_devices, check_weights
from roost.runtime.whole.module_placement import is_placed
from roost.search.evaluate import Progress
from roost.search.solve import checked_seed


def trainer(
    model: nn.Module,
    example_batch: Any,
    *,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    loss: Callable[..., Tensor] | None = None,
    microbatches: int | tuple[int, ...] | str = "auto",
    memory: Mapping[str, int | str] | None = None,
    cluster: Cluster | str | None = None,
    costs: str = "profiled",
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | None = None,
    batch_dims: BatchDims | None = None,
    batch_statistics: bool = False,
    placer: str | Placer = "auto",
    seconds: float | None = 10.0,
    trials: int | None = None,
    seed: int = 0,
    on_trial: Callable[[Progress], object] | None = None,
) -> Trainer:
    """Find the best way to train a model on the devices of this machine, and get ready for it.

    - `example_batch`: a whole batch: a tensor, a tuple of arguments or a dict of named ones.
    - `loss`: a function of the model's output. Default: the model returns its loss.
    - `microbatches`: a number, several to choose from, or "auto": 1, 2, 4, 8 and 16.
    - `memory`: caps on devices, as in {"cuda:0": "6GiB"}.
    - `schedule`: the factor of `lr` by the number of updates taken, as `LambdaLR` of PyTorch.
    - `clip_norm`: the most that the norm of all gradients may be. Updates then follow the step.
    - `accumulate`: batches whose gradients one update takes, as their mean.
    - `weight_decay`: of adamw; default 0.01.
    - `batch_dims`: the batch dimension of inputs by name, None for an input that samples share.
    - `batch_statistics`: allow microbatches for models with BatchNorm, which train a little
      differently then.
    - `seconds`, `trials`: the budget of the search.

    The model stays as it is; `Trainer.write_back` copies the weights into it. Raises `Infeasible`
    if nothing fits.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(model).__name__}")
    if is_placed(model):
        raise InputError("the model is placed already; take that off first, plan.remove(model)")
    refuse_dispatched(model)
    check_weights(model)
    seed = checked_seed(seed)
    settings = TrainerSettings(
        optimizer,
        checked_optimizer(optimizer, lr, momentum, betas, eps, weight_decay),
        clip_norm,
        accumulate,
        seed,
    )
    if costs not in ("profiled", "estimated"):
        raise UnknownName("kind of costs", str(costs), ["profiled", "estimated"])
    check_where(cluster, memory)
    args, named = split_inputs(example_batch)
    bound = bound_call(model, args, named)
    split = batch_split(named_inputs(bound), batch_dims)
    counts = counts_of(microbatches, split)
    where = capped_cluster(cluster, memory or {})
    check_devices(where)
    placements = placed_training(
        MicrobatchSteps(model, bound, split, optimizer, loss, accumulate, settings.keeps_gradients),
        without_libraries(where),
        counts,
        profiled=costs == "profiled",
        may_drop=microbatches == "auto",
        allow_batch_statistics=batch_statistics,
        placer=placer,
        seconds=seconds,
        trials=trials,
        seed=seed,
        on_trial=on_trial,
    )
    tried = costs == "profiled"
    placed = fastest(model, placements, settings) if tried else next(placements)
    return Trainer(model, placed, settings, lr, schedule)
