"""Problem -> Placement: one file per placer; the file name is its name on the command line.

A placer is a frozen dataclass of settings with one method, `place`. It gets a problem, and
`evaluate`, which turns placements into trials and counts the budget. Optional members of a placer
are protocols of their own: Roost asks with `isinstance`. Building blocks are in `toolkit`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial

# Class methods that make a placer with other settings: those of its paper as far as they are known,
# or those that begin from the best heuristic and use it as a prior.
VARIANTS = ("paper", "heuristic")


@dataclass(frozen=True, eq=False)
class Round:
    """The work of a compiled loop between two looks at the clock."""

    placements: Sequence[Placement]  # the best it found; few, for each is simulated again
    simulations: int  # placements that the loop simulated by itself
    state: Mapping[str, Array] = field(default_factory=dict)  # where the next round goes on
    # More placements worth running, the best first. They are used where placements are run on
    # devices and all of `placements` were run before.
    others: Callable[[], Iterable[Placement]] = tuple


class Evaluate(Protocol):
    """Placements -> trials. It counts the budget, and raises `BudgetSpent` when that is spent.

    Three members must be implemented: the call, `rng` and `best`. The defaults of the other members
    suit a search without limits, without a journal, and without anyone who watches.
    """

    rng: np.random.Generator  # the only source of chance: seed of the search, name of the placer

    @abstractmethod
    def __call__(self, placements: Sequence[Placement]) -> list[Trial]:
        """One trial for each placement, in the order given.

        Where the budget is too small for all, it evaluates as many as it can and then raises.
        """

    @property
    @abstractmethod
    def best(self) -> Trial | None:
        """The best trial so far, of all placers of the search."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the budget is spent."""
        return inf

    @property
    def trials_left(self) -> float:
        """Trials and simulations until the budget is spent."""
        return inf

    @property
    def simulations_left(self) -> float:
        """Simulations that a compiled loop may do by itself.

        Infinite where placements are run on devices: then only the runs count.
        """
        return self.trials_left

    def round(self, run: Callable[[], Round], what: str = "") -> Mapping[str, Array]:
        """Run one round of a compiled loop, count its simulations, and return its state.

        Its placements become trials. A search that goes on from a journal takes the state from
        there instead. `what` names the kind of round where a placer has several.
        """
        done = run()
        self(done.placements)
        return done.state

    def named(self, placer: str, trials: float = inf, seconds: float = inf) -> Evaluate:
        """This `evaluate` for a placer that this one asks; its trials bear that name.

        The other placer may spend at most these trials and seconds of what is left.
        """
        return self

    def prove(self, bound: Bound) -> None:
        """Report a bound: no placement has a shorter step."""
        return None

    def note(self, figures: Mapping[str, float]) -> None:
        """Report figures of the learning, such as losses and entropy, to whoever watches."""
        return None

    def keep(self, state: Callable[[], Mapping[str, Array]]) -> None:
        """Offer the state of the placer after the trials so far; a journal keeps it now and then.

        For placers that would take long to get there again by repeating the same trials.
        """
        return None

    def kept(self) -> Mapping[str, Array] | None:
        """The state to go on from, if the journal has one; its trials are spent then.

        Call it once, before the first trial.
        """
        return None


class Placer(Protocol):
    """Makes a placement of a problem."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """The best placement it can find; where none fits, the nearest to fitting."""


@runtime_checkable
class OffersSeveral(Protocol):
    """A placer that offers its best few placements, as starts of another search."""

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """Distinct placements, the best first, each evaluated by now."""


@runtime_checkable
class AsksBaselines(Protocol):
    """A placer that evaluates the answers of others first, in this order."""

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of placers."""


@runtime_checkable
class AsksStarts(Protocol):
    """A placer that begins its search with the answers of others."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Names of placers."""


@runtime_checkable
class TakesWeights(Protocol):
    """A placer that can use learned weights."""

    @property
    def weights(self) -> object:
        """Path of the file of weights, or None for a placer that has learned nothing."""


@runtime_checkable
class LearnsFamily(Protocol):
    """A placer that learns weights over many problems, for `roost learn`."""

    def learn(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        on_note: Callable[[Mapping[str, float]], object],
        checkpoint: Any,
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Weights by name, and facts about them for the card; about so many seconds of work.

        `checkpoint` has `load() -> state or None` and `save(state)`; a state is a dict of arrays.
        """


@runtime_checkable
class NamesParts(Protocol):
    """A learning placer whose work has parts, such as imitation and trial and error."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, by the number that its notes give as `stage`."""


def several_of(placer: Placer, problem: Problem, evaluate: Evaluate) -> list[Placement]:
    """The best few placements of a placer, or the one that it makes."""
    if isinstance(placer, OffersSeveral):
        return placer.several(problem, evaluate)
    return [placer.place(problem, evaluate)]


def asked_by(placer: Placer) -> tuple[str, ...]:
    """Names of the placers that a placer asks: baselines, then starts; none by default."""
    baselines = placer.baselines if isinstance(placer, AsksBaselines) else ()
    starts = placer.starts if isinstance(placer, AsksStarts) else ()
    return (*baselines, *starts)


def weights_of(placer: Placer) -> str | Path | None:
    """Path of the weights that a placer uses; None by default."""
    weights = placer.weights if isinstance(placer, TakesWeights) else None
    return weights if isinstance(weights, str | Path) else None


def parts_of(placer: object) -> tuple[str, ...]:
    """Names of the parts of a placer's learning; none by default."""
    return placer.parts if isinstance(placer, NamesParts) else ()
