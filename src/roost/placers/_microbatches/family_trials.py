"""The best placements of one family for an unrolled problem."""

from __future__ import annotations

from collections.abc import Sequence

from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate
from roost.placers._microbatches.copied_step import CopiedStep
from roost.placers._microbatches.sketches import sketch_trial, sketches
from roost.placers._microbatches.task_schedule import SCHEDULES
from roost.placers._starts.starting_points import distinct

_MOST = 4  # sketches that are simulated, if one of them fits


def family_trials(
    problem: Problem, evaluate: Evaluate, family: str, schedules: Sequence[str] = SCHEDULES
) -> list[Trial]:
    """The trials of the most promising sketches, the best first.

    Sketches are simulated until one fits and a few are known.
    """
    step = CopiedStep.of(problem)
    trials: list[Trial] = []
    for sketch in sketches(step, step.count, (family,), schedules):
        trials.append(sketch_trial(problem, sketch, evaluate))
        if len(trials) >= _MOST and any(trial.feasible for trial in trials):
            break
    return distinct(trials)
