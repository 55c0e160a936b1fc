"""The race at the end of a measured search: finalists and baselines, timed in turn many times.

A finalist that is not faster than the best baseline is not recommended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from roost.core.placement import Placement
from roost.core.trial import Trial
from roost.errors import Infeasible, InputError
from roost.search.measured.measuring import Measuring
from roost.search.measured.worker import WorkerFailed

log = logging.getLogger(__name__)

_CHOOSING = 1 / 3  # of the rounds choose the best of each side; the others judge these two
_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class RaceStanding:
    """One placement in a race, and its step times."""

    name: str  # of the placer
    trial: Trial  # its step time is the median of this race
    is_baseline: bool
    laps: tuple[float, ...]  # [rounds] seconds


@dataclass(frozen=True, eq=False)
class Race:
    """The outcome of a race. The ratio is the best finalist's step over the best baseline's."""

    recommended: RaceStanding
    standings: tuple[RaceStanding, ...]  # the fastest first
    faster: bool  # the recommended placement comes from the search
    said: str  # a sentence on the outcome
    ratio: float | None = None  # None where only one side took part
    low: float | None = None  # the ratio lies between `low` and `high` with 95 %
    high: float | None = None
    failed: Mapping[str, str] = field(default_factory=dict)  # name -> why


@dataclass(frozen=True, eq=False)
class _Entrant:
    name: str
    trial: Trial
    placement: Placement
    is_baseline: bool

    def standing(self, laps: list[float]) -> RaceStanding:
        trial = replace(self.trial, step_time=median(laps), source=Measuring.source)
        return RaceStanding(self.name, trial, self.is_baseline, tuple(laps))


def race(
    source: Measuring,
    finalists: Sequence[Trial],
    baselines: Mapping[str, Trial],
    rounds: int = 15,
    seed: int = 0,
    on_round: Callable[[int], object] | None = None,
) -> Race:
    """Time all placements once in every round, each time in another random order.

    Recommends the best finalist if it is faster than the best baseline by more than the noise, else
    that baseline. The source stays open. Raises `Infeasible` if none of the placements runs.
    """
    if rounds < 3:
        raise InputError(f"rounds is {rounds}; a race needs at least 3")
    entrants = _entrants(source, finalists, baselines)
    laps: dict[str, list[float]] = {key: [] for key in entrants}
    failed: dict[str, str] = {}
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        for key in rng.permutation(sorted(laps)).tolist():
            entrant = entrants[key]
            source.candidates.begin_trial()
            try:
                laps[key].append(source.candidates.time_step(entrant.placement))
            except WorkerFailed as error:
                log.info("%s fails in the race: %s", entrant.name, error)
                failed[entrant.name] = str(error)
                del laps[key]
        if on_round is not None:
            on_round(number + 1)
    if not laps:
        why = next(iter(failed.values()), "there are none")
        raise Infeasible(f"none of {len(entrants)} placements runs: {why}")
    standings = [entrants[key].standing(times) for key, times in laps.items()]
    standings.sort(key=lambda each: each.trial.step_time)
    return _outcome(standings, rounds, failed, rng)


def _entrants(
    source: Measuring, finalists: Sequence[Trial], baselines: Mapping[str, Trial]
) -> dict[str, _Entrant]:
    """Each placement once, by digest. A placement on both sides is a baseline."""
    named = [(name, trial, True) for name, trial in baselines.items()]
    for trial in finalists:
        # A search may find another placement by a baseline's placer: everything on another device.
        name = f"another of {trial.placer}" if trial.placer in baselines else trial.placer
        named.append((name, trial, False))
    entrants: dict[str, _Entrant] = {}
    for name, trial, is_baseline in named:
        placement = source.problem.check(trial.placement)
        if trial.feasible:
            entrants.setdefault(placement.digest, _Entrant(name, trial, placement, is_baseline))
    return entrants


def _outcome(
    standings: list[RaceStanding],
    rounds: int,
    failed: Mapping[str, str],
    rng: np.random.Generator,
) -> Race:
    first = max(1, round(_CHOOSING * rounds))

    def best(is_baseline: bool) -> RaceStanding | None:
        # Chosen by other rounds than those that judge: luck does not repeat.
        side = [each for each in standings if each.is_baseline == is_baseline]
        return min(side, key=lambda each: median(each.laps[:first]), default=None)

    ours = best(False)
    theirs = best(True)
    if ours is None or theirs is None:
        only = ours or theirs
        assert only is not None
        said = "none of the baselines runs"
        if ours is None:
            said = "the search found no placement besides the baselines"
        return Race(only, tuple(standings), ours is not None, said, failed=failed)
    ratios = np.array(ours.laps[first:]) / np.array(theirs.laps[first:])
    samples = ratios[rng.integers(0, len(ratios), (_RESAMPLES, len(ratios)))]
    tails = [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2]
    low, high = map(float, np.quantile(np.median(samples, axis=1), tails))
    ratio = float(np.median(ratios))
    faster = high < 1.0
    spread = f"{low:.3f} to {high:.3f} in {len(ratios)} rounds"
    said = f"{ours.name} takes {ratio:.3f} of the step of {theirs.name} ({spread})"
    if not faster:
        said += f", which is not faster beyond the noise: {theirs.name} is recommended"
    recommended = ours if faster else theirs
    return Race(recommended, tuple(standings), faster, said, ratio, low, high, failed)
