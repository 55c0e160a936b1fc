"""What a placer calls to learn what placements cost. It counts the budget, keeps the best, and
writes the journal."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roost import catalog
from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial
from roost.errors import BudgetSpent, RoostError
from roost.placers import Evaluate, Round
from roost.search.budget import Budget

if TYPE_CHECKING:  # a search that writes no journal needs nothing of what reads and writes files
    from roost.search.journal import Journal, Past

# A long batch is evaluated in parts about this long, so that no budget is overrun by much.
_SLICE_SECONDS = 0.2
_KEEP_SECONDS = 5.0  # between two states that are kept
# A step this near to the bound is as short as can be: bounds are a little below what is proved.
_CLOSE = 3e-9
_REPEATS = 1000  # in a row, of placements that were run before: then nothing new comes any more
_OTHERS = 4  # proposals of a round that are run, where its best were run before
_ROUND_REPEATS = 50  # that a round of a compiled loop stands for, which takes a second or more


class Source(Protocol):
    """Where trials come from: the simulator, or devices.

    One that runs placements has `simulated = False`; it may have `open()`, called before the budget
    begins, and `remember(trials)`, called with those that a journal has.
    """

    @property
    def seconds_each(self) -> float: ...

    def trials(self, placements: Sequence[Placement]) -> list[Trial]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a search stands after a trial."""

    trial: Trial
    best: Trial
    bound: Bound | None
    num_trials: int  # simulations of compiled loops included
    seconds: float


class Stopped(RoostError):
    """Whoever watches the search asked it to end, or it reached its bound, or nothing new is
    proposed any more.

    No `BudgetSpent`: a placer may catch that, where only the part is spent that it gave to another.
    """

    def __init__(self, ended: str) -> None:
        super().__init__(ended)
        self.ended = ended


class Search:
    """What all placers of one search share."""

    def __init__(
        self,
        problem: Problem,
        source: Source,
        budget: Budget,
        seed: int = 0,
        journal: Journal | None = None,
        on_trial: Callable[[Progress], object] | None = None,
        on_note: Callable[[Mapping[str, float]], object] | None = None,
    ) -> None:
        self.problem, self.source, self.budget, self.seed = problem, source, budget, seed
        self.journal, self.on_trial, self.on_note = journal, on_trial, on_note
        self.best: Trial | None = None
        self.best_of: dict[str, Trial] = {}  # by placer
        self.bound: Bound | None = None
        self.is_simulated = bool(getattr(source, "simulated", True))
        self._run: set[str] = set()  # digests of what was run
        self._repeats = 0  # in a row

    def prove(self, bound: Bound) -> None:
        if not self.is_simulated:
            return  # it is one on steps as simulated, and what is measured may be shorter
        if self.bound is None or bound.step_time > self.bound.step_time:
            self.bound = bound

    def take(self, trials: Sequence[Trial], count: int) -> None:
        """Count so many trials, and keep what is best of these."""
        self.budget.num_trials += count
        for trial in trials:
            if trial.better_than(self.best):
                self.best = trial
            if trial.better_than(self.best_of.get(trial.placer)):
                self.best_of[trial.placer] = trial

    def count(self, digests: Sequence[str], simulations: int) -> int:
        """What of the budget these take: of placements that are run, each once, whoever asks for it
        again."""
        if self.is_simulated:
            return simulations
        new = set(digests) - self._run
        self._run |= new
        self._repeats = 0 if new else self._repeats + simulations
        return len(new)

    def new(self, placements: Iterable[Placement]) -> list[Placement]:
        """Those that were not run yet, each once."""
        return [each for each in dict.fromkeys(placements) if each.digest not in self._run]

    def check_new(self) -> None:
        """End a search in which only what was run before is asked for, again and again."""
        if self._repeats >= _REPEATS:
            raise Stopped("exhausted")

    def take_rest(self) -> None:
        """Take what the journal has and no placer asked for again, as far as the budget goes:
        nothing found is lost.

        With seconds a placer need not go the same way twice.
        """
        for past in self.journal.take_rest() if self.journal is not None else ():
            need = past.simulations if self.is_simulated else len(past.digests)
            if need <= self.budget.trials_left:
                self.take(past.trials, self.count(past.digests, past.simulations))

    def tell(self, trials: Sequence[Trial]) -> None:
        """Tell whoever watches, and end the search where that is wished for, or nothing better can
        come."""
        assert self.best is not None
        seconds = self.budget.elapsed
        for trial in trials if self.on_trial is not None else ():
            assert self.on_trial is not None
            if (
                self.on_trial(
                    Progress(trial, self.best, self.bound, self.budget.num_trials, seconds)
                )
                is True
            ):
                raise Stopped("stopped")
        if (
            self.bound is not None
            and self.best.feasible
            and self.best.step_time <= self.bound.step_time * (1 + _CLOSE)
        ):
            raise Stopped("optimal")
        self.check_new()


