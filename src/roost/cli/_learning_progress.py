"""The live line of `roost learn`: its progress, its quality and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import TYPE_CHECKING

from roost.cli import _console
from roost.cli._text import live_line, plural

if TYPE_CHECKING:
    from rich.text import Text

    from roost.core.problem import Problem

_WARM = 0.01  # of all work: before it the time that is left is not shown


@dataclass
class LearningProgress:
    """The progress of learning, from the figures of each piece of work, as a live line."""

    what: str
    parts: Sequence[str]  # names of the parts of the work
    # Step time of each problem by a simple placer, infinite if none fits.
    baselines: Sequence[float]
    clock: Callable[[], float] = time.monotonic
    last: Mapping[str, float] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)  # problem -> best step time so far
    share: float | None = None  # geometric mean of step times over those of the simple placers
    first: tuple[float, float] | None = None  # progress and time of the first figures

    def add(self, figures: Mapping[str, float]) -> None:
        self.last = figures
        if self.first is None and "progress" in figures:
            self.first = figures["progress"], self.clock()
        # `mean_cost` is the mean of logarithms over all problems.
        if "mean_cost" in figures and self.baselines and max(self.baselines) < inf:
            self.share = exp(
                figures["mean_cost"] - sum(map(log, self.baselines)) / len(self.baselines)
            )
        if "problem" in figures and "best" in figures:
            number = int(figures["problem"])
            self.best[number] = min(figures["best"], self.best.get(number, inf))
            ratios = [seconds / self.baselines[each] for each, seconds in self.best.items()]
            known = [log(ratio) for ratio in ratios if 0 < ratio < inf]
            self.share = exp(sum(known) / len(known)) if known else None

    def line(self) -> str:
        """`lister: 35%, 2 min left, 0.61 of single and expert, rules 120 of 340, 24 problems`."""
        if not self.last:
            return f"{self.what}: making ready {plural(len(self.baselines), 'problem')}"
        words = self._time()
        if self.share is not None:
            words.append(f"{self.share:.2f} of single and expert")
        return f"{self.what}: {', '.join([*words, self._where(), self._problems()])}"

    def _where(self) -> str:
        stage = int(self.last.get("stage", -1))
        part = self.parts[stage] if 0 <= stage < len(self.parts) else "round"
        return f"{part} {self.last.get('done', 0):,.0f} of {self.last.get('of', 0):,.0f}"

    def _problems(self) -> str:
        every = plural(len(self.baselines), "problem")
        return f"{len(self.best)} of {every}" if self.best else every

    def _time(self) -> list[str]:
        done = self.last.get("progress")
        if done is None or self.first is None:
            return []
        before, began = self.first
        words = [f"{done:.0%}"]
        if done < 1.0 and done - before >= _WARM:
            words.append(
                f"{_lasting((1.0 - done) * (self.clock() - began) / (done - before))} left"
            )
        return words

    def __rich__(self) -> Text:

        return live_line(self.line())


def baselines(problems: Sequence[Problem]) -> list[float]:
    """The best step time of single and expert, of each problem; infinite if none fits."""
    from roost.cli._search import baseline

    step_times = []
    with _console.progress("asking single and expert") as tell:
        for number, problem in enumerate(problems, 1):
            best = baseline(problem)
            step_times.append(best.step_time if best.feasible and best.step_time > 0 else inf)
            tell(number, len(problems))
    return step_times


def _lasting(seconds: float) -> str:
    """`40 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
