"""Trials and results: the costs of placements, and the best of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isinf

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.saved import Saved
from roost.core.timeline import Timeline
from roost.core.units import show_bytes, show_seconds


@dataclass(frozen=True, eq=False, repr=False)
class Trial:
    """One evaluated placement. If it does not fit, `feasible` is false."""

    placement: Placement
    step_time: float  # seconds; infinite if a run did not end
    peak_memory: Array  # [devices] bytes
    feasible: bool
    seconds: float = 0.0  # spent on it
    source: str = "simulated"  # or "measured"
    placer: str = ""
    missing_bytes: int = 0  # beyond the capacities, on all devices together
    why: str = ""  # reason why it is not feasible, unless simulated memory is

    @staticmethod
    def simulated(placement: Placement, step: Timeline) -> Trial:
        """The trial of a simulated step."""
        missing = int(step.missing.sum())
        return Trial(
            placement, step.step_time, step.peak_memory, missing == 0, missing_bytes=missing
        )

    def better_than(self, other: Trial | None) -> bool:
        """Feasible before infeasible, then nearer to fitting, then the shorter step."""
        if other is None:
            return True
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[bool, int, float]:
        return not self.feasible, self.missing_bytes, self.step_time

    def __repr__(self) -> str:
        lacks = "fits" if self.feasible else self.why or f"lacks {show_bytes(self.missing_bytes)}"
        step = "" if isinf(self.step_time) else f"{show_seconds(self.step_time)} a step, "
        by = f", by {self.placer}" if self.placer else ""
        return f"Trial({step}{lacks}{by})"


def best_of(trials: Iterable[Trial]) -> Trial:
    """The best of some trials, the first of equals."""
    best: Trial | None = None
    for trial in trials:
        if trial.better_than(best):
            best = trial
    assert best is not None
    return best


@dataclass(frozen=True)
class Bound:
    """No placement has a shorter step than this, and the kind of proof."""

    step_time: float  # seconds
    proof: str


# done: the placer ended. budget: trials or seconds were spent. optimal: the bound was reached.
# interrupted: by Ctrl-C. stopped: `on_trial` asked for it. exhausted: placements were run, and no
# new one was proposed for long.
ENDINGS = ("done", "budget", "optimal", "interrupted", "stopped", "exhausted")


@dataclass(frozen=True, eq=False, repr=False)
class Result(Saved):
    """The best trial of a search, beside the baselines on the same problem."""

    best: Trial
    placer: str
    seed: int
    num_trials: int
    seconds: float
    baselines: Mapping[str, Trial] = field(default_factory=dict)
    bound: Bound | None = None
    graph: str = ""  # name
    cluster: str = ""  # name
    problem: str = ""  # digest
    ended: str = ""  # why: one of ENDINGS

    @property
    def gap(self) -> float | None:
        """The share of the best step time above the bound; None without a bound."""
        if self.bound is None:
            return None
        return 1.0 - self.bound.step_time / self.best.step_time if self.best.step_time > 0 else 0.0

    def __repr__(self) -> str:
        gap = "" if self.gap is None or not self.best.feasible else f", gap {self.gap:.1%}"
        spent = f"{self.num_trials:,} trials in {self.seconds:.1f} s"
        return f"Result({self.graph!r} on {self.cluster!r}: {self.best!r}{gap}, {spent})"