class Evaluation(Evaluate):
    """The `evaluate` of one placer in a search."""

    def __init__(
        self, search: Search, placer: str, trials: float = inf, seconds: float = inf
    ) -> None:
        self._search, self._placer = search, placer
        self._most_trials = search.budget.num_trials + min(trials, search.budget.trials_left)
        self._until = search.budget.elapsed + min(seconds, search.budget.seconds_left)
        # By the class, however it was named: Python and the command line draw the same.
        self.rng = np.random.default_rng(
            [search.seed, zlib.crc32(catalog.file_name(placer).encode())]
        )
        self._asked = 0  # placements, by this placer
        self._kept_at = search.budget.elapsed

    def named(self, placer: str, trials: float = inf, seconds: float = inf) -> Evaluation:
        return Evaluation(
            self._search, placer, min(trials, self.trials_left), min(seconds, self.seconds_left)
        )

    @property
    def best(self) -> Trial | None:
        return self._search.best

    @property
    def seconds_left(self) -> float:
        return self._until - self._search.budget.elapsed

    @property
    def _is_late(self) -> bool:
        """Whether the seconds are over. Not before there is a trial: too late is a better answer
        than none."""
        return self.seconds_left <= 0 and self._search.best is not None

    @property
    def trials_left(self) -> float:
        return self._most_trials - self._search.budget.num_trials

    @property
    def simulations_left(self) -> float:
        return self.trials_left if self._search.is_simulated else inf

    def prove(self, bound: Bound) -> None:
        self._search.prove(bound)

    def note(self, figures: Mapping[str, float]) -> None:
        if self._search.on_note is not None:
            where = {
                "trials": float(self._search.budget.num_trials),
                "seconds": self._search.budget.elapsed,
            }
            self._search.on_note({**where, **figures})

    def keep(self, state: Callable[[], Mapping[str, Array]]) -> None:
        search, now = self._search, self._search.budget.elapsed
        if (
            search.journal is None
            or search.journal.is_replaying
            or now < self._kept_at + _KEEP_SECONDS
        ):
            return
        search.journal.keep(self._placer, self._asked, state())
        self._kept_at = now

    def kept(self) -> Mapping[str, Array] | None:
        found = (
            None
            if self._search.journal is None
            else self._search.journal.kept(self._placer, self.trials_left)
        )
        if found is None:
            return None
        self._asked = len(found.trials)
        for past in found.trials:
            self._replay(past)
        return found.state

    def __call__(self, placements: Sequence[Placement]) -> list[Trial]:
        found: list[Trial] = []
        for part in self._parts(placements):
            found += part
        if len(found) < len(placements):
            raise BudgetSpent(f"{len(found)} of {len(placements)} placements were evaluated")
        return found

    def _parts(self, placements: Sequence[Placement]) -> Iterator[list[Trial]]:
        """Slices of the batch as they are done, for as long as the budget lasts."""
        search, first = self._search, 0
        while first < len(placements):
            known = self._known(placements[first])
            if self.trials_left < 1 or (self._is_late and known is None):
                return
            if known is not None:
                self._replay(known)
                self._asked += 1
                first += 1
                yield known.trials
                continue
            size = max(
                1, min(len(placements), int(_SLICE_SECONDS / max(search.source.seconds_each, 1e-6)))
            )
            size = int(min(size, self.trials_left))
            if self.seconds_left <= 0 or (
                search.journal is not None and search.journal.is_replaying
            ):
                size = 1  # the one that every search has, or the next may be known
            part = [
                replace(t, placer=self._placer)
                for t in search.source.trials(placements[first : first + size])
            ]
            self._take(part)
            self._asked += size
            first += size
            yield part

    def _known(self, placement: Placement) -> Past | None:
        journal = self._search.journal
        return journal.take_trial(placement) if journal is not None and journal.trials else None

    def _take(self, trials: list[Trial]) -> None:
        """Write trials down before anything is made of them."""
        search = self._search
        if search.journal is not None:
            search.journal.add_trials(trials, search.budget.elapsed, search.best)
        search.take(trials, search.count(_digests(trials), len(trials)))
        search.tell(trials)

    def round(self, run: Callable[[], Round], what: str = "") -> Mapping[str, Array]:
        search = self._search
        known = (
            search.journal.take_round(self._placer, what) if search.journal is not None else None
        )
        if known is not None:
            if known.simulations > self.simulations_left or self.trials_left < 1:
                raise BudgetSpent("the next round of the journal is longer than what is left")
            self._replay(known)
            return known.state
        if self.trials_left < 1 or self._is_late:
            raise BudgetSpent("nothing is left for another round")
        done = run()
        if not search.is_simulated:
            # A loop simulates by itself, and proposes; what is run counts, and decides.
            done = replace(done, placements=self._proposed(done), simulations=_ROUND_REPEATS)
        trials = [replace(t, placer=self._placer) for t in search.source.trials(done.placements)]
        if search.journal is not None:
            search.journal.add_round(self._placer, what, done, trials, search.budget.elapsed)
        search.take(trials, search.count(_digests(trials), done.simulations))
        search.tell(trials)
        return done.state

    def _proposed(self, done: Round) -> list[Placement]:
        """What of a round is to be run: a loop may find the same as before, while others are worth
        a trial too."""
        new = self._search.new(done.placements) or self._search.new(done.others())[:_OTHERS]
        most = len(new) if isinf(self.trials_left) else int(self.trials_left)
        return new[:most] or list(done.placements[:1])

    def _replay(self, past: Past) -> None:
        search = self._search
        search.budget.catch_up(past.elapsed)
        search.take(past.trials, search.count(past.digests, past.simulations))
        remember = getattr(search.source, "remember", None)
        if remember is not None:
            remember(past.trials)
        search.tell(past.trials)


def _digests(trials: Sequence[Trial]) -> list[str]:
    return [trial.placement.digest for trial in trials]
