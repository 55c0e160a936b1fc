"""What `--evaluate measured` adds to a search: a model that can be run, its devices, and a race at
the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _built, _console
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.cli._problem import Model
    from roost.core.problem import Problem
    from roost.core.trial import Result, Trial
    from roost.search.evaluate import Progress
    from roost.search.measured import Measuring
    from roost.search.measured.race import Race

Evaluate = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="simulated, or measured: placements are run on the devices of the cluster, which "
        "must be here.",
    ),
]
WithRace = Annotated[
    bool | None,
    typer.Option(
        "--race/--no-race",
        help="With --evaluate measured: time the best again, in turn with baselines. On by itself.",
        show_default=False,
    ),
]

_WAYS = ("simulated", "measured")
_FINALISTS = 3
# Placers that people would use without a search; one of them is asked where the search asked none.
_HEURISTICS = ("expert", "heft", "etf", "topo", "sct", "scotch", "mincut", "metis", "contiguous")
_ASKED = "heft"


def check(evaluate: str, race: bool | None, source: str, on: str | None) -> bool:
    """Whether to measure; what cannot be measured is refused before any time is spent on it."""
    from roost import presets
    from roost.cli._problem import Model
    from roost.search.measured.candidates import check_devices

    if evaluate not in _WAYS:
        raise InputError(f"--evaluate {evaluate!r}: is none of {', '.join(_WAYS)}")
    if evaluate == "simulated":
        if race:
            raise InputError("--race is of what was measured; add --evaluate measured")
        return False
    if not (":" in source or Model(source).in_zoo or Model(source).is_config):
        raise InputError(
            f"{source}: cannot be run; --evaluate measured needs the model itself: a zoo name "
            f"(see roost zoo), "
            "package.module:callable or a Hugging Face config.json"
        )
    if on is not None:
        check_devices(presets.cluster(on))
    return True


def source_of(problem: Problem, model: Model, seed: int) -> Measuring:
    """The devices as a source of trials, with the model ready to run."""
    from roost.search.measured import Measuring
    from roost.search.measured.model_source import ModelSource

    made = ModelSource(model.source, dict(model.settings), model.train, model.optimizer, seed=seed)
    if model.is_config:
        made = replace(made, model=partial(_built.made, model), settings={})
    source = Measuring(problem, made)
    with _console.working(
        f"starting a process to measure in: building and capturing {model.source}"
    ):
        try:
            source.open()
        except BaseException:
            source.close()
            raise
    return source


class Finalists:
    """The best few of the placements that a search measures; it passes on what it is told."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.tell: Callable[[Progress], object] = lambda progress: None

    def __call__(self, progress: Progress) -> object:
        trial = progress.trial
        if trial.feasible and all(trial.placement != other.placement for other in self.trials):
            self.trials = sorted([*self.trials, trial], key=lambda each: each.step_time)[
                :_FINALISTS
            ]
        return self.tell(progress)


def asked(problem: Problem, source: Measuring, placer: str) -> Trial:
    """What a placer finds, measured."""
    from roost.search.solve import search

    with _console.working(f"measuring {placer}"):
        return search(problem, placer, prove=False, source=source.lent()).best


def raced(
    problem: Problem, source: Measuring, result: Result, finalists: list[Trial], single: Trial
) -> tuple[Result, Trial, Race | None]:
    """The result with what the race recommends, and the single device, in the seconds of the
    race."""
    from roost.search.measured.race import race

    if not result.best.feasible:
        return result, single, None
    try:
        known = {
            name: trial
            for name, trial in result.baselines.items()
            if name in _HEURISTICS and trial.feasible
        }
        if not known:
            known = {_ASKED: asked(problem, source, _ASKED)}
        name = min(known, key=lambda each: known[each].step_time)
        baselines = {"single": single, name: known[name]}
        with _console.working("racing the best against the baselines"):
            found = race(source, [result.best, *finalists], baselines, seed=result.seed)
    except KeyboardInterrupt:
        _console.note("interrupted: not raced against the baselines")
        return result, single, None
    searched = {
        trial.placement.digest: trial.step_time
        for trial in [result.best, *finalists, *baselines.values()]
    }
    timed = {each.trial.placement.digest: each.trial.step_time for each in found.standings}
    # The machine may be faster or slower by now: what was not raced is shown in the seconds of the
    # race too.
    pace = median(seconds / searched[digest] for digest, seconds in timed.items())

    def now(trial: Trial) -> Trial:
        return replace(trial, step_time=timed.get(trial.placement.digest, trial.step_time * pace))

    won = found.recommended
    best = replace(won.trial, placer=won.name) if won.is_baseline else won.trial
    others = {other: now(trial) for other, trial in result.baselines.items()}
    return replace(result, best=best, baselines=others), now(single), found


def ended_early(result: Result, trials: int | None) -> str:
    """What to say where a search had not run as many placements as it might; nothing where it
    had."""
    why = {
        "done": f"{result.placer} proposes no more",
        "exhausted": "nothing was proposed any more that was not run before",
    }.get(result.ended)
    if why is None or (trials is None and result.ended == "done"):
        return ""
    return (
        f"Ended after {result.num_trials:,}{'' if trials is None else f' of {trials:,}'} trials: "
        f"{why}"
    )


def facts(result: Result, predicted: float, found: Race | None) -> dict[str, Any]:
    """What is known besides a simulated step, as --json prints it."""
    best = result.best
    about: dict[str, Any] = {
        "evaluate": "measured",
        "step_time": best.step_time,
        "feasible": best.feasible,
        "why": best.why,
        "simulated_step_time": predicted,
        "race": None,
    }
    if found is not None:
        about["race"] = {
            "said": found.said,
            "faster": found.faster,
            "recommended": found.recommended.trial.placer,
            "ratio": found.ratio,
            "low": found.low,
            "high": found.high,
            "standings": [
                {
                    "placer": each.trial.placer,
                    "baseline": each.is_baseline,
                    "step_time": each.trial.step_time,
                }
                for each in found.standings
            ],
            "failed": dict(found.failed),
        }
    return about
