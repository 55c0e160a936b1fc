"""Pipeline: the layers in balanced chunks, one microbatch after another through them.

Chunks by the dynamic programme of PipeDream (Narayanan et al., SOSP 2019). Orders of GPipe (Huang
et al., NeurIPS 2019), of 1F1B, with several chunks a device also interleaved (Narayanan et al., SC
2021), and with gradients of weights in the gaps (Qi et al. 2023).

Differs in: a layer may be cut. Unlike devices get unlike chunks. Layers that read a tied weight run
where the one with most work does, or the others fetch it.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._microbatches.family_trials import family_trials
from roost.placers._microbatches.sketches import PIPELINE
from roost.placers._microbatches.task_schedule import SCHEDULES
from roost.placers._shared.setting_checks import check_choice


@dataclass(frozen=True)
class Pipeline:
    """One pipeline over the accelerators; `schedule` is an order, or "any" for the best."""

    schedule: str = "any"

    def __post_init__(self) -> None:
        check_choice(self, "schedule", ("any", *SCHEDULES))

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        return self.several(problem, evaluate)[0]

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """The best few pipelines."""
        schedules = SCHEDULES if self.schedule == "any" else (self.schedule,)
        trials = family_trials(problem, evaluate, PIPELINE, schedules)
        return [trial.placement for trial in trials]
