"""A built and captured model with a placement, ready to run on devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roost.cli import _console, _problem
from roost.cli._model import BuiltModel, ModelSpec
from roost.cli._text import show_bytes
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.frontends.tracing.captured_step import CapturedStep


@dataclass(frozen=True, eq=False)
class RunnableStep:
    """The arguments of a runtime."""

    built: BuiltModel
    step: CapturedStep
    problem: Problem
    placement: Placement


def runnable_step(
    chosen: ModelSpec,
    on: str | None,
    path: Path | None,
    costs: Path | None,
    seed: int,
    copies: int,
) -> RunnableStep:
    """Build, capture and check. `copies` is the number of times that memory holds the weights."""
    from roost.core import formats
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.presets import cluster
    from roost.runtime.ops import verify

    if path is None:
        raise InputError("--placement is missing; name the placement.json to run")
    if _problem.plan_in(path, None, None) is not None:
        raise InputError(f"{path}: is a plan; in Python plan.apply(model) runs the model with it")
    path, costs = _problem.placed_in(path, on, costs)
    _problem.check_cluster(chosen.source, on, costs)
    placement = formats.load_as(Placement, path)
    if on is not None:
        verify.check_devices(cluster(on))
    elif costs is not None:
        verify.check_devices(formats.load_as(Problem, costs).cluster)
    with _console.working(f"building {chosen.source}"):
        check_size(chosen, copies)
        built = chosen.build("cpu", seed)
        verify.check_weights(built.module)
    with _console.working(f"capturing {chosen.source}"):
        step = built.described()
    problem = _problem.with_cluster(step.graph, chosen.source, on, costs)
    try:
        placement = problem.check(placement)
    except InputError as error:
        error.args = (f"{path}: {error}",)
        raise
    return RunnableStep(built, step, problem, placement)


def check_size(chosen: ModelSpec, copies: int) -> None:
    """Raise InputError if this machine cannot hold the model. A callable is not checked."""
    import os

    if chosen.is_callable:
        return
    sketch = chosen.build("meta").module
    size = sum(value.nbytes for value in sketch.parameters())
    wanted = size * copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > memory:
        raise InputError(
            f"{chosen.source}: has weights of {show_bytes(size)}; to run it takes "
            f"{show_bytes(wanted)}, and this machine has {show_bytes(memory)}. "
            "Take a smaller size: --set layers=2, --set hidden=64, ..."
        )
