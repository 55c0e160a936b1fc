"""The base class of what turns placements into trials: the simulator, or real devices."""

from __future__ import annotations

from collections.abc import Sequence

from roost.core.placement import Placement
from roost.core.trial import Trial


class Source:
    """The source of the trials of a search. A subclass needs `trials` alone."""

    # True: trials are simulated, and bounds on simulated steps hold for them.
    # False: each placement is run, so the placements that are run count, and no simulations.
    simulated: bool = True
    # Seconds that a trial took lately. A search cuts long batches by it.
    seconds_each: float = 0.0

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        """One trial for each placement, in their order."""
        raise NotImplementedError

    def open(self) -> None:
        """Get ready. A search calls this before its seconds begin."""

    def remember(self, trials: Sequence[Trial]) -> None:
        """Take note of trials that an earlier part of the search evaluated."""

    def close(self) -> None:
        """Free everything. A search calls this when it ends."""
