"""`roost place`: search for the best placement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import (
    _console,
    _exit_codes,
    _measured_search,
    _microbatch_report,
    _microbatches,
    _model,
    _problem,
    _search,
    _smaller_batch,
    _step_report,
)
from roost.cli._metrics import METRICS, Metrics
from roost.cli._model import ModelSpec
from roost.cli._text import assembled, plural, show_bytes, show_seconds, styled
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.problem import Problem
    from roost.core.timeline import Timeline
    from roost.core.trial import Result, Trial
    from roost.errors import Infeasible
    from roost.placers import Placer
    from roost.search.evaluate import Progress
    from roost.search.measured import Measuring
    from roost.search.measured.race import Race

JOURNAL = "trials.jsonl"
FILES = {
    "placement": _problem.PLACEMENT,
    "problem": _problem.PROBLEM,
    "result": "result.json",
    "timeline": "timeline.json.gz",
    "trace": "trace.json.gz",
    "trials": JOURNAL,
}


def place(
    model_or_graph: _problem.ModelOrGraph,
    on: _problem.On = None,
    placer: Annotated[
        str,
        typer.Option(metavar="NAME", help="A placer (see roost placers), or package.module:Class."),
    ] = "auto",
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Stop after S seconds; 10 if --trials is left out too."),
    ] = None,
    trials: _search.Trials = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Equal seeds give equal results for equal trials.")
    ] = 0,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Weights from roost learn, for placers that take weights."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the placement, its problem, the result, its timeline, all trials and "
            "the figures of learning here.",
        ),
    ] = None,
    variant: _search.Variant = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="With -o: also write the figures of placers that learn for TensorBoard.",
        ),
    ] = False,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    costs: _problem.CostsFile = None,
    evaluate: _measured_search.Evaluate = "simulated",
    race: _measured_search.WithRace = None,
    microbatches: _microbatches.Count = None,
    requests: _microbatches.Requests = None,
    batch_statistics: _microbatches.BatchStatistics = False,
    as_json: _console.AsJson = False,
) -> None:
    """Search for the best placement.

    Shows its step time, the gap to the best possible step, and a row for each device. Ctrl-C ends
    the search with the best so far. With -o a search that was killed goes on when you give the same
    command again. The exit code is 3 if nothing fits; the best try is shown all the same.

    With --evaluate measured every candidate runs in a process of its own, in turn with the best so
    far. One that fails is a trial that is not feasible. In the end the best placement races against
    the best single device and the best heuristic. It is recommended only if it is faster by more
    than the noise.
    """
    measured = _measured_search.check(evaluate, race, model_or_graph, on)
    asked = _microbatches.Asked(microbatches, requests, batch_statistics)
    asked.check(measured, train, tensorboard, None if output is None else output / JOURNAL)
    _search.check_placer(placer)
    chosen = _search.placer_with(placer, weights, variant)
    _search.check_budget(seconds, trials)
    if output is not None:
        _prepare(output)
    elif tensorboard:
        raise InputError("--tensorboard needs a folder to write to; name it with -o")
    source: Measuring | None = None
    raced: Race | None = None
    model: ModelSpec | None = None
    proof: Infeasible | None = None
    more: dict[str, Any] = {}
    given = (model_or_graph, on, costs, train, optimizer, setting, shape, trust)
    if asked:
        unrolling = _microbatches.unrolling(asked, *given)
        found = unrolling.search(placer, chosen, seconds, trials, seed)
        problem, result = found.problem, found.result
        single = _single(problem, result, None)
        more = _microbatch_report.facts_of(unrolling, found, result.best.placement)
    else:
        problem, model = _problem.read(*given)
        proof = _search.proved(problem)
        if proof is not None:
            seconds, trials = _search.briefly(seconds, trials)
        if measured and proof is None:
            assert model is not None
            source = _measured_search.source_of(problem, model, seed)
        limits = (seconds, trials, seed)
        result, single, raced = _searched(
            problem, placer, chosen, limits, output, tensorboard, source, race
        )
    from roost.simulator.compiled import simulate

    step = simulate(problem, result.best.placement, full=True)
    facts = _facts(problem, result, single, step) | {"variant": variant, "evaluate": "simulated"}
    facts |= more | ({"not_asked": []} if asked else {})  # its own table has all rows
    if source is not None:
        facts |= _measured_search.facts(result, step.step_time, raced)
    if output is not None:
        facts["files"] = _write(output, problem, result, step, journal=not asked)
    lacking: Infeasible | None = None
    if not result.best.feasible:
        batch = None
        if asked:
            lacking = unrolling.does_not_fit(found)
        else:
            lacking, batch = _smaller_batch.nothing_fits(problem, result, model, proof)
        facts["fix"] = {
            "device": lacking.device,
            "missing_bytes": lacking.missing_bytes,
            "batch": batch,
        }
        facts["fix"] |= {"microbatches": lacking.microbatches} if asked else {}
    early = "" if source is None else _measured_search.ended_early(result, trials)
    _console.answer(as_json, facts, _report(facts, problem, result, raced, early))
    if lacking is not None:
        _console.error(str(lacking))
        raise typer.Exit(_exit_codes.NOTHING_FITS)


def _searched(
    problem: Problem,
    name: str,
    placer: str | Placer,
    limits: tuple[float | None, int | None, int],
    output: Path | None,
    tensorboard: bool,
    source: Measuring | None,
    race: bool | None,
) -> tuple[Result, Trial | None, Race | None]:
    """The result, the best single device, and the race if there was one.

    `limits` are seconds, trials and the seed.
    """
    try:
        finalists = _measured_search.Finalists()
        result = _search_for(problem, name, placer, *limits, output, tensorboard, source, finalists)
        single = _single(problem, result, source)
        raced = None
        if (
            source is not None
            and single is not None
            and race is not False
            and result.ended != "interrupted"
        ):
            result, single, raced = _measured_search.raced(
                problem, source, result, finalists.trials, single
            )
    finally:
        if source is not None:
            source.close()
    return result, single, raced


def _prepare(folder: Path, names: Iterable[str] = (*FILES.values(), METRICS)) -> None:
    """Make the folder. Raises InputError at once if its files cannot be written."""
    from roost.core.files import is_special

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: is a file; -o names a folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(folder)!r}: cannot be made: {reason}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to: Permission denied")
    for path in (folder / name for name in names):
        if path.is_dir() or is_special(path):
            what = "a folder" if path.is_dir() else "no plain file"
            raise InputError(f"{path}: is {what}; move it away, or name another folder")


def _search_for(
    problem: Problem,
    name: str,
    placer: str | Placer,
    seconds: float | None,
    trials: int | None,
    seed: int,
    output: Path | None,
    tensorboard: bool,
    source: Measuring | None = None,
    finalists: _measured_search.Finalists | None = None,
) -> Result:
    from roost.search.solve import search

    journal = None if output is None else output / JOURNAL
    metrics = None
    first = ""
    if journal is not None and journal.is_file() and (size := journal.stat().st_size):
        first = f"going on from {journal} ({show_bytes(size)}): its trials are not evaluated again"
    if output is not None:
        metrics = Metrics(output, tensorboard, going_on=bool(first))
    note = None if metrics is None else metrics.add
    lent = None if source is None else source.lent()
    with _search.watching(name, first, None if lent else _search.baseline(problem)) as tell:
        on_trial: Callable[[Progress], object] = tell
        if finalists is not None:
            finalists.tell = tell
            on_trial = finalists
        result = search(
            problem, placer, seconds, trials, seed, on_trial, journal, source=lent, on_note=note
        )
    if metrics is not None:
        metrics.close()
    if result.ended == "interrupted":
        _console.note("interrupted: this is the best so far")
    return result


def _single(problem: Problem, result: Result, source: Measuring | None) -> Trial | None:
    """The best single device; None if it is unknown and the search was interrupted."""
    asked = {result.placer: result.best, **result.baselines}
    if source is None or "single" in asked:
        return _search.single_trial(problem, asked)
    if result.ended == "interrupted":
        return None
    try:
        return _measured_search.asked(problem, source, "single")
    except KeyboardInterrupt:
        _console.note("interrupted: one device alone was not measured")
        return None


def _facts(
    problem: Problem, result: Result, single: Trial | None, step: Timeline
) -> dict[str, Any]:
    """The result in seconds and bytes, as --json prints it."""
    asked = sorted(
        result.baselines.values(), key=lambda trial: (trial.missing_bytes, trial.step_time)
    )
    bound = result.bound
    return {
        **_step_report.summary(problem, result.best.placement, step),
        "placer": result.placer,
        "found_by": result.best.placer,
        "seed": result.seed,
        "num_trials": result.num_trials,
        "seconds": result.seconds,
        "ended": result.ended,
        "bound": None if bound is None else {"step_time": bound.step_time, "proof": bound.proof},
        "gap": _search.gap(result.best, bound),
        "single": None if single is None else _search.single_facts(problem, single),
        "ratio_to_single": _search.ratio(result.best, single),
        "baselines": [_search.facts(problem, trial, single) for trial in asked],
        "not_asked": _not_asked(result),
    }


def _not_asked(result: Result) -> list[str]:
    """The baselines after the last one that the placer asked."""
    from roost.placers import AsksBaselines
    from roost.search.solve import named_placer

    placer = named_placer(result.placer)
    known = placer.baselines if isinstance(placer, AsksBaselines) else ()
    reached = max(
        (number for number, name in enumerate(known, 1) if name in result.baselines), default=0
    )
    return list(known[reached:]) if reached else []  # some ask only where they have weights


def _write(
    folder: Path, problem: Problem, result: Result, step: Timeline, journal: bool
) -> dict[str, str]:
    """Write all files but the journal. Returns their paths, with that of the journal if asked."""
    from roost.report.trace import write_trace

    path = {kind: folder / name for kind, name in FILES.items() if journal or name != JOURNAL}
    result.best.placement.save(path["placement"])
    problem.save(path["problem"])
    result.save(path["result"])
    step.save(path["timeline"])
    write_trace(step, path["trace"], problem.graph)
    if (folder / METRICS).exists():  # of placers that learn
        path["metrics"] = folder / METRICS
    names = ", ".join(each.name for each in path.values())
    _console.note(f"wrote {names} to {folder}; open the trace in ui.perfetto.dev")
    return {kind: str(each) for kind, each in path.items()}


def _report(
    facts: dict[str, Any], problem: Problem, result: Result, raced: Race | None, early: str = ""
) -> Iterator[RenderableType]:
    """The result for people. `early` is the reason why the search ended before its budget."""

    measured = facts["evaluate"] == "measured"
    if measured and not facts["feasible"] and result.best.why:
        yield styled(f"does not run: {result.best.why}", "red")
    else:
        yield assembled(
            (f"{show_seconds(facts['step_time'])} a step", "bold"),
            _microbatch_report.copies_in(facts),
            f", {_beside_single(facts)}, ",
            _step_report.fits(facts),
        )
    if measured:
        yield f"Measured; simulated it takes {show_seconds(facts['simulated_step_time'])}"
    if raced is not None:
        yield f"Race: {raced.said}"
    if early:
        yield early
    if result.bound is not None:
        words = _search.show_bound(facts["gap"], result.bound)
        yield words[0].upper() + words[1:]
    yield from _microbatch_report.summary_of(facts)
    by = "" if facts["found_by"] == facts["placer"] else f"; found by {facts['found_by']}"
    about = (
        f"{facts['graph']} ({plural(_step_report.num_ops(facts), 'op')}) on {facts['cluster']}, "
        f"{facts['order']} order, {plural(facts['num_transfers'], 'transfer')}, costs: "
        f"{facts['costs']}",
        f"{facts['placer']}{f' ({variant})' if (variant := facts['variant']) else ''}, seed "
        f"{facts['seed']}: "
        f"{plural(facts['num_trials'], 'trial')} "
        f"in {facts['seconds']:.1f} s{by}",
    )
    yield styled("\n".join(about), "dim")
    yield ""
    if measured:
        yield styled(
            f"as simulated, in a step of {show_seconds(facts['simulated_step_time'])}:", "dim"
        )
    yield _step_report.device_table(facts)
    if facts["baselines"]:
        yield ""
        if measured:
            yield styled("as measured; the memory of threads is simulated:", "dim")
        yield _baselines(facts, problem)
    yield from _microbatch_report.table_of(facts)
    if facts["not_asked"] and facts["ended"] == "budget":
        yield ""
        names = ", ".join(facts["not_asked"])
        yield styled(f"not asked, for lack of time, of trials or of a package: {names}", "dim")


def _beside_single(facts: dict[str, Any]) -> str:
    single = facts["single"]
    share = facts["ratio_to_single"]
    if single is None:
        return "one device alone was not measured"
    if not single["feasible"]:
        return "too large for any one device"
    if share is None:
        return f"{single['device']} alone takes {show_seconds(single['step_time'])}"
    return f"{share:.2f} of the {show_seconds(single['step_time'])} on {single['device']} alone"


def _baselines(facts: dict[str, Any], problem: Problem) -> RenderableType:
    """A table of the answer and of the baselines, the best first."""
    own = facts | {
        "missing_bytes": sum(facts["missing_bytes"].values()),
        "fullest": max(
            facts["peak_memory"],
            key=lambda name: facts["peak_memory"][name] / facts["capacity"][name],
        ),
    }
    numbers = ["step", "of single", "peak"]
    rows = _console.table(["placer", "step", "of single", "order", "fullest", "peak"], numbers)
    names = [facts["placer"], *(row["placer"] for row in facts["baselines"])]
    for row in [own, *facts["baselines"]]:
        rows.add_row(
            _search.show_name(row["placer"], names),
            _search.show_step(row),
            _search.show_ratio(row["ratio_to_single"]),
            row["order"],
            row["fullest"],
            show_bytes(row["peak_memory"][row["fullest"]]),
        )
    return rows
