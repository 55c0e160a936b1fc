"""Offloading: parameters, optimizer states and updates on the host, all other work on accelerators.

The split of ZeRO-Offload (Ren et al., USENIX ATC 2021): accelerators need memory for activations,
gradients and a window of weights alone.

Differs in: weights live on the host too. An accelerator fetches them once for a step where memory
allows that, else once for each use. One accelerator is tried as well as all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._microbatches.family_trials import family_trials
from roost.placers._microbatches.sketches import DATA_PARALLEL, OFFLOAD


@dataclass(frozen=True)
class Offload:
    """Whole microbatches with all state on the host; data parallelism where no CPU is beside."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        return self.several(problem, evaluate)[0]

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """The best few placements, with one accelerator and with all."""
        trials = family_trials(problem, evaluate, OFFLOAD)
        trials = trials or family_trials(problem, evaluate, DATA_PARALLEL)
        return [trial.placement for trial in trials]
