"""From a model and a batch to a placed training step: capture at B/M, costs, and the search over M.

The step of a microbatch is captured with its loss divided by M. So results add up to the mean loss
of the batch, and gradients to those of gradient accumulation, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments, Parameter
from typing import Any

from torch import Tensor, nn

from roost.core.cluster import Cluster
from roost.core.problem import Problem
from roost.cost_models import estimate
from roost.cost_models.profiled import profile
from roost.errors import Infeasible, InputError
from roost.frontends.torch import step_of
from roost.frontends.tracing.captured_step import CapturedStep
from roost.plan.batches import BatchSplit, named_inputs
from roost.plan.training_costs import best_device, slowest_updates, update_times
from roost.runtime.ops.unrolled_step import unrolled_step
from roost.runtime.step.calls import loss_of
from roost.search.microbatches import MicrobatchResult, solve_microbatches
from roost.search.smaller_microbatches import fewest_that_fit, none_fits
from roost.transforms.microbatch import batch_statistics

log = logging.getLogger(__name__)

AUTO = (1, 2, 4, 8, 16)  # numbers of microbatches that "auto" tries, if they divide the batch


@dataclass(frozen=True)
class MicrobatchSteps:
    """Captures the step of a microbatch for each number of microbatches."""

    model: nn.Module
    bound: BoundArguments  # the call with the example batch
    split: BatchSplit
    optimizer: str
    loss: Callable[..., Tensor] | None
    batches: int = 1  # whose gradients an update takes; 1: updates are part of the step
    keep_gradients: bool = False

    def capture(self, count: int) -> CapturedStep:
        """The step of one of `count` microbatches."""
        args, named = self.split.microbatch(self.bound, count)
        log.info("capturing the step of one of %d microbatches", count)
        return step_of(
            self.model,
            self._example(args, named),
            train=True,
            optimizer=self.optimizer,
            loss=self.scaled_loss(count),
            keep_gradients=self.keep_gradients,
        )

    def scaled_loss(self, count: int) -> Callable[[Any], Tensor]:
        """The loss of a microbatch from what the model returns: its share of the mean."""
        parts = count * self.batches

        def scaled(returned: Any) -> Tensor:
            loss = loss_of(returned if self.loss is None else self.loss(returned))
            return loss / parts if parts > 1 else loss

        return scaled

    def _example(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The arguments all in order, or all by name."""
        if not named:
            return args
        names = list(self.bound.arguments)
        kinds = self.bound.signature.parameters
        if any(
            kinds[name].kind in (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)
            for name in names
        ):
            raise InputError(
                "the model takes some inputs by position only and some by name only; wrap it in a "
                "module that takes all by name"
            )
        return {**dict(zip(names, args, strict=False)), **named}


@dataclass(frozen=True, eq=False)
class PlacedTraining:
    """A training step with its placement, ready to run."""

    step: CapturedStep  # of all microbatches
    one: CapturedStep  # of one microbatch
    steps: MicrobatchSteps
    found: MicrobatchResult
    inputs: tuple[str, ...]  # of the step, by the names of `BatchSplit`
    one_device: tuple[str, float] | None  # the best device alone, and its step time
    later_updates: float = 0.0  # expected seconds of updates that follow the step
    notes: tuple[str, ...] = ()

    def feed(self, parts: Mapping[str, list[Tensor]]) -> list[Tensor]:
        """The inputs of the step, from the microbatches of each tensor."""
        shared = set(self.steps.split.shared)
        if self.found.count == 1:
            return [parts[name][0] for name in self.inputs]
        copied = [name for name in self.inputs if name not in shared]
        return [
            *(parts[name][0] for name in self.inputs if name in shared),
            *(parts[name][copy] for copy in range(self.found.count) for name in copied),
        ]


def counts_of(microbatches: Any, split: BatchSplit) -> tuple[int, ...]:
    """The numbers of microbatches to try; raises InputError for one that is not possible."""
    if microbatches == "auto":
        return tuple(count for count in AUTO if split.size % count == 0)
    if isinstance(microbatches, int):
        microbatches = (microbatches,)
    if not isinstance(microbatches, tuple | list) or not microbatches:
        raise InputError(
            f"microbatches is {microbatches!r}; give a number, several in a tuple, or 'auto'"
        )
    for count in microbatches:
        split.check_count(count)
    return tuple(dict.fromkeys(microbatches))


