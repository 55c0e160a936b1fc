"""Advantages: normalised gains, or what a schedule adds to the best of several."""

from itertools import combinations

import numpy as np
import pytest

from roost.learners.recorded import _added_to_best, advantages


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_what_is_added_to_the_best_is_the_mean_over_all_sets(k):
    value = np.random.default_rng(k).normal(size=5)
    expected = [
        np.mean([max(value[list(s)]) for s in combinations(range(5), k) if i in s])
        for i in range(5)
    ]
    assert _added_to_best(value, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 3])
def test_a_lower_cost_is_never_a_smaller_advantage(k):
    cost = np.array([3.0, 1.0, 2.0, 2.5, 9.0])
    gain = advantages(cost, k)
    assert (np.diff(gain[np.argsort(cost)]) <= 1e-12).all()
    assert gain[1] > 0
    assert np.abs(gain).max() <= 3


def test_equal_costs_teach_nothing():
    assert not advantages(np.full(4, 2.0), 1).any()
    assert not advantages(np.full(4, 2.0), 3).any()
