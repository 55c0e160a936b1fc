"""`roost compare`: placers at equal budgets on one problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost import catalog
from roost.cli import _console, _model, _problem, _search
from roost.cli._text import plural, show_bytes, styled
from roost.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.problem import Problem
    from roost.core.trial import Bound, Result, Trial
    from roost.errors import Infeasible
    from roost.placers import Placer

_MANY = 100_000  # trials: more are shown in thousands
_SECONDS = 2.0  # for each placer and seed, where neither trials nor seconds are given


@dataclass(frozen=True)
class Entry:
    """A placer in the comparison, with its variant or weights."""

    placer: str
    variant: str | None = None
    weights: str | None = None
    chosen: Placer | None = None  # the placer with these

    @property
    def label(self) -> str:
        """The name in the table: `seq2seq, paper`; `lister, weights`."""
        more = self.variant or ("weights" if self.weights else "")
        return f"{self.placer}, {more}" if more else self.placer


@dataclass
class Row:
    """A placer and its results by seed."""

    entry: Entry
    results: list[Result] = field(default_factory=list)
    why_not: str = ""

    @property
    def placer(self) -> str:
        return self.entry.placer

    @property
    def fitting(self) -> list[Result]:
        """The results that fit, the shortest step first."""
        return sorted((r for r in self.results if r.best.feasible), key=lambda r: r.best.step_time)

    @property
    def middle(self) -> Result | None:
        """The median result; if none fits, the one nearest to fitting."""
        if self.fitting:
            return self.fitting[(len(self.fitting) - 1) // 2]
        return min(self.results, key=lambda r: r.best.missing_bytes, default=None)


def compare(
    model_or_graph: _problem.ModelOrGraph,
    on: _problem.On = None,
    placers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help="Placers (see roost placers); all of them where left out."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="For each placer and seed; 2 where --trials is left out too."
        ),
    ] = None,
    trials: _search.Trials = None,
    variant: _search.Variant = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Weights from roost learn, for the placer that they are of."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="How many seeds: 0, 1, 2, ...")] = 5,
    train: _model.Train = False,
    optimizer: _model.Optimizer = None,
    setting: _model.Settings = None,
    shape: _model.Shapes = None,
    trust: _model.Trust = False,
    costs: _problem.CostsFile = None,
    as_json: _console.AsJson = False,
) -> None:
    """Compare placers at equal budgets.

    Every placer gets the same trials and seconds for every seed. If a placer cannot run, because a
    package is missing or the model does not suit it, a line says why. The exit code is 3 if no
    placer finds a placement that fits.

    --variant applies to the placers that have this variant, and --weights to the placer of the
    file. All other placers run with their defaults.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; it must be at least 1")
    entries = _entries(_names(placers), weights, variant)
    if seconds is None and trials is None:
        seconds = _SECONDS
    _search.check_budget(seconds, trials)
    problem, _ = _problem.read(model_or_graph, on, costs, train, optimizer, setting, shape, trust)
    proof = _search.proved(problem)
    if proof is not None:
        seconds, trials = _search.briefly(seconds, trials)
    rows = _run(problem, entries, seconds, trials, seeds)
    if not any(row.results for row in rows):
        raise InputError("; ".join(f"{row.entry.label}: {row.why_not}" for row in rows))
    single = _single(problem, rows)
    bound = _bound(problem, rows)
    facts = _facts(problem, rows, single, bound)
    _console.answer(as_json, facts, _report(facts, problem, bound))
    if not any(row.fitting for row in rows):
        raise _nothing_fits(problem, rows, proof)


def _nothing_fits(problem: Problem, rows: Sequence[Row], proof: Infeasible | None) -> Infeasible:
    """The error with the result that is nearest to fitting."""
    from roost.search.infeasible import nothing_found

    results = [row.middle for row in rows if row.middle is not None]
    nearest = min(results, key=lambda each: each.best.missing_bytes)
    graph = problem.graph.name
    message = f"nothing fits: no placer found a placement of {graph!r} within every device"
    return nothing_found(problem, nearest, message if proof is None else str(proof))


