"""The budget of a search. The search counts it, never the placer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from numbers import Real

from roost.errors import InputError

_ENDLESS = 10**18  # trials or seconds: more than any search spends


@dataclass
class Budget:
    """The trials and seconds that a search may spend, and those it has spent."""

    trials: float = inf
    seconds: float = inf
    clock: Callable[[], float] = time.perf_counter
    num_trials: int = 0
    spent_before: float = 0.0  # seconds besides those on the clock
    _began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("seconds", self.seconds)):
            if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
                raise InputError(f"{name} is {value!r}; it must be a number that is not negative")
            if value > _ENDLESS:
                setattr(self, name, inf)
        if self.trials < 1 or self.seconds <= 0:
            given = f"{self.trials:g} trials" if self.trials < 1 else f"{self.seconds:g} seconds"
            raise InputError(
                f"a budget of {given} evaluates nothing; give at least one trial and some time"
            )
        if self.trials < inf and self.trials != int(self.trials):
            raise InputError(f"trials is {self.trials!r}; it must be a whole number")
        self._began = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds spent, with those of an earlier part of the search that was replayed."""
        return self.spent_before + self.clock() - self._began

    def catch_up(self, elapsed: float) -> None:
        """Count at least so many seconds as spent: a trial from a journal was found after them."""
        self.spent_before += max(0.0, elapsed - self.elapsed)

    @property
    def seconds_left(self) -> float:
        return self.seconds - self.elapsed

    @property
    def trials_left(self) -> float:
        return self.trials - self.num_trials

    @property
    def is_spent(self) -> bool:
        return self.trials_left <= 0 or self.seconds_left <= 0
