"""The past of a search that goes on: trials, rounds and states that need no second evaluation.

`Past` is the empty one. `Journal` in `journal.py` is the one that is kept in a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.trial import Trial
from roost.placers import Round


@dataclass(frozen=True, eq=False)
class PastEvaluation:
    """A trial, or a round of a compiled loop, that was evaluated before."""

    trials: list[Trial]
    simulations: int
    elapsed: float  # seconds since the search began
    digests: tuple[str, ...]  # of all its placements; `trials` may lack some of them
    state: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SavedState:
    """The last state that a placer saved, and its trials up to there."""

    past: list[PastEvaluation]
    state: Mapping[str, Array]


class Past:
    """No past: every placement is new, and nothing is written down."""

    @property
    def is_replaying(self) -> bool:
        """True while there is a past evaluation that no placer has asked for yet."""
        return False

    def take_trial(self, placement: Placement) -> PastEvaluation | None:
        """A past trial of this placement. Each is given once."""
        return None

    def take_round(self, placer: str, what: str) -> PastEvaluation | None:
        """The next past round of this placer and kind."""
        return None

    def take_rest(self) -> list[PastEvaluation]:
        """All past evaluations that no placer has asked for, in their order."""
        return []

    def add_trials(self, trials: Sequence[Trial], elapsed: float, best: Trial | None) -> None:
        """Write trials down."""

    def add_round(
        self, placer: str, what: str, done: Round, trials: Sequence[Trial], elapsed: float
    ) -> None:
        """Write a round down."""

    @property
    def keeps_states(self) -> bool:
        """True where `save_state` writes a file."""
        return False

    def save_state(self, placer: str, count: int, state: Mapping[str, Array]) -> None:
        """Write the state that a placer is in after so many of its trials."""

    def take_state(self, placer: str, most: float) -> SavedState | None:
        """The last saved state of a placer, if it is not more than `most` trials old."""
        return None

    def close(self) -> None:
        """Close the file."""
