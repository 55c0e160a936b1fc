"""The parts of `roost place --evaluate measured`: real devices as the source, and the race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console
from roost.cli._model import ModelSpec
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.problem import Problem
    from roost.core.trial import Result, Trial
    from roost.search.evaluate import Progress
    from roost.search.measured import Measuring
    from roost.search.measured.race import Race

Evaluate = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="simulated or measured. Measured placements run on the devices of the cluster, which "
        "must be those of this machine.",
    ),
]
WithRace = Annotated[
    bool | None,
    typer.Option(
        "--race/--no-race",
        help="With --evaluate measured: time the best again, in turn with baselines. Default: on.",
        show_default=False,
    ),
]

_SOURCES = ("simulated", "measured")
_FINALISTS = 3
# Placers that people would use without a search. If the search asked none of them, one is asked.
_HEURISTICS = ("expert", "heft", "etf", "topo", "sct", "scotch", "mincut", "metis", "contiguous")
_ASKED = "heft"


def check(evaluate: str, race: bool | None, source: str, on: str | None) -> bool:
    """True to measure. Raises InputError at once for a model or cluster that cannot be measured."""
    from roost import presets
    from roost.search.measured.candidates import check_devices

    if evaluate not in _SOURCES:
        raise InputError(f"--evaluate {evaluate!r}: is none of {', '.join(_SOURCES)}")
    if evaluate == "simulated":
        if race:
            raise InputError("--race needs measured placements; add --evaluate measured")
        return False
    if not ModelSpec(source).has_module:
        raise InputError(
            f"{source}: cannot be run; --evaluate measured needs the model itself: a zoo name "
            "(see roost zoo), package.module:callable or a Hugging Face config.json"
        )
    if on is not None:
        check_devices(presets.cluster(on))
    return True


def source_of(problem: Problem, model: ModelSpec, seed: int) -> Measuring:
    """Real devices as the source of trials, with the model ready to run."""
    from roost.search.measured import Measuring
    from roost.search.measured.model_source import ModelSource

    made = ModelSource(model.source, dict(model.settings), model.train, model.optimizer, seed=seed)
    if model.is_config:
        made = replace(made, model=model.real, settings={})
    source = Measuring(problem, made)
    with _console.working(
        f"starting a process that measures: building and capturing {model.source}"
    ):
        try:
            source.open()
        except BaseException:
            source.close()
            raise
    return source


class Finalists:
    """The best few placements of a measured search. It is an `on_trial` that passes trials on."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.tell: Callable[[Progress], object] = lambda progress: None

    def __call__(self, progress: Progress) -> object:
        trial = progress.trial
        if trial.feasible and all(trial.placement != other.placement for other in self.trials):
            by_time = sorted([*self.trials, trial], key=lambda each: each.step_time)
            self.trials = by_time[:_FINALISTS]
        return self.tell(progress)


def asked(problem: Problem, source: Measuring, placer: str) -> Trial:
    """The best trial of a placer, measured."""
    from roost.search.solve import search

    with _console.working(f"measuring {placer}"):
        return search(problem, placer, prove=False, source=source.lent()).best


def raced(
    problem: Problem, source: Measuring, result: Result, finalists: list[Trial], single: Trial
) -> tuple[Result, Trial, Race | None]:
    """The result and the single device in the seconds of the race, and the race."""
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
            outcome = race(source, [result.best, *finalists], baselines, seed=result.seed)
    except KeyboardInterrupt:
        _console.note("interrupted: not raced against the baselines")
        return result, single, None
    searched = {
        trial.placement.digest: trial.step_time
        for trial in [result.best, *finalists, *baselines.values()]
    }
    timed = {each.trial.placement.digest: each.trial.step_time for each in outcome.standings}
    # The machine may be faster or slower by now: convert trials that were not in the race.
    pace = median(seconds / searched[digest] for digest, seconds in timed.items())

    def now(trial: Trial) -> Trial:
        return replace(trial, step_time=timed.get(trial.placement.digest, trial.step_time * pace))

    won = outcome.recommended
    best = replace(won.trial, placer=won.name) if won.is_baseline else won.trial
    others = {other: now(trial) for other, trial in result.baselines.items()}
    return replace(result, best=best, baselines=others), now(single), outcome


def ended_early(result: Result, trials: int | None) -> str:
    """The reason why a search ended before its trials were used; "" if it used them."""
    why = {
        "done": f"{result.placer} proposes no more placements",
        "exhausted": "all new proposals were run before",
    }.get(result.ended)
    if why is None or (trials is None and result.ended == "done"):
        return ""
    most = "" if trials is None else f" of {trials:,}"
    return f"Ended after {result.num_trials:,}{most} trials: {why}"


def facts(result: Result, predicted: float, outcome: Race | None) -> dict[str, Any]:
    """The measured figures, as --json prints them."""
    best = result.best
    about: dict[str, Any] = {
        "evaluate": "measured",
        "step_time": best.step_time,
        "feasible": best.feasible,
        "why": best.why,
        "simulated_step_time": predicted,
        "race": None,
    }
    if outcome is not None:
        about["race"] = {name: getattr(outcome, name) for name in ("said", "faster")} | {
            "recommended": outcome.recommended.trial.placer,
            **{name: getattr(outcome, name) for name in ("ratio", "low", "high")},
            "standings": [
                {
                    "placer": each.trial.placer,
                    "baseline": each.is_baseline,
                    "step_time": each.trial.step_time,
                }
                for each in outcome.standings
            ],
            "failed": dict(outcome.failed),
        }
    return about
