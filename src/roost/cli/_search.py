"""Shared parts of the verbs that search: budget, progress, and trials for people and programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost import catalog
from roost.cli import _console
from roost.cli._text import live_line, plural, show_bytes, show_seconds, styled
from roost.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from roost.core.problem import Problem
    from roost.core.trial import Bound, Trial
    from roost.errors import Infeasible
    from roost.placers import Placer
    from roost.search.evaluate import Progress

Variant = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Other settings of a placer that learns: paper (the paper's settings as far as known) "
        "or heuristic (begins at the best simple placer).",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(metavar="N", help="Stop after N trials: simulations, or placements that are run."),
]

_PIPE_SECONDS = 10.0  # between two lines where there is no terminal
_TRY_SECONDS, _TRY_TRIALS = 2.0, 2000  # for a best try after a proof that nothing fits
# A gap below the first is a rounding error. Below the second it would be shown as 0.0%.
_OPTIMAL = 1e-6
_LEAST_SHOWN = 5e-4
COMPILING = "loading compiled code"


def check_budget(seconds: float | None, trials: int | None) -> None:
    """Raise InputError for a bad budget, before the problem is read."""
    from math import inf

    from roost.search.budget import Budget

    Budget(inf if trials is None else trials, inf if seconds is None else seconds)


def check_placer(name: str) -> None:
    """Raise InputError for an unknown placer."""
    if ":" in name:
        from roost.search.solve import named_placer

        named_placer(name)
    else:
        catalog.find("placers", name)


def proved(problem: Problem) -> Infeasible | None:
    """The proof that nothing fits, if there is one."""
    from roost.bounds import nothing_fits
    from roost.search.solve import check_groups

    check_groups(problem)
    return nothing_fits(problem)


def briefly(seconds: float | None, trials: int | None) -> tuple[float | None, int | None]:
    """The seconds and trials for a best try after a proof that nothing fits.

    Equal trials give equal results, so seconds are added only if there are no trials.
    """
    if trials is None or seconds is not None:
        seconds = min(_TRY_SECONDS, seconds or _TRY_SECONDS)
    return seconds, None if trials is None else min(_TRY_TRIALS, trials)


def placer_with(name: str, weights: Path | None, variant: str | None = None) -> str | Placer:
    """The placer with this name, weights and variant. Raises InputError if they do not match."""
    placer = catalog.find("placers", name)
    if variant is not None and weights is not None:
        raise InputError(
            f"--variant {variant} and --weights {weights}: give one; "
            "weights have their own settings"
        )
    if variant is not None:
        from roost.placers import VARIANTS

        able = [each for each in VARIANTS if hasattr(placer, each)]
        if variant not in able:
            known = "has none; seq2seq, spotlight, post and placeto have"
            if able:
                known = f"has {', '.join(able)}"
            raise InputError(f"--variant {variant}: placer {name!r} {known}")
        other: Placer = getattr(placer, variant)()
        return other
    if weights is None:
        return name
    import dataclasses

    fields = dataclasses.fields(placer) if dataclasses.is_dataclass(placer) else ()
    if "weights" not in {field.name for field in fields}:
        raise InputError(
            f"--weights {weights}: placer {name!r} takes no weights; lister and placeto do"
        )
    made: Placer = placer(weights=str(weights))
    return made


class SearchLine:
    """The live line of a search. It is the `on_trial` of the search."""

    def __init__(
        self, what: str, out: Console, first: str = "", baseline: Trial | None = None
    ) -> None:
        self.what = what
        self.out = out
        self.first = first
        self.baseline = baseline
        self.last: Progress | None = None
        self.printed = self.heard = time.monotonic()
        self.waiting = _console.LiveLine(f"{what}: preparing", COMPILING)

    def __call__(self, progress: Progress) -> None:
        if self.first:  # now the search has really begun
            self.out.print(self.first, soft_wrap=True)
            self.first = ""
        self.last = progress
        self.heard = time.monotonic()
        if not self.out.is_terminal and self.heard - self.printed >= _PIPE_SECONDS:
            self.printed = self.heard
            _console.note(f"{self.what}: {state_of(progress, baseline=self.baseline)}")

    def __rich__(self) -> Text:
        """The line, drawn many times a second: the seconds go on between two trials."""

        if self.last is None:
            return self.waiting.__rich__()
        state = state_of(self.last, time.monotonic() - self.heard, self.baseline)
        return live_line(f"{self.what}: {state}")


@contextmanager
def watching(what: str, first: str = "", baseline: Trial | None = None) -> Iterator[SearchLine]:
    """Show a search on standard error: a live line on a terminal, else a line now and then.

    `first` is printed before it.
    """
    out = _console.console(stderr=True)
    watch = SearchLine(what, out, first, baseline)
    with _console.drawn(out, watch.waiting, watch):
        yield watch


def state_of(progress: Progress, since: float = 0.0, baseline: Trial | None = None) -> str:
    """`3.2 s, 1,234 trials, best 513 ms by etf, 0.67 of expert, bound 508 ms, gap 1.0%`."""
    best = progress.best
    bound = progress.bound
    words = [f"{progress.seconds + since:.1f} s", plural(progress.num_trials, "trial")]
    if not best.feasible and best.why and not best.missing_bytes:
        return ", ".join([*words, f"nothing runs yet: {best.why}"])
    if not best.feasible:
        return ", ".join(
            [*words, f"nothing fits yet, the best try lacks {show_bytes(best.missing_bytes)}"]
        )
    words.append(f"best {show_seconds(best.step_time)} by {best.placer}")
    if baseline is not None and (share := ratio(best, baseline)) is not None:
        words.append(f"{share:.2f} of {baseline.placer}")
    if bound is not None:
        words += [f"bound {show_seconds(bound.step_time)}", f"gap {show_gap(gap(best, bound))}"]
    return ", ".join(words)


def gap(best: Trial, bound: Bound | None) -> float | None:
    """The part of the step time that could at most be saved; None if unknown."""
    if bound is None or not best.feasible:
        return None
    return 1.0 - bound.step_time / best.step_time if best.step_time > 0 else 0.0


def show_gap(share: float | None) -> str:
    """`1.0%`; `0.0%` only if the placement is proved to be optimal."""
    if share is None:
        return "-"
    return "<0.1%" if _OPTIMAL <= share < _LEAST_SHOWN else f"{abs(share):.1%}"


def is_optimal(share: float | None) -> bool:
    """True if the gap is a rounding error."""
    return share is not None and share < _OPTIMAL


def show_bound(share: float | None, bound: Bound) -> str:
    """A sentence on the bound and the gap."""
    if is_optimal(share):
        return f"this is optimal: no placement has a shorter step (proof: {bound.proof})"
    least = f"no placement has a step below {show_seconds(bound.step_time)} (proof: {bound.proof})"
    return least if share is None else f"{least}: gap {show_gap(share)}"


def single_trial(problem: Problem, asked: dict[str, Trial] | None = None) -> Trial:
    """The best trial of a single device: from a search, or asked now."""
    if asked and "single" in asked:
        return asked["single"]
    from roost.search.solve import search

    return search(problem, "single", prove=False).best


def baseline(problem: Problem) -> Trial:
    """The trial that a search must beat: one device alone, or an expert's split."""
    from roost.core.trial import best_of
    from roost.search.solve import search

    return best_of(search(problem, name, prove=False).best for name in ("single", "expert"))


