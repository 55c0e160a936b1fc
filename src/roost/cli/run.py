"""`roost run`: a placed step on real devices, several times in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roost.cli import _console, _model, _problem, _runnable, _step_report
from roost.cli._model import ModelSpec
from roost.cli._text import show_bytes, show_seconds
from roost.errors import InputError

_WARM = 3  # steps that are not timed: CUDA graphs are recorded in the second


def run(
    model: _model.RunnableModel,
    on: _problem.On = None,
    placement: _problem.Placed = None,
    costs: _problem.CostsFile = None,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps in a row that are timed.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the inputs and random ops.")] = 0,
    setting: _model.Settings = None,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Launch runs of ops on GPUs as CUDA graphs: faster, and holds more memory.",
        ),
    ] = False,
    timeline: _step_report.TimelineFile = None,
    trace: _step_report.TraceFile = None,
    as_json: _console.AsJson = False,
) -> None:
    """Run a placed step on the devices of this machine and time it.

    The devices of the cluster must be those of this machine: cpu, cpu:N (threads), cuda:N. Use
    roost verify to check the numbers of the step. --timeline and --trace record one more step, in
    which ops are timed.
    """
    if steps < 1:
        raise InputError(f"--steps is {steps}; it must be at least 1")
    from roost.core.files import check_writable

    for path in (timeline, trace):
        if path is not None:
            check_writable(path)
    chosen = ModelSpec.of(model, train, optimizer, setting, None)
    ready = _runnable.runnable_step(
        chosen, on, placement, costs, seed, copies=5 if chosen.train else 2
    )
    facts = _ran(ready, steps, seed, graphs)
    if timeline is not None or trace is not None:
        facts["busy"] = _recorded(ready, seed, timeline, trace)
    _console.answer(as_json, facts, _report(facts))


def _ran(ready: _runnable.RunnableStep, steps: int, seed: int, graphs: bool) -> dict[str, Any]:
    import statistics
    import time

    from roost.runtime.ops.run import GraphRuntime
    from roost.runtime.whole.module_placement import named_tensors
    from roost.search.measured.served_model import cores_of
    from roost.simulator.compiled import simulate

    if graphs and not any(device.kind == "cuda" for device in ready.problem.cluster.devices):
        _console.note("--graphs does nothing here: no device of the cluster is a GPU")
    args = _args(ready)
    seconds: list[float] = []
    results: list[float] = []
    cores = cores_of(ready.problem.cluster)
    weights = {name: value.detach() for name, value in named_tensors(ready.built.module).items()}
    with (
        _console.working(f"running {_WARM + steps} steps"),
        GraphRuntime(
            ready.step,
            ready.problem,
            ready.placement,
            weights,
            cores=cores,
            seed=seed,
            graphs=graphs,
        ) as runtime,
    ):
        for _ in range(_WARM + steps):
            begin = time.perf_counter()
            returned = runtime.step(*args)
            seconds.append(time.perf_counter() - begin)
            results += [float(returned[0])] if ready.built.spec.train else []
        peak = runtime.peak_memory()
    predicted = simulate(ready.problem, ready.placement)
    return {
        "model": ready.built.name,
        "cluster": ready.problem.cluster.name,
        "steps": steps,
        "step_time": statistics.median(seconds[_WARM:]),
        "shortest": min(seconds[_WARM:]),
        "longest": max(seconds[_WARM:]),
        "estimated": predicted.step_time,
        "costs": ready.problem.costs.source,
        "peak_memory": {name: int(size) for name, size in peak.items()},
        "losses": results,
    }


def _args(ready: _runnable.RunnableStep) -> Any:
    inputs = ready.built.inputs
    return (
        list(inputs.values())
        if isinstance(inputs, dict)
        else inputs
        if isinstance(inputs, tuple)
        else (inputs,)
    )


def _recorded(
    ready: _runnable.RunnableStep, seed: int, path: Path | None, trace: Path | None
) -> dict[str, Any]:
    """Record a step and write it. Returns measured and expected busy seconds of each device."""
    from roost.runtime.ops.run import GraphRuntime
    from roost.runtime.whole.module_placement import named_tensors
    from roost.search.measured.served_model import cores_of
    from roost.simulator.compiled import simulate

    weights = {name: value.detach() for name, value in named_tensors(ready.built.module).items()}
    cores = cores_of(ready.problem.cluster)
    with GraphRuntime(
        ready.step, ready.problem, ready.placement, weights, cores=cores, seed=seed, record=True
    ) as runtime:
        for _ in range(_WARM):
            runtime.step(*_args(ready))
        recorded = runtime.timeline()
    _step_report.write(recorded, ready.problem.graph, path, trace)
    expected = simulate(ready.problem, ready.placement, full=True).busy
    rows = zip(recorded.device_names, recorded.busy.tolist(), expected.tolist(), strict=True)
    return {name: {"measured": measured, "expected": about} for name, measured, about in rows}


def _report(facts: dict[str, Any]) -> list[Any]:
    times = [
        show_seconds(facts[name]) for name in ("step_time", "shortest", "longest", "estimated")
    ]
    more = " (roost profile times the ops themselves)" if facts["costs"] == "roofline" else ""
    lines = [
        f"{facts['model']} on {facts['cluster']}: {times[0]} a step, median of {facts['steps']} "
        f"({times[1]} to "
        f"{times[2]}); {times[3]} expected, costs: {facts['costs']}{more}"
    ]
    lines += [
        f"peak memory of {name}: {show_bytes(size)}" for name, size in facts["peak_memory"].items()
    ]
    lines += [
        f"{name} computes for {show_seconds(busy['measured'])} of a step; "
        f"{show_seconds(busy['expected'])} expected"
        for name, busy in facts.get("busy", {}).items()
    ]
    if facts["losses"]:
        lines.append("loss: " + " ".join(f"{loss:.4f}" for loss in facts["losses"][:8]))
    return lines
