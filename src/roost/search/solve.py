"""Find the best placement that a budget allows, and prove how good it is.

`solve` is the public function. `search` also returns a placement that does not fit.
"""

from __future__ import annotations

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
from roost.search.evaluate import Evaluation, Progress, Search, Stopped
from roost.search.infeasible import no_run, nothing_found
from roost.search.journal import open_journal
from roost.search.past import Past
from roost.search.simulating import Simulating
from roost.search.source import Source
from roost.search.warm_up import warm_up

_SECONDS = 10.0  # where neither trials nor seconds are given
_BOUND_SHARE = 0.1  # of the seconds, at most one second


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
    """Search for the best placement until the trials or the seconds are spent; default 10 seconds.

    Equal seeds give equal results for equal numbers of trials. Seconds only decide when to stop.

    - `journal` names a file that gets every trial. A search that was killed goes on from it.
    - `on_trial` gets a `Progress` for each trial that a placer asks for, after its batch, and for
      the best of each round of a compiled loop. The search ends if it returns True.
    - `on_note` gets the figures that a learned placer reports.
    - `source` gives the trials, and is closed at the end. The default is the simulator;
      `roost.search.measured.Measuring` runs placements.

    Ctrl-C ends the search with the best so far. Raises `Infeasible` if nothing fits: at once if
    that is proved, else with the result of the search as `result`.
    """
    check_groups(problem)
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
        raise nothing_found(problem, result, no_run(result))
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
    """Search as `solve` does, and return the best trial even if it does not fit.

    `prove` asks for a bound. A `budget` replaces the trials and seconds.
    """
    check_groups(problem)
    name, chosen = _named(placer)
    seed = checked_seed(seed)
    warm_up(chosen, prove, problem.cluster.keeps_busy)
    source = source or Simulating(problem, workers)
    if seconds is None and trials is None:
        seconds = _SECONDS
    limits = (inf if trials is None else trials, inf if seconds is None else seconds)
    spending = budget or Budget(*limits)
    past = Past()
    if journal is not None:
        settings = _settings(chosen) + ("" if source.simulated else ", measured")
        past = open_journal(journal, problem, name, settings, seed)
    try:
        source.open()
        if budget is None:
            spending = Budget(*limits)  # starting a process takes seconds that do not count
        state = Search(problem, source, spending, seed, past, on_trial, on_note)
        ended = _run(state, name, chosen, prove)
        if ended != "stopped":
            state.record_rest()
    finally:
        source.close()
        past.close()
    assert state.best is not None
    return Result(
        best=state.best,
        placer=name,
        seed=seed,
        num_trials=spending.num_trials,
        seconds=spending.elapsed,
        baselines={other: trial for other, trial in state.best_of.items() if other != name},
        bound=state.bound,
        graph=problem.graph.name,
        cluster=problem.cluster.name,
        problem=problem.digest,
        ended=ended,
    )


def check_groups(problem: Problem) -> None:
    """Raise InputError if a group has no device that all of its ops may run on."""
    if not isinstance(problem, Problem):
        raise InputError(
            f"solve takes a problem, not {type(problem).__name__}; "
            "roost.estimate makes one from a graph"
        )
    graph = problem.graph
    members = np.flatnonzero(graph.group >= 0)
    may = np.ones((graph.num_groups, problem.cluster.num_devices), dtype=bool)
    np.logical_and.at(may, graph.group[members], problem.allowed[members])
    homeless = np.flatnonzero(~may.any(axis=1))
    if not len(homeless):
        return
    group = int(homeless[0])
    kinds: dict[tuple[str, ...], str] = {}
    for op in np.flatnonzero(graph.group == group).tolist():
        kinds.setdefault(graph.allowed[op], graph.op_names[op])
    limits = ", ".join(f"{op!r} on {' or '.join(kind)}" for kind, op in kinds.items() if kind)
    raise InputError(
        f"group {graph.group_names[group]!r} has no device of cluster {problem.cluster.name!r} "
        f"on which all of it may run: {limits} only; split the group, or allow more kinds"
    )


def _run(state: Search, name: str, placer: Placer, prove: bool) -> str:
    """Run the placer until it ends or the budget is spent. Returns one of `ENDINGS`."""
    evaluate = Evaluation(state, name)
    try:
        if prove and state.source.simulated:
            seconds = min(1.0, _BOUND_SHARE * state.budget.seconds)
            state.prove(bound(state.problem, seconds=seconds))
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
                f"the budget was spent before {name!r} had evaluated one placement; "
                "give it more seconds"
            ) from None
        return "budget"
    except KeyboardInterrupt:
        if state.best is None:
            raise
        return "interrupted"


def _named(placer: str | Placer) -> tuple[str, Placer]:
    """The name of a placer, and the placer itself."""
    if isinstance(placer, str):
        return placer, named_placer(placer)
    if isinstance(placer, type):
        given = f"{placer.__name__} is a class, make an instance of it"
    elif not callable(getattr(placer, "place", None)):
        given = f"{type(placer).__name__} has none"
    else:
        return catalog.file_name(type(placer).__name__), placer
    raise InputError(f"a placer has a method place(problem, evaluate); {given}")


def named_placer(name: str) -> Placer:
    """The placer of that name with its default settings."""
    placer_class = catalog.find("placers", name)
    if not callable(getattr(placer_class, "place", None)):
        raise InputError(f"{name!r} is no placer: it has no method place(problem, evaluate)")
    try:
        placer: Placer = placer_class()
    except TypeError as error:
        raise InputError(
            f"the placer {name!r} needs settings that have no default: {error}; give them defaults"
        ) from None
    return placer


def _settings(placer: Placer) -> str:
    """The settings of a placer as text. A file of weights is named by the digest of its content."""
    text = repr(placer)
    weights = weights_of(placer)
    if weights is None or not Path(weights).is_file():
        return text
    content = digest([files.read_bytes(Path(weights))])
    return text.replace(f"weights={weights!r}", f"weights={content!r}")


def checked_seed(seed: object) -> int:
    """A seed that is a whole number; raises InputError for anything else."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise InputError(f"seed is {seed!r}; it must be a whole number that is not negative")
    return int(seed)
