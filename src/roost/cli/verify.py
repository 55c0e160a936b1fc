"""`roost verify`: the numbers of a placed step, compared with the unplaced model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _model, _problem, _runnable
from roost.cli._model import ModelSpec
from roost.cli._text import styled
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.plan.plan import Plan
    from roost.runtime.ops.verify import Verification


def verify(
    model: _model.RunnableModel,
    on: _problem.On = None,
    placement: _problem.Placed = None,
    costs: _problem.CostsFile = None,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps in a row.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the inputs and random ops.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Largest relative difference; the default depends on the type."
        ),
    ] = None,
    setting: _model.Settings = None,
    as_json: _console.AsJson = False,
) -> None:
    """Run a placed step beside the unplaced model.

    Compares outputs, loss, gradients, a step of the optimizer, buffers and tied weights. The
    devices of the cluster must be those of this machine: cpu, cpu:N, cuda:N. The exit code is 4 if
    anything differs, with the first such op. For a plan.json it compares outputs, buffers and tied
    weights.
    """
    if placement is None:
        raise InputError("--placement is missing; name the placement.json or plan.json to verify")
    if tolerance is not None and not tolerance >= 0:
        raise InputError(f"--tolerance is {tolerance:g}; it must be 0 or more")
    if steps < 1:
        raise InputError(f"--steps is {steps}; it must be at least 1")
    chosen = ModelSpec.of(model, train, optimizer, setting, None)
    if (plan := _problem.plan_in(placement, on, costs)) is not None:
        verification = _plan_verified(plan, chosen, steps, seed, tolerance)
        _console.answer(as_json, _facts(verification), _report(verification))
        verification.check()
        return
    ready = _runnable.runnable_step(
        chosen, on, placement, costs, seed, copies=9 if chosen.train else 3
    )
    verification = _verified(ready, steps, seed, tolerance)
    _console.answer(as_json, _facts(verification), _report(verification))
    verification.check()


def _verified(
    ready: _runnable.RunnableStep, steps: int, seed: int, tolerance: float | None
) -> Verification:
    from roost.runtime.ops import verify

    with _console.working("running it placed and unplaced"):
        return verify.verify(
            ready.step,
            ready.problem,
            ready.placement,
            ready.built.module,
            ready.built.inputs,
            steps=steps,
            seed=seed,
            tolerance=tolerance,
        )


def _plan_verified(
    plan: Plan, chosen: ModelSpec, steps: int, seed: int, tolerance: float | None
) -> Verification:
    from roost.runtime.ops import verify
    from roost.runtime.whole.verify import verify_modules

    if chosen.train:
        raise InputError("a plan is for inference; leave out --train")
    with _console.working(f"building {chosen.source}"):
        _runnable.check_size(chosen, 2)
        built = chosen.build("cpu", seed)
        verify.check_weights(built.module)
    with _console.working("running it placed and unplaced"):
        return verify_modules(
            built.module, plan.modules, built.inputs, steps=steps, tolerance=tolerance
        )


def _facts(verification: Verification) -> dict[str, Any]:
    import math
    from dataclasses import asdict

    def plain(difference: Any) -> dict[str, Any]:
        """The fields of a difference, with null for infinity, which JSON lacks."""
        values = asdict(difference) | {"same": difference.same}
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }

    differences = verification.differences
    return {
        "same": verification.same,
        "bitwise": verification.bitwise,
        "steps": verification.steps,
        "devices": list(verification.devices),
        "first_op": verification.first_op or None,
        "device": verification.device or None,
        "note": verification.note,
        "differences": {name: plain(difference) for name, difference in differences.items()},
    }


def _report(verification: Verification) -> list[RenderableType]:

    numbers = ["count", "largest", "relative", "allowed"]
    rows = _console.table(["what", "against", *numbers, "of"], numbers)
    for what, against, count, name, worst in verification.rows():
        figures = [f"{value:.2g}" for value in (worst.absolute, worst.relative, worst.tolerance)]
        style = "" if worst.same else "red"
        rows.add_row(
            what,
            against,
            str(count),
            *(styled(text, style) for text in figures),
            styled(name, style),
        )
    verdict = styled(verification.verdict, "bold green" if verification.same else "bold red")
    return [verdict, rows, *([verification.note] if verification.note else [])]
