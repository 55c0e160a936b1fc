"""Problem -> Placement: one file per placer; the file name is its name on the command line.

A placer is a frozen dataclass of settings with one method, `place`. It gets a problem and a
function that says what placements cost; the caller counts the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial

# Class methods that make a placer with other settings, where it has them: as its paper says as far
# as that is known, or with the best heuristic as its first trials and as a prior.
VARIANTS = ("paper", "heuristic")


@dataclass(frozen=True, eq=False)
class Round:
    """What a compiled loop did between two looks at the clock."""

    placements: Sequence[Placement]  # the best it found; few, for each is simulated again
    simulations: int  # placements it simulated by itself
    state: Mapping[str, Array] = field(default_factory=dict)  # where to go on from
    # More that are worth running, the best first: taken where placements are run, and those above
    # were run before.
    others: Callable[[], Iterable[Placement]] = tuple


class Evaluate(Protocol):
    """Placements -> trials, in the order given. It counts the budget, and raises `BudgetSpent` when
    that is spent."""

    @property
    def rng(self) -> np.random.Generator:
        """Made from the seed of the search and the name of the placer: the only source of
        chance."""

    def __call__(self, placements: Sequence[Placement]) -> list[Trial]:
        """Evaluate as many as the budget allows; where that is not all of them, `BudgetSpent` is
        raised after those."""

    def round(self, run: Callable[[], Round], what: str = "") -> Mapping[str, Array]:
        """One round of a compiled loop: its simulations are counted, its placements become trials;
        gives its state.

        A search that goes on from a journal does not run a round again that the journal has. `what`
        tells rounds apart that have states of different kinds: with another budget a placer may
        leave some out.
        """

    def named(self, placer: str, trials: float = inf, seconds: float = inf) -> Evaluate:
        """The same for a placer that this one asks: its trials bear its name, and it may spend at
        most so much."""

    def prove(self, bound: Bound) -> None:
        """No placement has a shorter step than this."""

    def note(self, figures: Mapping[str, float]) -> None:
        """Tell whoever watches how learning goes: losses, entropy and the like."""

    def keep(self, state: Callable[[], Mapping[str, Array]]) -> None:
        """Offer the state that the placer is in after the trials so far; with a journal it is kept
        now and then.

        For placers that would need long to come as far again by going through the same trials.
        """

    def kept(self) -> Mapping[str, Array] | None:
        """The state to go on from, at the beginning of a search that goes on; the trials up to it
        are spent then."""

    @property
    def best(self) -> Trial | None:
        """The best trial so far."""

    @property
    def seconds_left(self) -> float:
        """Until the budget is spent; infinite where there is no limit."""

    @property
    def trials_left(self) -> float:
        """Trials and simulations until the budget is spent; infinite where there is no limit."""

    @property
    def simulations_left(self) -> float:
        """Simulations that a compiled loop may do by itself; infinite where only what it proposes
        counts, being run."""


class Placer(Protocol):
    """What a placer is."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """The best placement it can find. Where none fits it returns the one that is nearest to
        fitting."""
