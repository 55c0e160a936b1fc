"""What the verbs that search share: their budget, a line of progress, and trials for people and for
programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost import catalog
from roost.cli import _console
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
        help="Other settings of a placer that learns: paper (as published), heuristic (begins at "
        "the best simple one).",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Stop after so many trials: simulations, or placements that were run."
    ),
]

_PIPE_SECONDS = 10.0  # between two lines where there is no terminal
_TRY_SECONDS, _TRY_TRIALS = 2.0, 2000  # spent on a best try where it is proved that nothing fits
# A gap below the first is one of rounding; below the second it reads as none.
_OPTIMAL, _LEAST_SHOWN = 1e-6, 5e-4
COMPILING = "loading what was compiled"


def check_budget(seconds: float | None, trials: int | None) -> None:
    """Refuse a budget that is none before any time is spent on reading the problem."""
    from math import inf

    from roost.search.budget import Budget

    Budget(inf if trials is None else trials, inf if seconds is None else seconds)


def check_placer(name: str) -> None:
    """Refuse a placer that is none, likewise."""
    from roost import catalog

    if ":" in name:
        from roost.search.solve import named_placer

        named_placer(name)
    else:
        catalog.find("placers", name)


def proved(problem: Problem) -> Infeasible | None:
    """The proof that nothing fits, where there is one."""
    from roost.bounds import nothing_fits
    from roost.search.solve import check_groups

    check_groups(problem)
    return nothing_fits(problem)


def briefly(seconds: float | None, trials: int | None) -> tuple[float | None, int | None]:
    """What is worth spending on a best try where it is proved that nothing fits.

    Equal trials give equal results: seconds are added where neither is given only.
    """
    if trials is None or seconds is not None:
        seconds = min(_TRY_SECONDS, seconds or _TRY_SECONDS)
    return seconds, None if trials is None else min(_TRY_TRIALS, trials)


def placer_with(name: str, weights: Path | None, variant: str | None = None) -> str | Placer:
    """The placer of a name, with weights or other settings where given; what is wrong with them is
    told at once."""
    found = catalog.find("placers", name)
    if variant is not None and weights is not None:
        raise InputError(
            f"--variant {variant} and --weights {weights}: weights have their own settings; give "
            f"one"
        )
    if variant is not None:
        from roost.placers import VARIANTS

        able = [each for each in VARIANTS if hasattr(found, each)]
        if variant not in able:
            known = (
                f"has {', '.join(able)}"
                if able
                else "has none; seq2seq, spotlight, post and placeto have"
            )
            raise InputError(f"--variant {variant}: placer {name!r} {known}")
        other: Placer = getattr(found, variant)()
        return other
    if weights is None:
        return name
    import dataclasses

    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    if "weights" not in {field.name for field in fields}:
        raise InputError(
            f"--weights {weights}: placer {name!r} takes no weights; lister and placeto do"
        )
    made: Placer = found(weights=str(weights))
    return made


class Watch:
    """How a search goes: what `on_trial` is called with, and the live line made of it."""

    def __init__(
        self, what: str, out: Console, first: str = "", baseline: Trial | None = None
    ) -> None:
        self.what, self.out, self.first, self.baseline = what, out, first, baseline
        self.last: Progress | None = None
        self.told = self.heard = time.monotonic()
        self.waiting = _console.Waiting(f"{what}: preparing", COMPILING)

    def __call__(self, progress: Progress) -> None:
        if self.first:  # not before it is known that the search can begin
            self.out.print(self.first, soft_wrap=True)
            self.first = ""
        self.last, self.heard = progress, time.monotonic()
        if not self.out.is_terminal and self.heard - self.told >= _PIPE_SECONDS:
            self.told = self.heard
            _console.note(f"{self.what}: {standing(progress, baseline=self.baseline)}")

    def __rich__(self) -> Text:
        """The line as it is drawn, many times a second: the seconds go on between two trials."""
        from rich.text import Text

        if self.last is None:
            return self.waiting.__rich__()
        line = f"{self.what}: {standing(self.last, time.monotonic() - self.heard, self.baseline)}"
        return Text(line, no_wrap=True, overflow="ellipsis")


@contextmanager
def watching(what: str, first: str = "", baseline: Trial | None = None) -> Iterator[Watch]:
    """Say on standard error how a search goes: a live line on a terminal, else a line now and then;
    `first` before."""
    out = _console.console(stderr=True)
    watch = Watch(what, out, first, baseline)
    with _console.drawn(out, watch.waiting, watch):
        yield watch


def standing(progress: Progress, since: float = 0.0, baseline: Trial | None = None) -> str:
    """`3.2 s, 1,234 trials, best 513 ms by etf, 0.67 of expert, bound 508 ms, gap 1.0%`."""
    from roost.core.units import show_bytes, show_seconds

    best, bound = progress.best, progress.bound
    words = [f"{progress.seconds + since:.1f} s", _console.plural(progress.num_trials, "trial")]
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
    """What part of the step could at most be saved; None without a bound, or where it does not
    fit."""
    if bound is None or not best.feasible:
        return None
    return 1.0 - bound.step_time / best.step_time if best.step_time > 0 else 0.0


def show_gap(share: float | None) -> str:
    """`1.0%`; `0.0%` where it is proved to be the best, and only there."""
    if share is None:
        return "-"
    return "<0.1%" if _OPTIMAL <= share < _LEAST_SHOWN else f"{abs(share):.1%}"


def is_optimal(share: float | None) -> bool:
    """Whether the gap is none, but for roundings."""
    return share is not None and share < _OPTIMAL


def show_bound(share: float | None, bound: Bound) -> str:
    """A sentence on how good that is."""
    from roost.core.units import show_seconds

    if is_optimal(share):
        return f"this is optimal: no placement has a shorter step (proof: {bound.proof})"
    least = f"no placement has a step below {show_seconds(bound.step_time)} (proof: {bound.proof})"
    return least if share is None else f"{least}: gap {show_gap(share)}"


def single_trial(problem: Problem, asked: dict[str, Trial] | None = None) -> Trial:
    """Everything on the best single device: as it was asked on the way, or asked now."""
    if asked and "single" in asked:
        return asked["single"]
    from roost.search.solve import search

    return search(problem, "single", prove=False).best


def baseline(problem: Problem) -> Trial:
    """What a search is to beat: the best of one device and of an expert's split. It costs a
    simulation each."""
    from roost.search.solve import search

    found = [search(problem, name, prove=False).best for name in ("single", "expert")]
    return found[1] if found[1].better_than(found[0]) else found[0]


def main_device(problem: Problem, trial: Trial) -> str:
    """The device that most of the ops are on."""
    import numpy as np

    device = problem.check(trial.placement).device
    count = np.bincount(device, minlength=problem.cluster.num_devices)
    return problem.cluster.device_names[int(count.argmax())]


def ratio(trial: Trial, single: Trial | None) -> float | None:
    """Of its step time to that of the best single device; None where either does not fit, or
    nothing takes time."""
    if single is None or not (trial.feasible and single.feasible and single.step_time > 0):
        return None
    return trial.step_time / single.step_time


def facts(problem: Problem, trial: Trial, single: Trial | None) -> dict[str, Any]:
    """A trial for programs."""
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


def fullest(problem: Problem, trial: Trial) -> str:
    """The device with the largest share of its memory in use, or the most beyond it."""
    import numpy as np

    share = trial.peak_memory / np.maximum(problem.cluster.memory, 1)
    return problem.cluster.device_names[int(share.argmax())]


def show_step(row: dict[str, Any]) -> str | Text:
    """The step time, or what is missing."""
    from rich.text import Text

    from roost.core.units import show_bytes, show_seconds

    if row["feasible"]:
        return show_seconds(row["step_time"])
    if not row["missing_bytes"]:
        return Text("failed", "red")  # as it was run
    return Text(f"lacks {show_bytes(row['missing_bytes'])}", "red")


def show_name(name: str, all_names: Iterable[str]) -> str:
    """A placer as tables show it: of `package.module:Class` the class, where no other is called
    that."""
    short = name.rpartition(":")[2]
    return short if [other.rpartition(":")[2] for other in all_names].count(short) <= 1 else name


def show_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
