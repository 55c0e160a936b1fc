"""The default: every cheap placer first, then the strongest search from the best few of them, for
the time given.

Never worse than any placer it asked, for all of them are evaluated in the one search and the best
is kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import isinf

from roost import catalog
from roost.bounds import cumulative
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.errors import BudgetSpent, InputError, MissingExtra
from roost.placers import Evaluate
from roost.placers._annealing.population import Heat as Heat
from roost.placers._annealing.population import Population
from roost.placers._shared.units import Units
from roost.placers._starts.offload import needs_offload
from roost.placers._starts.starting_points import ask, distinct, offloads, whole_groups
from roost.transforms.microbatch import copies_of

log = logging.getLogger(__name__)

_EXACT_UNITS = 120  # up to so many groups the exact placer is asked
_EXACT_SECONDS = 2.0  # and where it gets at least so much time
_EXACT_SHARE = 0.5  # of the seconds
# Groups where devices are alike and transfers free: the solver is many times faster there.
_EASY_UNITS = 400
# Asked first where the step is unrolled into microbatches.
_OF_COPIES = ("single", "data_parallel", "hybrid", "pipeline", "offload")
_WORK = 1e-6  # of the solver, in its own count, for a trial and op of the budget
_MOST_TRIALS = 10**7


@dataclass(frozen=True)
class Auto:
    """Baselines, then `cpsat` for small graphs, then annealing until the budget is spent."""

    # The most useful first: with little time, not all of them get their turn.
    baselines: tuple[str, ...] = (
        "single", "rules", "etf", "heft", "expert", "contiguous", "topo", "sct", "metis", "scotch",
        "mincut",
    )  # fmt: skip
    baseline_share: float = 0.4  # of the budget: no baseline begins after it
    heat: Heat = field(default_factory=Heat)
    threads: int | None = None
    begin: tuple[Placement, ...] = ()  # placements to begin with, beside those of the baselines

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        trials = evaluate(self.begin) if self.begin else []
        trials += self._ask_baselines(problem, evaluate)
        copied = bool((copies_of(problem.graph) > 0).any())
        if not copied:
            trials += whole_groups(problem, evaluate)
        if needs_offload(problem) or not any(trial.feasible for trial in trials):
            trials += offloads(problem, evaluate)
        if not copied:
            self._ask_exact(problem, evaluate)
        starts = distinct(trials if evaluate.best is None else [evaluate.best, *trials])
        Population(problem, evaluate, self.heat, self.threads).run(
            [trial.placement for trial in starts]
        )
        assert evaluate.best is not None
        return evaluate.best.placement

    def _ask_baselines(self, problem: Problem, evaluate: Evaluate) -> list[Trial]:
        """The trials of each baseline; those that cannot be asked here are left out."""
        trials: list[Trial] = []
        kept = 1 - self.baseline_share
        least_seconds = kept * evaluate.seconds_left
        least_trials = kept * evaluate.trials_left
        for name in self._names(problem):
            # Without a limit nothing is less than infinite.
            late = evaluate.seconds_left < least_seconds or evaluate.trials_left < least_trials
            if trials and late:
                break
            try:
                trials += ask(name, problem, evaluate.named(name))
            except (MissingExtra, InputError) as error:
                log.info("without %s: %s", name, error)
        return trials

    def _names(self, problem: Problem) -> tuple[str, ...]:
        """The baselines, those for copies first."""
        if self.begin or not (copies_of(problem.graph) > 0).any():
            return self.baselines
        return tuple(dict.fromkeys((*_OF_COPIES, *self.baselines)))

    def _ask_exact(self, problem: Problem, evaluate: Evaluate) -> None:
        """The exact placer, where it may come to an end."""
        easy = cumulative.applies(problem)
        if Units.of(problem, "nothing").num_units > (_EASY_UNITS if easy else _EXACT_UNITS):
            return
        exact = catalog.find("placers", "cpsat")
        if not isinf(evaluate.seconds_left):
            if evaluate.seconds_left < (0.0 if easy else _EXACT_SECONDS):
                return
            placer = exact()
            asked = evaluate.named("cpsat", seconds=_EXACT_SHARE * evaluate.seconds_left)
        elif easy:  # the clock must not decide: a limit in the solver's own count
            trials = min(evaluate.trials_left, _MOST_TRIALS)
            placer = exact(work=min(exact.work, _WORK * trials * problem.graph.num_ops))
            asked = evaluate.named("cpsat")
        else:
            return
        try:
            placer.place(problem, asked)
        except MissingExtra as error:
            log.info("without cpsat: %s", error)
        except BudgetSpent:
            if evaluate.seconds_left <= 0 or evaluate.trials_left < 1:
                raise
