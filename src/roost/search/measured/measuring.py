"""Placements -> trials by running them, in a process of their own, in turn with the best so far.

A placement that fails in any way, by memory, time, a crash or wrong numbers, is a trial that is not
feasible and says why; the process is replaced, and the search goes on. What does not fit as
simulated is not run at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb, inf
from statistics import median
from typing import TYPE_CHECKING, Any

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import missing_memory
from roost.core.trial import Trial
from roost.errors import InputError
from roost.search.measured.candidates import Limits, Stand
from roost.search.measured.model_source import ModelSource
from roost.search.measured.worker import Failed
from roost.simulator.compiled import Simulator

if TYPE_CHECKING:
    from roost.search.measured.worker_process import Built

log = logging.getLogger(__name__)

# So that every trial is written down when it is done, and the budget looked at.
_LEAST_SECONDS_EACH = 0.2
_CHANCE = 0.06  # that what is no faster counts as faster
_SHARE = 0.1  # of the time for a trial that one set of repeats may take
_SLOW = 4.0  # times the best: what is that slow is timed once


class Measuring:
    """Devices as a source of trials.

    The step time of a trial is its time over that of the best so far, both run in turn, times the
    step time of the trial of that best. So a machine that grows slower or faster in the course of a
    search decides nothing: trials compare as the steps did side by side, and all are in the seconds
    of the first. What seems to be faster than the best is timed as often again, and counts as
    faster only as far as that is beyond the noise: otherwise the luckiest of many would be taken
    for the best, the next would be the luckiest beside it, and step times would shrink without end.
    """

    source = "measured"
    simulated = False  # no bound on simulated steps holds for these

    def __init__(
        self,
        problem: Problem,
        model: ModelSource,
        *,
        repeats: int = 5,
        warm_up: int = 1,
        limits: Limits | None = None,
        runtime: Callable[..., Any] | None = None,
    ) -> None:
        """`runtime` is called as `GraphRuntime` is, in the process and in place of it; it must be
        picklable."""
        if repeats < 1 or warm_up < 1:
            raise InputError(
                f"repeats is {repeats} and warm_up is {warm_up}; both must be at least 1"
            )
        self.problem, self.repeats = problem, repeats
        self.stand = Stand(problem, model, warm_up, limits or Limits(), runtime)
        self.seconds_each = 1.0
        self._best: Trial | None = None
        self._known: dict[str, Trial] = {}

    def open(self) -> None:
        """Start the process, which takes seconds, before any are counted. Raises where the model
        cannot be run."""
        self.stand.open()

    def close(self) -> None:
        """End the process; it is started again where something is asked."""
        self.stand.close()

    def lent(self) -> Lent:
        """Itself, for a search that closes what it is given."""
        return Lent(self)

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        """One trial for each placement, in their order. What was measured before is not measured
        again."""
        return [self._trial(placement) for placement in placements]

    def remember(self, trials: Sequence[Trial]) -> None:
        """Trials of an earlier part of the search, from its journal: the next are compared with the
        best of them."""
        for trial in trials:
            self._keep(trial)

    def _trial(self, placement: Placement) -> Trial:
        checked = self.problem.check(placement)
        if checked.digest in self._known:
            return replace(self._known[checked.digest], placement=placement, seconds=0.0)
        began = time.perf_counter()
        found = self._judged(checked)
        seconds = time.perf_counter() - began
        self.seconds_each = max(_LEAST_SECONDS_EACH, seconds)
        found = replace(found, seconds=seconds)
        self._keep(found)
        return replace(found, placement=placement)

    def _keep(self, trial: Trial) -> None:
        self._known[self.problem.check(trial.placement).digest] = trial
        if trial.feasible and trial.source == self.source and trial.better_than(self._best):
            self._best, self.stand.best_seconds = trial, trial.step_time

    def _judged(self, placement: Placement) -> Trial:
        step = Simulator.of(self.problem).simulate(placement)
        if not step.feasible:
            why = "does not fit, as simulated; it was not run"
            return replace(Trial.simulated(placement, step), why=why)
        try:
            seconds, built = self._measured(placement)
        except Failed as error:
            log.info("placement %s: %s", placement.digest, error)
            return Trial(
                placement, inf, step.peak_memory, False, source=self.source, why=str(error)
            )
        # Of devices whose memory cannot be measured: threads share that of the process.
        peak = step.peak_memory.copy()
        for device, held in built.peak.items():
            peak[device] = held
        lacks = int(missing_memory(peak, self.problem.cluster.memory).sum())
        why = "holds more memory than there is" if lacks else ""
        return Trial(
            placement, seconds, peak, not lacks, source=self.source, missing_bytes=lacks, why=why
        )

    def _measured(self, placement: Placement) -> tuple[float, Built]:
        """The step time, and what was found on the way."""
        self.stand.allow()
        built, best = self.stand.hold(placement), self._best
        if best is None:
            return median(self.stand.lap(placement) for _ in range(self._repeats(built))), built
        other = self.problem.check(best.placement)
        try:
            ratio = self._beside(placement, other, built)
        except _BestFailed as error:
            log.warning("the best so far fails now; going on without it: %s", error)
            self._best, self.stand.best_seconds = None, inf
            return self._measured(placement)
        self.stand.drop(other if ratio < 1.0 else placement)
        return ratio * best.step_time, built

    def _beside(self, placement: Placement, best: Placement, built: Built) -> float:
        """The step of a placement over that of the best so far: the median of pairs."""
        slow = built.seconds > _SLOW * self.stand.best_seconds
        pairs = self._pairs(placement, best, 1 if slow else self._repeats(built))
        if median(pairs) >= 1.0:
            return median(pairs)
        pairs += self._pairs(placement, best, self._repeats(built))
        return median(pairs) if median(pairs) >= 1.0 else min(1.0, surely_below(pairs))

    def _repeats(self, built: Built) -> int:
        """Fewer of long steps: all of a trial must end within its limit."""
        most = _SHARE * self.stand.limits.most / max(built.seconds, 1e-9)
        return max(1, min(self.repeats, int(most)))

    def _pairs(self, placement: Placement, best: Placement, count: int) -> list[float]:
        """Both in turn where there is room for both, or else one after the other."""
        mine, theirs = [], []
        self.stand.hold(placement)  # the best may have to make room for it
        if self.stand.holds(best) or self.stand.has_room(best):
            for _ in range(count):
                mine.append(self.stand.lap(placement))
                theirs.append(self._lap_of_best(best))
        else:
            mine = [self.stand.lap(placement) for _ in range(count)]
            theirs = [self._lap_of_best(best) for _ in range(count)]
        self.stand.best_seconds = median(theirs)
        return [own / other for own, other in zip(mine, theirs, strict=True)]

    def _lap_of_best(self, best: Placement) -> float:
        try:
            return self.stand.lap(best)
        except Failed as error:
            raise _BestFailed(str(error)) from error


def surely_below(samples: Sequence[float]) -> float:
    """What the median of the distribution is below, by a sign test: the 8th of 10, the 5th of 5."""
    count = len(samples)
    tail = [
        sum(comb(count, n) for n in range(k, count + 1)) / 2**count for k in range(1, count + 1)
    ]
    rank = next((k for k, chance in enumerate(tail, 1) if chance <= _CHANCE), count)
    return sorted(samples)[rank - 1]


class _BestFailed(Exception):
    """What was the best so far cannot be run any more."""


class Lent:
    """A source that outlives the search it is lent to."""

    simulated = False

    def __init__(self, source: Measuring) -> None:
        self._source = source

    @property
    def seconds_each(self) -> float:
        return self._source.seconds_each

    def open(self) -> None:
        self._source.open()

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        return self._source.trials(placements)

    def remember(self, trials: Sequence[Trial]) -> None:
        self._source.remember(trials)

    def close(self) -> None:
        """Whoever lent it closes it."""
