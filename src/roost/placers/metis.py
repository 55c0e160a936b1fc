"""METIS: a partition with parts as large as devices are fast, and few seconds of transfers.

Karypis and Kumar, SIAM Journal on Scientific Computing 20(1), 1998; multilevel k-way or recursive
bisection, as the library chooses. Vertices are units, weighed by their seconds; edges weigh the
seconds that their tensors take over an average link, latency included.

Differs in: METIS knows only shares, no topology and no order; the CPU gets no part where there is
anything else. Its Python wrapper takes one weight per vertex, so memory is no second constraint:
units are moved from devices that overflow afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import MissingExtra
from roost.placers import Evaluate
from roost.placers._shared.fitting import fitted
from roost.placers._shared.links import mean_link
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import accelerators, mean_seconds, speeds, unit_graph, whole

_FEWEST_UNITS = 4  # for each part


@dataclass(frozen=True)
class Metis:
    """The library's partition, one part for each device that is no CPU."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Partition, make it fit, and take the best order."""
        units = Units.of(problem)
        return fitted(units, evaluate, partition(units, accelerators(problem))).placement


def partition(units: Units, devices: list[int]) -> Array:  # [units] device
    """The partition of the units that METIS makes for some of the devices."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingExtra("pymetis", "partition") from error
    # METIS prints complaints where a part would be empty: with few vertices for each, or one that
    # outweighs a part.
    parts = max(1, min(len(devices), units.num_units // _FEWEST_UNITS))
    chosen = np.array(devices)[np.sort(np.argsort(-speeds(units, devices), kind="stable")[:parts])]
    if parts == 1:
        return np.full(units.num_units, chosen[0])
    share = speeds(units, chosen.tolist())
    seconds = mean_seconds(units, chosen.tolist())
    graph = unit_graph(units)
    link = mean_link(units.problem.cluster)
    _, part = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(graph.start, graph.neighbour),
        vweights=whole(np.minimum(seconds, seconds.sum() * share.min())),
        eweights=whole(graph.tensors * link.latency + graph.size * link.seconds_per_byte),
        tpwgts=share.tolist(),
        options=pymetis.Options(seed=0),
    )
    return chosen[np.asarray(part, dtype=np.int64)]
