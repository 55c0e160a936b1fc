"""`roost train`: some training steps with random data, expected and measured times side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _model, _problem, _runnable, _search
from roost.cli._model import ModelSpec
from roost.cli._text import show_bytes, show_seconds
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.plan.training import Trainer

_COPIES = 6  # times that memory holds the weights: model, run, gradients and two states


def train(
    model: _model.RunnableModel,
    on: _problem.On = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps to take.")] = 10,
    microbatches: Annotated[
        str,
        typer.Option(metavar="N", help="Microbatches of a step; auto chooses, 2,4 chooses of two."),
    ] = "auto",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "adamw",
    lr: Annotated[float, typer.Option(metavar="RATE", help="The learning rate.")] = 1e-3,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            "--memory",
            metavar="DEVICE=SIZE",
            help="Cap the memory of a device, such as cuda:0=6GiB; may be repeated.",
        ),
    ] = None,
    costs: Annotated[
        str, typer.Option(metavar="KIND", help="profiled: time the ops; estimated: a roofline.")
    ] = "profiled",
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Search for S seconds; 10 if --trials is left out too."),
    ] = None,
    trials: _search.Trials = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the data and the search.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Save the run in the end: a .safetensors file."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from a file of -o.")
    ] = None,
    setting: _model.Settings = None,
    as_json: _console.AsJson = False,
) -> None:
    """Train on all devices with random data, to try it out.

    Finds a placement and takes some steps on one batch. Shows the plan, the loss of each step, and
    the expected and the measured step time. Without --on it is this machine. Timing the ops takes
    up to a minute on the first run. roost.trainer in Python trains on your data.
    """
    if steps < 1:
        raise InputError(f"--steps is {steps}; it must be at least 1")
    _search.check_budget(seconds, trials)
    from roost.core.files import check_plain, check_writable

    if output is not None:
        check_writable(output)
    if resume is not None:
        check_plain(resume)
    caps = _caps(memory or [])
    counts = _counts(microbatches)
    chosen = ModelSpec.of(model, True, optimizer, setting)
    with _console.working(f"building {chosen.source}"):
        _runnable.check_size(chosen, _COPIES)
        built = chosen.build("cpu", seed)
    from roost.plan.start_training import trainer

    if seconds is None and trials is None:
        seconds = 10.0
    with _console.working(
        f"searching for the best way to train {built.name}", "timing ops takes up to a minute"
    ):
        made = trainer(
            built.module,
            built.inputs,
            optimizer=optimizer,
            lr=lr,
            microbatches=counts,
            memory=caps,
            cluster=on,
            costs=costs,
            seconds=seconds,
            trials=trials,
            seed=seed,
        )
    with made:
        if resume is not None:
            made.load(resume)
        begun = made.num_steps
        losses: list[float] = []
        try:
            _train(made, built.inputs, steps, losses)
        except KeyboardInterrupt:
            if output is not None:
                made.save(output)
                _console.note(f"stopped after step {made.num_steps}; wrote {output}")
            raise
        if output is not None:
            made.save(output)
            _console.note(f"wrote {output}")
        facts = _facts(made, built.name, losses)
    lines = _report(facts, losses, begun)
    _console.answer(as_json, facts, [*str(made.plan).splitlines(), *lines])


def _train(made: Trainer, inputs: Any, steps: int, losses: list[float]) -> None:
    with _console.progress("training, step") as tell:
        for number in range(steps):
            losses.append(made.step(inputs))
            tell(number + 1, steps)


def _facts(made: Trainer, name: str, losses: list[float]) -> dict[str, Any]:
    plan = made.plan
    return {
        "model": name,
        "cluster": plan.found.problem.cluster.name,
        "microbatches": plan.microbatches,
        "expected": plan.step_time,
        "one_device": plan.one_device_step_time,
        "one_device_is_best": plan.one_device_is_best,
        "step_time": plan.measured,
        "steps": made.num_steps,
        "costs": plan.found.problem.costs.source,
        "peak_memory": plan.peak_memory,
        "losses": losses,
    }


def _report(facts: dict[str, Any], losses: list[float], begun: int) -> list[Any]:
    rows = [f"step {begun + number}: loss {loss:.4f}" for number, loss in enumerate(losses, 1)]
    expected = show_seconds(facts["expected"])
    measured = show_seconds(facts["step_time"])
    peak = max(facts["peak_memory"].values())
    return [
        *rows,
        f"{measured} a step measured, {expected} expected, costs: {facts['costs']}; largest "
        f"expected peak {show_bytes(peak)}",
    ]


def _counts(text: str) -> int | tuple[int, ...] | str:
    """The number of microbatches, several of them, or auto."""
    if text == "auto":
        return text
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--microbatches {text!r}: write a number, several as 2,4,8, or auto"
        ) from None
    return counts


def _caps(texts: list[str]) -> dict[str, int | str]:
    caps: dict[str, int | str] = {}
    for text in texts:
        name, equals, size = text.partition("=")
        if not equals or not name:
            raise InputError(f"--memory {text!r}: write it as DEVICE=SIZE, such as cuda:0=6GiB")
        caps[name] = size
    return caps
