"""Hybrid: several pipelines side by side, each with a share of the microbatches.

Chunks times replicas, as PipeDream (Narayanan et al., SOSP 2019) and Megatron-LM (Narayanan et al.,
SC 2021) combine them. Among replicas of a chunk the parameters are spread as in `data_parallel`.

Differs in: replicas are of equal size. The devices of a chunk, or those of a replica, are
neighbours in the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._microbatches.family_trials import family_trials
from roost.placers._microbatches.sketches import DATA_PARALLEL, HYBRID


@dataclass(frozen=True)
class Hybrid:
    """Pipelines side by side; data parallelism where the devices cannot be grouped."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        return self.several(problem, evaluate)[0]

    def several(self, problem: Problem, evaluate: Evaluate) -> list[Placement]:
        """The best few mixtures."""
        trials = family_trials(problem, evaluate, HYBRID)
        trials = trials or family_trials(problem, evaluate, DATA_PARALLEL)
        return [trial.placement for trial in trials]
