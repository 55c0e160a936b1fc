"""Data parallelism: each microbatch as a whole on one device, parameters spread over all of them.

The state of each parameter, and its update, are on one device: the sharding of ZeRO (Rajbhandari et
al., SC 2020) and of FSDP. Other devices fetch a weight into a window, once for a step where memory
allows that, else once for each use. Gradients are added up where the parameter lives.

Differs in: unlike devices get shares of the microbatches by their speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._microbatches.family_trials import family_trials
from roost.placers._microbatches.sketches import DATA_PARALLEL


@dataclass(frozen=True)
class DataParallel:
    """Whole microbatches on the accelerators, with and without the CPU."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        return self.several(problem, evaluate)[0]

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """The best few placements of whole microbatches."""
        trials = family_trials(problem, evaluate, DATA_PARALLEL)
        return [trial.placement for trial in trials]
