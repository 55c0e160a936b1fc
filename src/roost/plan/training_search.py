"""From a model and a batch to a placed training step: capture at B/M, costs, and the search over M.

The step of a microbatch is captured with its loss divided by M. So results add up to the mean loss
of the batch, and gradients to those of gradient accumulation, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import BoundArguments, Parameter
from typing import Any

import numpy as np
from torch import Tensor, nn

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.problem import Problem
from roost.cost_models import estimate
from roost.cost_models.profiled import profile
from roost.cost_models.timing.side_by_side import slowdown
from roost.errors import InputError
from roost.frontends.torch import step_of
from roost.frontends.tracing.captured_step import CapturedStep
from roost.plan.batches import BatchSplit, named_inputs
from roost.plan.training_costs import best_device, slowest_updates, update_times
from roost.runtime.ops.unrolled_step import unrolled_step
from roost.runtime.step.calls import loss_of
from roost.search.microbatches import COUNTS, MicrobatchResult, solve_microbatches
from roost.search.smaller_microbatches import none_fits
from roost.transforms.microbatch import Microbatch, batch_statistics

log = logging.getLogger(__name__)

_NEAR = 1.25  # times the best expected step: plain placements that are tried


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

    @property
    def expected(self) -> float:
        """Seconds that a step is expected to take."""
        return self.found.best.step_time + self.later_updates

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
        return tuple(count for count in COUNTS if split.size % count == 0)
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
) -> Iterator[PlacedTraining]:
    """Capture, and search for the best placement of the best number of microbatches.

    Plain placements that should take about as long, and one device alone, follow the best: they are
    to be tried.

    `may_drop`: leave out numbers with which the model cannot be captured, or trains differently.
    `search`: settings of `solve_microbatches`.
    """
    captured, notes = _captured(steps, counts, may_drop, allow_batch_statistics)
    first = next(iter(captured.values()))
    label = input_labels(steps, first)
    names = [
        first.op_of[node]
        for name, node in first.program.input_nodes.items()
        if label[name] in steps.split.shared
    ]
    settings = Microbatch(1, shared_inputs=tuple(names), batch_statistics=allow_batch_statistics)
    problems = _Problems(steps, captured, cluster, profiled)
    asked: dict[str, Any] = {
        "batch_statistics": allow_batch_statistics,
        "shared_inputs": tuple(names),
    }
    found = solve_microbatches(problems.beside, list(captured), **asked, **search)
    if not found.best.feasible:
        seed = search.get("seed", 0)
        raise none_fits(found, steps.split.size, problems.rough, seed=seed, **asked)
    alone = best_device(problems.alone, list(captured), settings)
    updates: dict[str, Array] = {}
    if steps.keep_gradients:
        updates = update_times(captured[found.count], steps.optimizer, cluster, profiled)
        if alone is not None:
            more = sum(row[alone.device] for row in updates.values())
            alone = replace(alone, seconds=alone.seconds + float(more) / steps.batches)

    def placed(found: MicrobatchResult) -> PlacedTraining:
        step = captured[found.count]
        return PlacedTraining(
            step=unrolled_step(step, found.microbatched),
            one=step,
            steps=steps,
            found=found,
            inputs=tuple(label[name] for name in step.program.inputs),
            one_device=None if alone is None else (alone.name, alone.seconds),
            later_updates=slowest_updates(updates, found) / steps.batches if updates else 0.0,
            notes=notes,
        )

    if search.get("placer", "auto") != "auto":
        yield placed(found)
        return
    others = [each for each in found.plain if each.trial.step_time <= _NEAR * found.best.step_time]
    every = [found, *(found.instead(each) for each in others)]
    if alone is not None:
        by_device = found.instead(alone.plain)
        every.insert(0 if alone.trial.step_time <= found.best.step_time else len(every), by_device)
    for each in _distinct(every):
        yield placed(each)


def _distinct(found: Sequence[MicrobatchResult]) -> list[MicrobatchResult]:
    """The results, each placement once."""
    kept: dict[tuple[str, bytes], MicrobatchResult] = {}
    for each in found:
        key = each.problem.graph.digest, each.best.placement.device.tobytes()
        kept.setdefault(key, each)
    return list(kept.values())


class _Problems:
    """The problem of one microbatch for each number of microbatches, made when it is needed."""

    def __init__(
        self,
        steps: MicrobatchSteps,
        captured: Mapping[int, CapturedStep],
        cluster: Cluster,
        profiled: bool,
    ) -> None:
        self.steps = steps
        self.captured = captured
        self.cluster = cluster
        self.profiled = profiled
        self._alone: dict[int, Problem] = {}

    def alone(self, count: int) -> Problem:
        """With the times of ops on a device whose neighbours rest."""
        if count not in self._alone:
            step = self.captured[count]
            log.info("costs of one of %d microbatches", count)
            costs = (
                profile(step, self.cluster)
                if self.profiled
                else estimate(step.graph, self.cluster).costs
            )
            self._alone[count] = Problem(step.graph, self.cluster, costs)
        return self._alone[count]

    def beside(self, count: int) -> Problem:
        """With the times of ops on CPU devices whose neighbours are as busy."""
        problem = self.alone(count)
        slower = self._slowdown
        if slower == 1.0:
            return problem
        of_cpu = np.array([device.kind == "cpu" for device in self.cluster.devices])
        op_time = problem.op_time * np.where(of_cpu, slower, 1.0)
        return Problem(problem.graph, self.cluster, replace(problem.costs, op_time=op_time))

    def rough(self, count: int) -> Problem:
        """With costs of a roofline, for sizes that were not captured yet."""
        return estimate(self.steps.capture(count).graph, self.cluster)

    @cached_property
    def _slowdown(self) -> float:
        if not self.profiled:
            return 1.0
        middle = sorted(self.captured)[len(self.captured) // 2]
        return slowdown(self.captured[middle], self.cluster)


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
                f"one microbatch only: {layers[0]} takes its values from the whole batch "
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
