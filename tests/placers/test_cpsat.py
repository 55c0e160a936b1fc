"""The exact placer: the optimum where it can prove it, the start where the graph is too large."""

import logging

import numpy as np
import pytest

from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.errors import InputError
from roost.placers.cpsat import Cpsat
from roost.simulator.compiled import Simulator
from roost.testing.problems import training_like
from support.exhaustive import exhaustive, tiny

pytest.importorskip("ortools")


class Evaluate:
    """Simulates without end."""

    def __init__(self, problem, seed=0):
        self.problem, self.rng, self.best = problem, np.random.default_rng(seed), None
        self.seconds_left = self.trials_left = float("inf")

    def __call__(self, placements):
        trials = []
        for placement in placements:
            timeline = Simulator.of(self.problem).simulate(placement)
            trials.append(
                Trial(placement, timeline.step_time, timeline.peak_memory, timeline.feasible)
            )
            if trials[-1].better_than(self.best):
                self.best = trials[-1]
        return trials

    def prove(self, bound):
        assert (
            self.best is None
            or not self.best.feasible
            or bound.step_time <= self.best.step_time * (1 + 1e-9)
        )


def place(problem, **settings):
    placement = Cpsat(**settings).place(problem, Evaluate(problem))
    return placement, Simulator.of(problem).simulate(placement)


def test_it_finds_the_optimum_of_tiny_problems():
    reached, count = 0, 0
    for seed in range(80):
        problem = tiny(seed, most_ops=5)
        best = exhaustive(problem)
        _, timeline = place(problem)
        if np.isfinite(best.step_time):
            count += 1
            assert not timeline.feasible or timeline.step_time >= best.step_time * (1 - 1e-9)
            reached += timeline.feasible and timeline.step_time <= best.step_time * (1 + 1e-6)
    assert reached >= 0.97 * count


def test_it_is_never_worse_than_the_best_so_far():
    problem = training_like(24, 3, seed=4)
    evaluate = Evaluate(problem)
    start = evaluate([Placement(np.zeros(problem.graph.num_ops, dtype=np.int32), "rank")])[0]
    placement = Cpsat(work=4.0).place(problem, evaluate)
    assert Simulator.of(problem).simulate(placement).step_time < start.step_time


@pytest.mark.parametrize(("num_ops", "work"), [(16, 1.0), (50, 0.02)])
def test_equal_seeds_give_equal_placements(num_ops, work):
    """One worker, and two that take turns and come to no end."""
    problem = training_like(num_ops, 2, seed=2)
    assert place(problem, work=work)[0] == place(problem, work=work)[0]


def test_a_large_graph_is_refused_before_anything_is_evaluated():
    problem = training_like(100, 2)
    evaluate = Evaluate(problem)
    with pytest.raises(InputError, match=r"\d+ groups are more than the 50 that cpsat takes"):
        Cpsat(largest=50).place(problem, evaluate)
    assert evaluate.best is None


def test_where_nothing_fits_it_gives_the_nearest_and_says_that_this_is_proved(caplog):
    builder = GraphBuilder("heavy")
    builder.parameter("p", 10**12)
    builder.add("op", "op", ["p"])
    problem = Problem(
        builder.freeze(), training_like(10, 2).cluster, np.array([[0.0, 0.0], [1.0, 1.0]])
    )
    with caplog.at_level(logging.INFO, logger="roost.placers.cpsat"):
        _, timeline = place(problem)
    assert not timeline.feasible
    assert "nothing fits, proved" in caplog.text


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_graph_of_one_op_and_one_of_parameters_only(num_devices):
    cluster = training_like(10, num_devices).cluster
    builder = GraphBuilder("one")
    builder.add("op")
    assert place(Problem(builder.freeze(), cluster, np.ones((1, num_devices))))[1].step_time == 1.0
    resting = GraphBuilder("resting")
    resting.parameter("p", 5)
    assert place(Problem(resting.freeze(), cluster, np.zeros((1, num_devices))))[1].step_time == 0.0