def _names(text: str | None) -> list[str]:
    """The named placers, each once. Raises InputError for an unknown name."""
    if text is None:
        return catalog.names("placers")
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(f"--placers {text!r}: names no placer; write it as single,scotch,auto")
    for name in names:
        _search.check_placer(name)
    return names


def _entries(names: Sequence[str], weights: Path | None, variant: str | None) -> list[Entry]:
    """The placers, with the variant or weights that suit them. Raises InputError if none suits."""
    entries = [Entry(name) for name in names]
    errors = []
    if weights is None and variant is None:
        return entries
    for number, name in enumerate(names):
        try:
            chosen = _search.placer_with(name, weights, variant)
        except InputError as error:
            errors.append(str(error))
            continue
        assert not isinstance(chosen, str)
        entries[number] = Entry(name, variant, None if weights is None else str(weights), chosen)
    if errors and len(errors) == len(names):
        # The placer that takes weights has the most useful error.
        useful = [error for error in errors if "takes no weights" not in error]
        raise InputError((useful or errors)[0])
    return entries


def _run(
    problem: Problem,
    entries: Sequence[Entry],
    seconds: float | None,
    trials: int | None,
    seeds: int,
) -> list[Row]:
    """The results of every placer and seed, or those before Ctrl-C."""
    rows: list[Row] = []
    try:
        for number, entry in enumerate(entries, 1):
            rows.append(Row(entry))
            for seed in range(seeds):
                what = f"{entry.label} ({number}/{len(entries)}), seed {seed} ({seed + 1}/{seeds})"
                result = _ask(problem, entry, what, seconds, trials, seed)
                if isinstance(result, str):
                    rows[-1].why_not = result
                    break
                rows[-1].results.append(result)
    except KeyboardInterrupt:
        if not any(row.results for row in rows):
            raise
        _console.note("interrupted: these are the placers and seeds that were finished")
    return [row for row in rows if row.results or row.why_not]


def _ask(
    problem: Problem, entry: Entry, what: str, seconds: float | None, trials: int | None, seed: int
) -> Result | str:
    """The result of a placer, or the reason why it cannot run."""
    from roost.search.solve import search

    try:
        with _search.watching(what) as tell:
            result = search(
                problem, entry.chosen or entry.placer, seconds, trials, seed, tell, prove=False
            )
    except (InputError, MissingExtra) as error:
        return str(error)
    except Exception as error:  # of an outside placer; the comparison goes on
        return _fault(error, entry.placer)
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    return result


def _fault(error: Exception, name: str) -> str:
    """`ZeroDivisionError: division by zero (mine.py:12)`, with the line in the placer's file."""
    import sys
    from traceback import extract_tb

    own = sys.modules[catalog.find("placers", name).__module__].__file__
    frames = extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{said} ({Path(last.filename).name}:{last.lineno})"


def _single(problem: Problem, rows: Sequence[Row]) -> Trial:
    asked = {row.placer: row.middle.best for row in rows if row.middle is not None}
    return _search.single_trial(problem, asked)


def _bound(problem: Problem, rows: Sequence[Row]) -> Bound:
    """The best bound: of a proof now, or of a placer."""
    from roost.bounds import bound

    best = min((row.fitting[0].best.step_time for row in rows if row.fitting), default=None)
    with _console.working("proving a bound"):
        own = bound(problem, upper=best)
    proved = [result.bound for row in rows for result in row.results if result.bound is not None]
    return max([own, *proved], key=lambda each: each.step_time)


