"""MinCut: as `scotch`, without the CPU. A baseline of Mirhoseini et al., ICML 2017 (arXiv
1706.04972).

Differs in: as `scotch`. What may only run on the CPU still does, and where the other devices have
too little memory some units go there too.
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
