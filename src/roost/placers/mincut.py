"""MinCut: the mapping of `scotch` without the CPU, a baseline.

Mirhoseini et al., ICML 2017 (arXiv 1706.04972). Differs in: as `scotch`. Units that may only run on
the CPU do so. If the other devices have too little memory, more units go to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate
from roost.placers._shared.fitting import fitted
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import accelerators
from roost.placers.scotch import mapping


@dataclass(frozen=True)
class Mincut:
    """Scotch's mapping onto the devices that are no CPU."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Map, make it fit, and take the best order."""
        units = Units.of(problem)
        return fitted(units, evaluate, mapping(units, accelerators(problem))).placement