def _facts(problem: Problem, rows: Sequence[Row], single: Trial, bound: Bound) -> dict[str, Any]:
    """The comparison in seconds and bytes, as --json prints it, the best placer first."""
    ordered = sorted(rows, key=lambda row: (not row.results, not row.fitting, _key(row)))
    return {
        "graph": problem.graph.name,
        "num_ops": problem.graph.num_ops,
        "cluster": problem.cluster.name,
        "costs": problem.costs.source,
        "bound": {"step_time": bound.step_time, "proof": bound.proof},
        "single": _search.single_facts(problem, single),
        "placers": [_row_facts(problem, row, single, bound) for row in ordered],
    }


def _label(row: dict[str, Any], name: str) -> str:
    return Entry(name, row["variant"], row["weights"]).label


def _key(row: Row) -> float:
    if row.fitting:
        return median(result.best.step_time for result in row.fitting)
    return min((result.best.missing_bytes for result in row.results), default=0)


def _row_facts(problem: Problem, row: Row, single: Trial, bound: Bound) -> dict[str, Any]:
    middle = row.middle
    given = {name: getattr(row.entry, name) for name in ("placer", "variant", "weights")}
    if middle is None:
        return given | {"why_not": row.why_not, "seeds": []}
    times = [result.best.step_time for result in row.fitting]
    step_time = median(times) if times else middle.best.step_time
    facts = _search.facts(problem, middle.best, single) | given | {"step_time": step_time}
    if facts["ratio_to_single"] is not None:
        facts["ratio_to_single"] = step_time / single.step_time
    gap = None
    if times:
        gap = 1.0 - bound.step_time / step_time if step_time > 0 else 0.0
    return facts | {
        "spread": (times[-1] - times[0]) / step_time if times and step_time > 0 else 0.0,
        "num_feasible": len(times),
        "num_trials": int(median(result.num_trials for result in row.results)),
        "seconds": median(result.seconds for result in row.results),
        "gap": gap,
        "seeds": [
            {
                "seed": result.seed,
                "step_time": result.best.step_time,
                "feasible": result.best.feasible,
                "order": result.best.placement.order,
                **{name: getattr(result, name) for name in ("num_trials", "seconds", "ended")},
            }
            for result in row.results
        ],
    }


def _report(facts: dict[str, Any], problem: Problem, bound: Bound) -> Iterator[RenderableType]:
    """The comparison for people."""

    asked = [row for row in facts["placers"] if row["seeds"]]
    seeds = max((len(row["seeds"]) for row in asked), default=0)
    yield styled(
        f"{facts['graph']} ({plural(facts['num_ops'], 'op')}) on {facts['cluster']}",
        "bold",
    )
    yield f"median of {plural(seeds, 'seed')}; {_search.show_bound(None, bound)}"
    yield ""
    columns = ["placer", "step", "spread", "of single", "order", "peak", "trials", "seconds", "gap"]
    table = _console.table(columns, {*columns} - {"placer", "order"})
    names = [row["placer"] for row in asked]
    for row in asked:
        table.add_row(
            _label(row, _search.show_name(row["placer"], names)),
            _search.show_step(row),
            f"{row['spread']:.1%}" if row["num_feasible"] > 1 else "-",
            _search.show_ratio(row["ratio_to_single"]),
            row["order"],
            show_bytes(row["peak_memory"][row["fullest"]]),
            _show_trials(row["num_trials"]),
            f"{row['seconds']:.2f}",
            _search.show_gap(row["gap"]),
        )
    yield table
    yield ""
    yield styled(
        "spread: (longest - shortest) / median; of single: step / step on the best single device; "
        "peak: of the fullest device; gap: the part of the step that could at most be saved",
        "dim",
    )
    for row in facts["placers"]:
        count = len(row["seeds"])
        if not count:
            yield f"without {_label(row, row['placer'])}: {row['why_not']}"
        elif row["num_feasible"] < count:
            yield (
                f"{_label(row, row['placer'])}: {row['num_feasible']} of "
                f"{plural(count, 'seed')} fit"
            )


def _show_trials(count: int) -> str:
    return f"{count:,}" if count < _MANY else f"{count / 1000:,.0f}k"
