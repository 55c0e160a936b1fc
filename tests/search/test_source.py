"""A source of trials needs one method; everything else has a default."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from engine import fork_join

from roost.core.placement import Placement
from roost.core.trial import Trial
from roost.search.solve import search
from roost.search.source import Source


class Minimal(Source):
    """Each step takes as many seconds as there are ops on the last device."""

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        peak = np.zeros(fork_join().cluster.num_devices, np.int64)
        return [Trial(each, float(each.device.sum()), peak, True) for each in placements]


class Run(Minimal):
    simulated = False


def test_a_source_of_one_method_serves_a_search() -> None:
    result = search(fork_join(), "random", trials=50, source=Minimal(), prove=False)
    assert result.num_trials == 50
    assert result.best.step_time == result.best.placement.device.sum()


def test_a_source_that_runs_placements_counts_each_once() -> None:
    problem = fork_join()
    result = search(problem, "annealing", trials=6, source=Run())
    assert result.num_trials <= 6
    assert result.bound is None  # bounds are of simulated steps
