"""`roost bound`: a proof of how short a step can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _exit_codes, _model, _problem, _search
from roost.cli._text import assembled, plural, show_bytes, show_seconds, styled
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.problem import Problem


def bound(
    model_or_graph: _problem.ModelOrGraph,
    on: _problem.On = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="How long to look for a better proof.")
    ] = 1.0,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    costs: _problem.CostsFile = None,
    as_json: _console.AsJson = False,
) -> None:
    """Prove how short a step can be at best.

    No placement and no order has a shorter step. Shows the kind of proof, and the best single
    device. The exit code is 3 if it is proved that nothing fits.
    """
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}; it must be more than 0")
    problem, _ = _problem.read(model_or_graph, on, costs, train, optimizer, setting, shape, trust)
    with _console.working("proving", _search.COMPILING):
        facts = _facts(problem, seconds)
    _console.answer(as_json, facts, _report(facts))
    if facts["nothing_fits"] is not None:
        _console.error(facts["nothing_fits"])
        raise typer.Exit(_exit_codes.NOTHING_FITS)


def _facts(problem: Problem, seconds: float) -> dict[str, Any]:
    import time

    from roost import bounds

    single = _search.single_trial(problem)
    began = time.perf_counter()
    proven = bounds.bound(
        problem, seconds=seconds, upper=single.step_time if single.feasible else None
    )
    spent = time.perf_counter() - began
    proof = bounds.nothing_fits(problem)
    return {
        "graph": problem.graph.name,
        "num_ops": problem.graph.num_ops,
        "cluster": problem.cluster.name,
        "costs": problem.costs.source,
        "bound": {"step_time": proven.step_time, "proof": proven.proof},
        "seconds": spent,
        "single": _search.single_facts(problem, single),
        "gap_of_single": _search.gap(single, proven),
        "nothing_fits": None if proof is None else str(proof),
    }


def _report(facts: dict[str, Any]) -> Iterator[RenderableType]:

    least = facts["bound"]["step_time"]
    single = facts["single"]
    yield assembled(
        ("No step is shorter than ", ""),
        (show_seconds(least), "bold"),
        f" (proof: {facts['bound']['proof']})",
    )
    if not single["feasible"]:
        yield (
            f"No one device holds it all: {single['device']} lacks "
            f"{show_bytes(single['missing_bytes'])}"
        )
    elif _search.is_optimal(facts["gap_of_single"]):
        yield f"Everything on {single['device']} takes exactly that: more devices cannot help"
    else:
        faster = f", at most {single['step_time'] / least:.2f} times faster" if least > 0 else ""
        yield (
            f"Everything on {single['device']} takes {show_seconds(single['step_time'])}: "
            f"{_search.show_gap(facts['gap_of_single'])} of it could be saved{faster}"
        )
    yield styled(
        f"{facts['graph']} ({plural(facts['num_ops'], 'op')}) on {facts['cluster']}, "
        f"costs: {facts['costs']}; "
        f"proved in {show_seconds(facts['seconds'])}",
        "dim",
    )
