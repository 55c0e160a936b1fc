"""Real devices as the source of trials: each placement runs in a worker process.

A placement may fail by memory, time, a crash or wrong numbers. Then its trial is not feasible and
says why, the process is replaced, and the search goes on. A placement that does not fit as
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
from roost.search.measured.candidates import Candidates, Limits
from roost.search.measured.model_source import ModelSource
from roost.search.measured.worker import WorkerFailed
from roost.search.source import Source
from roost.simulator.compiled import Simulator

if TYPE_CHECKING:
    from roost.search.measured.served_model import ReadyPlacement

log = logging.getLogger(__name__)

# So that the journal gets every trial when it is done, and the budget is checked after it.
_LEAST_SECONDS_EACH = 0.2
_FALSE_ALARM = 0.06  # probability that a placement that is no faster counts as faster
_REPEATS_SHARE = 0.1  # of the time for a trial that one set of repeats may take
_SLOW = 4.0  # times the best step: a placement that is this slow is timed once


class Measuring(Source):
    """Real devices as a source of trials.

    A placement and the best one so far are timed in turn. The step time of a trial is the ratio of
    the two, times the step time of the best trial. So a machine that gets slower during a search
    decides nothing, and all step times are in the seconds of the first trial.

    A placement that seems faster than the best is timed twice as often. It counts as faster only
    as far as the gain is above the noise. Otherwise the luckiest of many would become the best, and
    step times would shrink without end.
    """

    source = "measured"
    simulated = False

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
        """`runtime` replaces `GraphRuntime` in the process, and takes the same arguments.

        It must be picklable.
        """
        if repeats < 1 or warm_up < 1:
            raise InputError(
                f"repeats is {repeats} and warm_up is {warm_up}; both must be at least 1"
            )
        self.problem = problem
        self.repeats = repeats
        self.candidates = Candidates(problem, model, warm_up, limits or Limits(), runtime)
        self.seconds_each = 1.0
        self._best: Trial | None = None
        self._known: dict[str, Trial] = {}  # by digest

    def open(self) -> None:
        """Start the process. Raises if the model cannot run in it."""
        self.candidates.open()

    def close(self) -> None:
        """End the process. The next trial starts another."""
        self.candidates.close()

    def lent(self) -> Lent:
        """This source for a search that must not close it."""
        return Lent(self)

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        """One trial for each placement. A placement that was measured before is not run again."""
        return [self._trial(placement) for placement in placements]

    def remember(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._remember(trial)

    def _trial(self, placement: Placement) -> Trial:
        checked = self.problem.check(placement)
        known = self._known.get(checked.digest)
        if known is not None:
            return replace(known, placement=placement, seconds=0.0)
        began = time.perf_counter()
        trial = self._evaluate(checked)
        seconds = time.perf_counter() - began
        self.seconds_each = max(_LEAST_SECONDS_EACH, seconds)
        trial = replace(trial, seconds=seconds)
        self._remember(trial)
        return replace(trial, placement=placement)

    def _remember(self, trial: Trial) -> None:
        self._known[self.problem.check(trial.placement).digest] = trial
        if trial.feasible and trial.source == self.source and trial.better_than(self._best):
            self._best = trial
            self.candidates.best_seconds = trial.step_time

    def _evaluate(self, placement: Placement) -> Trial:
        step = Simulator.of(self.problem).simulate(placement)
        if not step.feasible:
            why = "does not fit, as simulated; it was not run"
            return replace(Trial.simulated(placement, step), why=why)
        trial = Trial(placement, inf, step.peak_memory, False, source=self.source)
        try:
            seconds, ready = self._measure(placement)
        except WorkerFailed as error:
            log.info("placement %s: %s", placement.digest, error)
            return replace(trial, why=str(error))
        # Simulated for devices whose memory cannot be measured: threads share one process.
        peak = step.peak_memory.copy()
        for device, held in ready.peak.items():
            peak[device] = held
        missing = int(missing_memory(peak, self.problem.cluster.memory).sum())
        return replace(
            trial,
            step_time=seconds,
            peak_memory=peak,
            feasible=not missing,
            missing_bytes=missing,
            why="holds more memory than there is" if missing else "",
        )

    def _measure(self, placement: Placement) -> tuple[float, ReadyPlacement]:
        """The step time of a placement, in the seconds of the first trial."""
        self.candidates.begin_trial()
        ready = self.candidates.make_ready(placement)
        best = self._best
        if best is None:
            samples = [self.candidates.time_step(placement) for _ in range(self._repeats(ready))]
            return median(samples), ready
        other = self.problem.check(best.placement)
        try:
            ratio = self._ratio(placement, other, ready)
        except _BestFailed as error:
            log.warning("the best placement so far fails now; going on without it: %s", error)
            self._best = None
            self.candidates.best_seconds = inf
            return self._measure(placement)
        self.candidates.drop(other if ratio < 1.0 else placement)
        return ratio * best.step_time, ready

    def _ratio(self, placement: Placement, best: Placement, ready: ReadyPlacement) -> float:
        """The step time of a placement over that of the best so far."""
        slow = ready.seconds > _SLOW * self.candidates.best_seconds
        ratios = self._ratios(placement, best, 1 if slow else self._repeats(ready))
        if median(ratios) >= 1.0:
            return median(ratios)
        ratios += self._ratios(placement, best, self._repeats(ready))
        return median(ratios) if median(ratios) >= 1.0 else min(1.0, surely_below(ratios))

    def _repeats(self, ready: ReadyPlacement) -> int:
        """The number of samples: fewer of long steps, so that a trial ends within its limit."""
        most = _REPEATS_SHARE * self.candidates.limits.most / max(ready.seconds, 1e-9)
        return max(1, min(self.repeats, int(most)))

    def _ratios(self, placement: Placement, best: Placement, count: int) -> list[float]:
        """Ratios of samples, taken in turn if both placements fit, else one after the other."""
        mine = []
        theirs = []
        time_step = self.candidates.time_step
        self.candidates.make_ready(placement)  # the best may have to make room for it
        if self.candidates.is_ready(best) or self.candidates.has_room(best):
            for _ in range(count):
                mine.append(time_step(placement))
                theirs.append(self._time_best(best))
        else:
            mine = [time_step(placement) for _ in range(count)]
            theirs = [self._time_best(best) for _ in range(count)]
        self.candidates.best_seconds = median(theirs)
        return [own / other for own, other in zip(mine, theirs, strict=True)]

    def _time_best(self, best: Placement) -> float:
        try:
            return self.candidates.time_step(best)
        except WorkerFailed as error:
            raise _BestFailed(str(error)) from error


def surely_below(samples: Sequence[float]) -> float:
    """An upper limit of the median, by a sign test: the 8th of 10 samples, the 5th of 5."""
    count = len(samples)
    ways = [comb(count, number) for number in range(count + 1)]
    for rank in range(1, count):
        if sum(ways[rank:]) / 2**count <= _FALSE_ALARM:
            return sorted(samples)[rank - 1]
    return max(samples)


class _BestFailed(Exception):
    """The best placement so far no longer runs."""


class Lent(Source):
    """A source for a search that does not close it."""

    simulated = False

    def __init__(self, source: Measuring) -> None:
        self._source = source
        self.seconds_each = source.seconds_each

    def open(self) -> None:
        self._source.open()

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        trials = self._source.trials(placements)
        self.seconds_each = self._source.seconds_each
        return trials

    def remember(self, trials: Sequence[Trial]) -> None:
        self._source.remember(trials)
