"""A model that is built, captured and given a placement: ready to run on devices of this
machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roost.cli import _built, _console, _problem
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.frontends.tracing.captured_step import CapturedStep


@dataclass(frozen=True, eq=False)
class Ready:
    """What a runtime takes."""

    built: _built.Built
    step: CapturedStep
    problem: Problem
    placement: Placement


def ready(
    chosen: _problem.Model,
    on: str | None,
    path: Path | None,
    costs: Path | None,
    seed: int,
    copies: int,
) -> Ready:
    """`copies` is how many times the weights are held at once while it runs."""
    from roost.core import formats
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.presets import cluster
    from roost.runtime.ops import verify

    if path is None:
        raise InputError("--placement is missing; name the placement.json to run")
    if _problem.plan_in(path, None, None) is not None:
        raise InputError(
            f"{path}: is a plan, for a model as it is written; in Python plan.apply(model) runs it"
        )
    path, costs = _problem.placed_in(path, on, costs)
    _problem.check_cluster(chosen.source, on, costs)
    placement = formats.load_as(Placement, path)
    if on is not None:
        verify.check_devices(cluster(on))
    elif costs is not None:
        verify.check_devices(formats.load_as(Problem, costs).cluster)
    with _console.working(f"building {chosen.source}"):
        check_size(chosen, copies)
        built = _built.build(chosen, "cpu", seed)
        verify.check_weights(built.module)
    with _console.working(f"capturing {chosen.source}"):
        step = built.described()
    problem = _problem.with_cluster(step.graph, chosen.source, on, costs)
    try:
        placement = problem.check(placement)
    except InputError as error:
        error.args = (f"{path}: {error}",)
        raise
    return Ready(built, step, problem, placement)


def check_size(chosen: _problem.Model, copies: int) -> None:
    """Refuse what this machine has no room for, before it is built. A callable decides by
    itself."""
    import os

    from roost.core.units import show_bytes

    if ":" in chosen.source:
        return
    sketch = _built.build(chosen, "meta").module
    size = sum(value.nbytes for value in sketch.parameters())
    wanted = size * copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > memory:
        raise InputError(
            f"{chosen.source}: has weights of {show_bytes(size)}; to run it takes "
            f"{show_bytes(wanted)}, and this "
            f"machine has {show_bytes(memory)}. Take a smaller size: --set layers=2, --set "
            f"hidden=64, ..."
        )