def main_device(problem: Problem, trial: Trial) -> str:
    """The device with most ops."""
    import numpy as np

    device = problem.check(trial.placement).device
    count = np.bincount(device, minlength=problem.cluster.num_devices)
    return problem.cluster.device_names[int(count.argmax())]


def ratio(trial: Trial, single: Trial | None) -> float | None:
    """The step time over that of the best single device; None if either does not fit."""
    if single is None or not (trial.feasible and single.feasible and single.step_time > 0):
        return None
    return trial.step_time / single.step_time


def facts(problem: Problem, trial: Trial, single: Trial | None) -> dict[str, Any]:
    """A trial for programs, as --json prints it."""
    return {
        "placer": trial.placer,
        "step_time": trial.step_time,
        "feasible": trial.feasible,
        "order": trial.placement.order,
        "ratio_to_single": ratio(trial, single),
        "fullest": fullest(problem, trial),
        "peak_memory": dict(
            zip(problem.cluster.device_names, trial.peak_memory.tolist(), strict=True)
        ),
        "missing_bytes": trial.missing_bytes,
    }


def single_facts(problem: Problem, single: Trial) -> dict[str, Any]:
    """The best single device for programs."""
    return facts(problem, single, single) | {"device": main_device(problem, single)}


def fullest(problem: Problem, trial: Trial) -> str:
    """The device with the largest share of its memory in use, or the most beyond it."""
    import numpy as np

    share = trial.peak_memory / np.maximum(problem.cluster.memory, 1)
    return problem.cluster.device_names[int(share.argmax())]


def show_step(row: dict[str, Any]) -> str | Text:
    """The step time, or the missing memory."""

    if row["feasible"]:
        return show_seconds(row["step_time"])
    if not row["missing_bytes"]:
        return styled("failed", "red")  # as it was run
    return styled(f"lacks {show_bytes(row['missing_bytes'])}", "red")


def show_name(name: str, all_names: Iterable[str]) -> str:
    """The name of a placer in a table: `Class` for `package.module:Class`, if that is unique."""
    short = name.rpartition(":")[2]
    others = [other.rpartition(":")[2] for other in all_names]
    return short if others.count(short) <= 1 else name


def show_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
