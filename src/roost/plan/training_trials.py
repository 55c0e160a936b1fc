"""Steps on the example batch, to choose among placements that should take about as long.

The simulator adds up times of ops and of links. What it does not know, such as many short waits
between threads, shows when a placement runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from roost.core.units import show_seconds
from roost.plan.batches import named_inputs
from roost.plan.training_run import TrainingRun, parameter_order
from roost.plan.training_search import PlacedTraining
from roost.plan.training_settings import TrainerSettings
from roost.runtime.step.unplaced import residents_of

log = logging.getLogger(__name__)

_STEPS = 3  # of each placement; the first is not counted
_SECONDS = 30.0  # that the steps of all but the first placement may take


def fastest(
    model: nn.Module, placements: Iterable[PlacedTraining], settings: TrainerSettings
) -> PlacedTraining:
    """The placement whose steps on the example batch are the shortest; weights stay as they are.

    The first one is that of the search. An error of it is raised; others that fail are left out.
    """
    found: list[tuple[float, PlacedTraining]] = []
    left = _SECONDS
    for placed in placements:
        left -= _STEPS * placed.expected if found else 0.0
        if left < 0:
            break
        try:
            seconds = _step_seconds(model, placed, settings)
        except Exception as error:
            if not found:
                raise
            log.warning("%s failed when it was tried: %s", _name(placed), error)
            continue
        log.info("%s: %s a step", _name(placed), show_seconds(seconds))
        found.append((seconds, placed))
    best = min(found, key=lambda each: each[0])[1]
    return replace(best, notes=(*best.notes, _said(found, best)))


def _step_seconds(model: nn.Module, placed: PlacedTraining, settings: TrainerSettings) -> float:
    steps = placed.steps
    inputs = named_inputs(steps.bound)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    feed = placed.feed(steps.split.parts(tensors, placed.found.count))
    run = TrainingRun(placed, settings, parameter_order(model, placed), residents_of(model))
    try:
        times = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            run.step(feed, settings.update.rate)
            times.append(time.perf_counter() - begin)
        return min(times[1:])
    finally:
        run.close()


def _said(found: Sequence[tuple[float, PlacedTraining]], best: PlacedTraining) -> str:
    rows = [
        f"{show_seconds(seconds)} {_name(placed)}" + (" (this one)" if placed is best else "")
        for seconds, placed in found
    ]
    return f"tried on the example batch: {', '.join(rows)}"


def _name(placed: PlacedTraining) -> str:
    """A placement in a few words."""
    count = placed.found.count
    size = "as a whole" if count == 1 else f"in {count} microbatches"
    return f"by {placed.found.best.placer} {size}"
