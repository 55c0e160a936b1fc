"""Find the best placement that a budget allows, and say how good it provably is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import inf
from numbers import Integral
from pathlib import Path

import numpy as np

from roost import catalog
from roost.bounds import bound, nothing_fits
from roost.core import files
from roost.core.arrays import digest
from roost.core.problem import Problem
from roost.core.trial import Result
from roost.errors import BudgetSpent, InputError
from roost.placers import Placer, weights_of
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Progress, Search, Source, Stopped
from roost.search.fixes import nothing_found
from roost.search.local import Simulating
from roost.search.warm_up import warm_up

_SECONDS = 10.0  # where neither trials nor seconds are given
_BOUND_SHARE = 0.1  # of the seconds, at most one second

log = logging.getLogger(__name__)


def solve(
    problem: Problem,
    placer: str | Placer = "auto",
    seconds: float | None = None,
    trials: int | None = None,
    seed: int = 0,
    on_trial: Callable[[Progress], object] | None = None,
    journal: str | Path | None = None,
    workers: int | None = None,
    on_note: Callable[[Mapping[str, float]], object] | None = None,
    source: Source | None = None,
) -> Result:
    """Search for the best placement until the trials or the seconds are spent (ten seconds where
    neither is given).

    Equal seeds give equal results for equal numbers of trials; seconds only decide where the search
    stops. `journal` names a file that gets every trial, and from which a search that was killed
    goes on. `on_trial` is called with a `Progress` for each trial that a placer asks for, after the
    batch that it is in, and for the best of each round of a compiled loop; where it returns True
    the search ends. `on_note` is called with what a learned placer says of its learning. `source`
    says what placements cost, and is closed in the end: the simulator where it is left out, or a
    `roost.search.measured.Measuring` that runs them. Ctrl-C ends the search with the best so far.
    Raises `Infeasible`, with the result of the search as its `result`, where nothing is found that
    fits; at once, and without a result, where that is proved.
    """
    check(problem)
    proof = nothing_fits(problem)
    if proof is not None:
        raise proof
    result = search(
        problem,
        placer,
        seconds,
        trials,
        seed,
        on_trial,
        journal,
        workers,
        source=source,
        on_note=on_note,
    )
    if not result.best.feasible:
        raise nothing_found(problem, result, none_ran(result))
    return result


def search(
    problem: Problem,
    placer: str | Placer = "auto",
    seconds: float | None = None,
    trials: int | None = None,
    seed: int = 0,
    on_trial: Callable[[Progress], object] | None = None,
    journal: str | Path | None = None,
    workers: int | None = None,
    budget: Budget | None = None,
    source: Source | None = None,
    prove: bool = True,
    on_note: Callable[[Mapping[str, float]], object] | None = None,
) -> Result:
    """As `solve`, but what does not fit is a result like any other. `prove` says whether a bound is
    worked out."""
    check(problem)
    name, chosen = _placer(placer)
    seed = _seed(seed)
    warm_up(chosen, prove, problem.cluster.keeps_busy)
    source = source or Simulating(problem, workers)
    if seconds is None and trials is None:
        seconds = _SECONDS
    given = (inf if trials is None else trials, inf if seconds is None else seconds)
    budget, fresh = (Budget(*given), True) if budget is None else (budget, False)
    opened = None
    if journal is not None:
        # Only who writes files needs what writes them.
        from roost.search.journal import open_journal

        how = "" if getattr(source, "simulated", True) else ", measured"
        opened = open_journal(journal, problem, name, _settings(chosen) + how, seed)
    try:
        if callable(start := getattr(source, "open", None)):
            start()
            # A process with a model takes seconds that nobody gave for it.
            budget = Budget(*given) if fresh else budget
        state = Search(problem, source, budget, seed, opened, on_trial, on_note)
        ended = _run(state, name, chosen, prove)
        if ended != "stopped":
            state.take_rest()
    finally:
        source.close()
        if opened is not None:
            opened.close()
    assert state.best is not None
    return Result(
        best=state.best,
        placer=name,
        seed=seed,
        num_trials=budget.num_trials,
        seconds=budget.elapsed,
        baselines={other: trial for other, trial in state.best_of.items() if other != name},
        bound=state.bound,
        graph=problem.graph.name,
        cluster=problem.cluster.name,
        problem=problem.digest,
        ended=ended,
    )


def none_ran(result: Result) -> str:
    """What to say where the best try did not fail for memory as simulated; nothing where it did."""
    best = result.best
    failed = best.why and not best.missing_bytes
    return f"nothing runs: the best try of {result.num_trials} failed: {best.why}" if failed else ""


def check(problem: Problem) -> None:
    """Raise where no placement can be, however much memory there is."""
    if not isinstance(problem, Problem):
        raise InputError(
            f"solve takes a problem, not {type(problem).__name__}; roost.estimate makes one of a "
            f"graph"
        )
    graph = problem.graph
    members = np.flatnonzero(graph.group >= 0)
    may = np.ones((graph.num_groups, problem.cluster.num_devices), dtype=bool)
    np.logical_and.at(may, graph.group[members], problem.allowed[members])
    homeless = np.flatnonzero(~may.any(axis=1))
    if len(homeless):
        group = int(homeless[0])
        kinds: dict[tuple[str, ...], str] = {}
        for op in np.flatnonzero(graph.group == group).tolist():
            kinds.setdefault(graph.allowed[op], graph.op_names[op])
        said = ", ".join(
            f"{name!r} on {' or '.join(choice)}" for choice, name in kinds.items() if choice
        )
        raise InputError(
            f"group {graph.group_names[group]!r} has no device of cluster "
            f"{problem.cluster.name!r} on which all of it "
            f"may run: {said} only; part them, or allow more kinds"
        )


def _run(state: Search, name: str, placer: Placer, prove: bool) -> str:
    """Run the placer to its end or that of the budget; why it ended."""
    evaluate = Evaluation(state, name)
    try:
        if prove and state.is_simulated:
            state.prove(bound(state.problem, seconds=min(1.0, _BOUND_SHARE * state.budget.seconds)))
        placement = placer.place(state.problem, evaluate)
        state.problem.check(placement)
        if state.best is None or placement.digest != state.best.placement.digest:
            evaluate([placement])
        return "budget" if state.budget.is_spent else "done"
    except Stopped as stopped:
        return stopped.ended
    except BudgetSpent:
        if state.best is None:
            raise InputError(
                f"the budget was spent before {name!r} had evaluated one placement; give it more "
                f"seconds"
            ) from None
        return "budget"
    except KeyboardInterrupt:
        if state.best is None:
            raise
        return "interrupted"


def _placer(placer: str | Placer) -> tuple[str, Placer]:
    if isinstance(placer, str):
        return placer, named_placer(placer)
    if isinstance(placer, type) or not callable(getattr(placer, "place", None)):
        what = placer.__name__ if isinstance(placer, type) else type(placer).__name__
        wrong = "is a class, make one of it" if isinstance(placer, type) else "has none"
        raise InputError(f"a placer has a method place(problem, evaluate); {what} {wrong}")
    return catalog.file_name(type(placer).__name__), placer


def _settings(placer: Placer) -> str:
    """Its settings as text; of weights what is in the file: under the same name it may be another
    one."""
    text, weights = repr(placer), weights_of(placer)
    if weights is None or not Path(weights).is_file():
        return text
    return text.replace(
        f"weights={weights!r}", f"weights={digest([files.read_plain(Path(weights))])!r}"
    )


def named_placer(name: str) -> Placer:
    """The placer of that name, with the settings it has by itself."""
    found = catalog.find("placers", name)
    if not callable(getattr(found, "place", None)):
        raise InputError(f"{name!r} is no placer: it has no method place(problem, evaluate)")
    try:
        chosen: Placer = found()
    except TypeError as error:
        raise InputError(
            f"the placer {name!r} cannot be made without settings: {error}; give them defaults"
        ) from None
    return chosen


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise InputError(f"seed is {seed!r}; it must be a whole number that is not negative")
    return int(seed)
