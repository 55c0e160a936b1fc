"""The last word: finalists against baselines, timed in turn many times over; what is not faster is
not recommended."""

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
from roost.search.measured.worker import Failed

log = logging.getLogger(__name__)

_CHOOSING = 1 / 3  # of the rounds: they say who stands for its side, and the others who wins
_RESAMPLES, _SURE = 2000, 0.95


@dataclass(frozen=True, eq=False)
class Standing:
    """One that took part."""

    name: str  # of the placer
    trial: Trial  # its step time is the median of this race
    is_baseline: bool
    laps: tuple[float, ...]  # [rounds] seconds


@dataclass(frozen=True, eq=False)
class Race:
    """What a race has shown. The ratio is that of the best finalist's step to the best
    baseline's."""

    recommended: Standing
    standings: tuple[Standing, ...]  # the fastest first
    faster: bool  # whether what is recommended was found by the search
    said: str  # a sentence on it
    ratio: float | None = None  # None where only one side took part
    low: float | None = None  # the ratio lies between these with 95 %
    high: float | None = None
    failed: Mapping[str, str] = field(default_factory=dict)  # name -> why


def race(
    source: Measuring,
    finalists: Sequence[Trial],
    baselines: Mapping[str, Trial],
    rounds: int = 15,
    seed: int = 0,
    on_round: Callable[[int], object] | None = None,
) -> Race:
    """Time all of them once in every round, in an order drawn anew each time.

    Recommends the best finalist where it is faster than the best baseline by more than the noise,
    else that baseline. The source stays open. Raises `Infeasible` where none of them runs.
    """
    if rounds < 3:
        raise InputError(f"rounds is {rounds}; a race needs at least 3")
    entered = _entered(source, finalists, baselines)
    laps: dict[str, list[float]] = {key: [] for key in entered}
    failed: dict[str, str] = {}
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        for key in rng.permutation(sorted(laps)).tolist():
            source.stand.allow()
            try:
                laps[key].append(source.stand.lap(entered[key].placement))
            except Failed as error:
                log.info("%s fails in the race: %s", entered[key].name, error)
                failed[entered[key].name] = str(error)
                del laps[key]
        if on_round is not None:
            on_round(number + 1)
    if not laps:
        raise Infeasible(
            f"none of {len(entered)} placements runs: "
            f"{next(iter(failed.values()), 'there are none')}"
        )
    found = [_standing(entered[key], times) for key, times in laps.items()]
    return _verdict(sorted(found, key=lambda each: each.trial.step_time), rounds, failed, rng)


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    trial: Trial
    placement: Placement
    is_baseline: bool


def _entered(
    source: Measuring, finalists: Sequence[Trial], baselines: Mapping[str, Trial]
) -> dict[str, _Entry]:
    """By digest, each placement once; one that is on both sides is a baseline."""
    every = [(name, trial, True) for name, trial in baselines.items()]
    # A search may find another placement that a baseline's placer proposed: everything on another
    # device, say.
    others = [
        (f"another of {t.placer}" if t.placer in baselines else t.placer, t) for t in finalists
    ]
    every += [(name, trial, False) for name, trial in others]
    found: dict[str, _Entry] = {}
    for name, trial, is_baseline in every:
        placement = source.problem.check(trial.placement)
        if trial.feasible:
            found.setdefault(placement.digest, _Entry(name, trial, placement, is_baseline))
    return found


def _standing(entry: _Entry, laps: list[float]) -> Standing:
    trial = replace(entry.trial, step_time=median(laps), source=Measuring.source)
    return Standing(entry.name, trial, entry.is_baseline, tuple(laps))


def _verdict(
    found: list[Standing], rounds: int, failed: Mapping[str, str], rng: np.random.Generator
) -> Race:
    first = max(1, round(_CHOOSING * rounds))

    def best(is_baseline: bool) -> Standing | None:
        # By other rounds than those that judge: the luckiest of several would not be as lucky
        # again.
        side = [each for each in found if each.is_baseline == is_baseline]
        return min(side, key=lambda each: median(each.laps[:first]), default=None)

    ours, theirs = best(False), best(True)
    if ours is None or theirs is None:
        only = ours or theirs
        assert only is not None
        said = (
            "nothing was found beside the baselines"
            if ours is None
            else "none of the baselines runs"
        )
        return Race(only, tuple(found), ours is not None, said, failed=failed)
    ratios = np.array(ours.laps[first:]) / np.array(theirs.laps[first:])
    drawn = np.median(ratios[rng.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], axis=1)
    low, high = (float(each) for each in np.quantile(drawn, [(1 - _SURE) / 2, (1 + _SURE) / 2]))
    ratio, faster = float(np.median(ratios)), high < 1.0
    spread = f"{low:.3f} to {high:.3f} in {len(ratios)} rounds"
    beside = f"{ratio:.3f} of the step of {theirs.name} ({spread})"
    if faster:
        said = f"{ours.name} takes {beside}"
    else:
        said = f"{ours.name} takes {beside}, which is not faster beyond the noise"
        said += f": {theirs.name} is recommended"
    return Race(ours if faster else theirs, tuple(found), faster, said, ratio, low, high, failed)
