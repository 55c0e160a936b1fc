"""Evaluation within one search: it counts the budget, keeps the best trial and writes the journal.

`solve` makes one `Search`. Each placer in it gets an `Evaluation`: the `evaluate` that it calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf

import numpy as np

from roost import catalog
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial
from roost.errors import BudgetSpent, RoostError
from roost.placers import Evaluate, Round
from roost.search.budget import Budget
from roost.search.past import Past, PastEvaluation
from roost.search.source import Source

# A long batch is evaluated in slices of about this length, so that no budget is overrun by much.
_SLICE_SECONDS = 0.2
_SAVE_SECONDS = 5.0  # between two states that are saved
# A step within this share of the bound is optimal: bounds are rounded down a little.
_CLOSE = 3e-9
# The next three are for placements that are run.
_MOST_REPEATS = 1000  # proposals in a row that were run before: then the search ends
_MOST_OTHERS = 4  # proposals of a round that are run when its best were run before
_ROUND_REPEATS = 50  # proposals that a round counts for, since it takes a second or more


@dataclass(frozen=True, eq=False)
class Progress:
    """The state of a search after a trial, as `on_trial` gets it."""

    trial: Trial
    best: Trial
    bound: Bound | None
    num_trials: int  # simulations of compiled loops included
    seconds: float


class Stopped(RoostError):
    """The search ends: `on_trial` asked for it, the bound is reached, or nothing new is proposed.

    Not a `BudgetSpent`: a placer may catch that when only its own part is spent.
    """

    def __init__(self, ended: str) -> None:
        super().__init__(ended)
        self.ended = ended


class Search:
    """The state that all placers of one search share."""

    def __init__(
        self,
        problem: Problem,
        source: Source,
        budget: Budget,
        seed: int = 0,
        past: Past | None = None,
        on_trial: Callable[[Progress], object] | None = None,
        on_note: Callable[[Mapping[str, float]], object] | None = None,
    ) -> None:
        self.problem = problem
        self.source = source
        self.budget = budget
        self.seed = seed
        self.past = past or Past()
        self.on_trial = on_trial
        self.on_note = on_note
        self.best: Trial | None = None
        self.best_of: dict[str, Trial] = {}  # by placer
        self.bound: Bound | None = None
        self._run: set[str] = set()  # digests of the placements that were run
        self._repeats = 0  # proposals in a row that were run before

    def prove(self, bound: Bound) -> None:
        """Keep a bound if it is the best so far."""
        if not self.source.simulated:
            return  # bounds hold for simulated steps only
        if self.bound is None or bound.step_time > self.bound.step_time:
            self.bound = bound

    def record(
        self, trials: Sequence[Trial], simulations: int, digests: Sequence[str] | None = None
    ) -> None:
        """Count trials and keep the best. `digests` names all placements if `trials` lacks some."""
        if self.source.simulated:
            self.budget.num_trials += simulations
        else:
            if digests is None:
                digests = [trial.placement.digest for trial in trials]
            # Placements that are run count once, whoever proposes them again.
            new = set(digests) - self._run
            self._run |= new
            self._repeats = 0 if new else self._repeats + simulations
            self.budget.num_trials += len(new)
        for trial in trials:
            if trial.better_than(self.best):
                self.best = trial
            if trial.better_than(self.best_of.get(trial.placer)):
                self.best_of[trial.placer] = trial

    def not_yet_run(self, placements: Iterable[Placement]) -> list[Placement]:
        """The placements that were not run yet, each once."""
        return [each for each in dict.fromkeys(placements) if each.digest not in self._run]

    def record_rest(self) -> None:
        """Record the past that no placer asked for again, as far as the budget goes.

        With a limit in seconds a placer need not take the same path twice.
        """
        for past in self.past.take_rest():
            count = past.simulations if self.source.simulated else len(past.digests)
            if count <= self.budget.trials_left:
                self.record(past.trials, past.simulations, past.digests)

    def report(self, trials: Sequence[Trial]) -> None:
        """Call `on_trial`. Raise `Stopped` if it asks for the end, or no better trial can come."""
        assert self.best is not None
        seconds = self.budget.elapsed
        for trial in trials if self.on_trial is not None else ():
            assert self.on_trial is not None
            progress = Progress(trial, self.best, self.bound, self.budget.num_trials, seconds)
            if self.on_trial(progress) is True:
                raise Stopped("stopped")
        shortest = -inf if self.bound is None else self.bound.step_time * (1 + _CLOSE)
        if self.best.feasible and self.best.step_time <= shortest:
            raise Stopped("optimal")
        if self._repeats >= _MOST_REPEATS:
            raise Stopped("exhausted")


class Evaluation(Evaluate):
    """The `evaluate` of one placer in a search."""

    def __init__(
        self, search: Search, placer: str, trials: float = inf, seconds: float = inf
    ) -> None:
        self._search = search
        self._placer = placer
        self._most_trials = search.budget.num_trials + min(trials, search.budget.trials_left)
        self._until = search.budget.elapsed + min(seconds, search.budget.seconds_left)
        # By the file name: Python and the command line name a placer differently, and draw alike.
        name = catalog.file_name(placer).encode()
        self.rng = np.random.default_rng([search.seed, zlib.crc32(name)])
        self._num_placements = 0  # that this placer evaluated
        self._saved_at = search.budget.elapsed

    def named(self, placer: str, trials: float = inf, seconds: float = inf) -> Evaluation:
        trials = min(trials, self.trials_left)
        seconds = min(seconds, self.seconds_left)
        return Evaluation(self._search, placer, trials, seconds)

    @property
    def best(self) -> Trial | None:
        return self._search.best

    @property
    def seconds_left(self) -> float:
        return self._until - self._search.budget.elapsed

    @property
    def _is_late(self) -> bool:
        """The seconds are over and there is a trial. A late answer is better than none."""
        return self.seconds_left <= 0 and self._search.best is not None

    @property
    def trials_left(self) -> float:
        return self._most_trials - self._search.budget.num_trials

    @property
    def simulations_left(self) -> float:
        return self.trials_left if self._search.source.simulated else inf

    def prove(self, bound: Bound) -> None:
        self._search.prove(bound)

    def note(self, figures: Mapping[str, float]) -> None:
        budget = self._search.budget
        if self._search.on_note is not None:
            spent = {"trials": float(budget.num_trials), "seconds": budget.elapsed}
            self._search.on_note(spent | dict(figures))

    def keep(self, state: Callable[[], Mapping[str, Array]]) -> None:
        past = self._search.past
        now = self._search.budget.elapsed
        if past.keeps_states and not past.is_replaying and now >= self._saved_at + _SAVE_SECONDS:
            past.save_state(self._placer, self._num_placements, state())
            self._saved_at = now

    def kept(self) -> Mapping[str, Array] | None:
        saved = self._search.past.take_state(self._placer, self.trials_left)
        if saved is None:
            return None
        self._num_placements = len(saved.past)
        for past in saved.past:
            self._replay(past)
        return saved.state

    def __call__(self, placements: Sequence[Placement]) -> list[Trial]:
        trials: list[Trial] = []
        while len(trials) < len(placements):
            more = self._next_trials(placements, len(trials))
            if not more:
                count = f"{len(trials)} of {len(placements)}"
                raise BudgetSpent(f"{count} placements were evaluated")
            trials += more
        return trials

    def _next_trials(self, placements: Sequence[Placement], first: int) -> list[Trial]:
        """The next trials of a batch: a past one, or a slice. Empty once the budget is spent."""
        search = self._search
        past = search.past.take_trial(placements[first])
        if self.trials_left < 1 or (past is None and self._is_late):
            return []
        if past is not None:
            self._replay(past)
            trials = past.trials
        else:
            size = self._slice_size(len(placements))
            trials = self._evaluated(placements[first : first + size])
            search.past.add_trials(trials, search.budget.elapsed, search.best)
            search.record(trials, len(trials))
            search.report(trials)
        self._num_placements += len(trials)
        return trials

    def _slice_size(self, count: int) -> int:
        """The number of placements of a batch that are evaluated at once."""
        search = self._search
        if self.seconds_left <= 0 or search.past.is_replaying:
            return 1  # one trial that every search has; or the next may be a past one
        in_time = int(_SLICE_SECONDS / max(search.source.seconds_each, 1e-6))
        return max(1, int(min(count, in_time, self.trials_left)))

    def _evaluated(self, placements: Sequence[Placement]) -> list[Trial]:
        trials = self._search.source.trials(placements)
        return [replace(trial, placer=self._placer) for trial in trials]

    def round(self, run: Callable[[], Round], what: str = "") -> Mapping[str, Array]:
        search = self._search
        past = search.past.take_round(self._placer, what)
        if past is not None:
            if past.simulations > self.simulations_left or self.trials_left < 1:
                raise BudgetSpent("the next round of the journal exceeds the budget")
            self._replay(past)
            return past.state
        if self.trials_left < 1 or self._is_late:
            raise BudgetSpent("the budget is spent; no other round begins")
        done = run()
        if not search.source.simulated:
            # A compiled loop simulates, and proposes. The placements that are run count.
            done = replace(done, placements=self._proposed(done), simulations=_ROUND_REPEATS)
        trials = self._evaluated(done.placements)
        search.past.add_round(self._placer, what, done, trials, search.budget.elapsed)
        search.record(trials, done.simulations)
        search.report(trials)
        return done.state

    def _proposed(self, done: Round) -> list[Placement]:
        """The placements of a round that are run: its best, or others if its best are known."""
        search = self._search
        new = search.not_yet_run(done.placements)
        new = new or search.not_yet_run(done.others())[:_MOST_OTHERS]
        most = len(new) if isinf(self.trials_left) else int(self.trials_left)
        return new[:most] or list(done.placements[:1])

    def _replay(self, past: PastEvaluation) -> None:
        """Record a past evaluation as if it were done now."""
        search = self._search
        search.budget.catch_up(past.elapsed)
        search.record(past.trials, past.simulations, past.digests)
        search.source.remember(past.trials)
        search.report(past.trials)
