"""The budget of a search: trials and seconds, counted by whoever evaluates and never by the placer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isnan

from roost.errors import InputError


@dataclass
class Budget:
    """What a search may spend, and what it has spent."""

    trials: float = inf
    seconds: float = inf
    clock: Callable[[], float] = time.perf_counter
    num_trials: int = 0
    spent_before: float = 0.0  # seconds, in earlier parts of a search that goes on
    _began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("seconds", self.seconds)):
            if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value) or value < 0:
                raise InputError(f"{name} is {value!r}; it must be a number that is not negative")
        if self.trials < 1 or self.seconds <= 0:
            raise InputError(
                f"a budget of {self.trials:g} trials and {self.seconds:g} seconds evaluates nothing; give at least one "
                "trial and some time"
            )
        self._began = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds spent, those of earlier parts included."""
        return self.spent_before + self.clock() - self._began

    @property
    def seconds_left(self) -> float:
        return self.seconds - self.elapsed

    @property
    def trials_left(self) -> float:
        return self.trials - self.num_trials

    @property
    def is_spent(self) -> bool:
        return self.trials_left <= 0 or self.seconds_left <= 0