def placed_training(
    steps: MicrobatchSteps,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    profiled: bool,
    may_drop: bool,
    allow_batch_statistics: bool,
    **search: Any,
) -> PlacedTraining:
    """Capture, and search for the best placement of the best number of microbatches.

    `may_drop`: leave out numbers with which the model cannot be captured, or trains differently.
    `search`: settings of `solve_microbatches`.
    """
    captured, notes = _captured(steps, counts, may_drop, allow_batch_statistics)
    first = next(iter(captured.values()))
    label = input_labels(steps, first)
    shared = [
        first.op_of[node]
        for name, node in first.program.input_nodes.items()
        if label[name] in steps.split.shared
    ]
    problems: dict[int, Problem] = {}

    def problem_of(count: int) -> Problem:
        if count not in problems:
            step = captured[count]
            log.info("costs of one of %d microbatches", count)
            costs = profile(step, cluster) if profiled else estimate(step.graph, cluster).costs
            problems[count] = Problem(step.graph, cluster, costs)
        return problems[count]

    found = solve_microbatches(
        problem_of,
        list(captured),
        batch_statistics=allow_batch_statistics,
        shared_inputs=tuple(shared),
        **search,
    )
    if not found.best.feasible:
        raise _does_not_fit(steps, cluster, found, max(captured), allow_batch_statistics, shared)
    step = captured[found.count]
    one_device = best_device([problem_of(1) if 1 in captured else found.problem, found.problem])
    later = 0.0
    if steps.keep_gradients:
        updates = update_times(step, steps.optimizer, cluster, profiled)
        later = slowest_updates(updates, found)
        if one_device is not None:
            name, seconds = one_device
            alone = sum(row[cluster.index_of(name)] for row in updates.values())
            one_device = name, seconds + float(alone)
    return PlacedTraining(
        step=unrolled_step(step, found.microbatched),
        one=step,
        steps=steps,
        found=found,
        inputs=tuple(label[name] for name in step.program.inputs),
        one_device=one_device,
        later_updates=later,
        notes=notes,
    )


def _does_not_fit(
    steps: MicrobatchSteps,
    cluster: Cluster,
    found: MicrobatchResult,
    most: int,
    allow_batch_statistics: bool,
    shared: Sequence[str],
) -> Infeasible:
    """The error for a step that fits nowhere, with a number of microbatches that would fit."""
    size = steps.split.size
    larger = [count for count in range(most + 1, size + 1) if size % count == 0]
    log.info("nothing fits; looking for smaller microbatches that do")
    fix = fewest_that_fit(
        lambda count: estimate(steps.capture(count).graph, cluster),
        larger,
        batch_statistics=allow_batch_statistics,
        shared_inputs=tuple(shared),
    )
    return none_fits(found, size, fix)


def _captured(
    steps: MicrobatchSteps, counts: Sequence[int], may_drop: bool, allow_batch_statistics: bool
) -> tuple[dict[int, CapturedStep], tuple[str, ...]]:
    """The step of a microbatch by number of microbatches, and what was left out, in words."""
    captured: dict[int, CapturedStep] = {}
    for count in counts:
        try:
            captured[count] = steps.capture(count)
        except InputError as error:
            if not (may_drop and captured):
                raise
            return captured, (f"{count} and more microbatches were not tried: {error}",)
        layers = batch_statistics(captured[count].graph)
        if may_drop and layers and not allow_batch_statistics:
            return captured, (
                f"one microbatch only: {layers[0]} takes its statistics from the batch "
                "(batch_statistics=True allows more)",
            )
    return captured, ()


def input_labels(steps: MicrobatchSteps, step: CapturedStep) -> dict[str, str]:
    """Input of a captured step -> its name in the batch."""
    names = step.program.inputs
    leaves = named_inputs(steps.bound).items()
    tensors = [name for name, value in leaves if isinstance(value, Tensor)]
    if set(names) == set(tensors):
        return {name: name for name in names}
    if len(names) != len(tensors):
        raise InputError(
            f"the model takes the tensors {', '.join(names)}; the batch has {', '.join(tensors)}"
        )
    return dict(zip(names, tensors, strict=True))
