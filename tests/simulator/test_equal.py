"""The compiled simulator equals the reference, bit for bit."""

import numpy as np
import pytest

from roost.simulator import compiled, reference
from roost.testing.problems import nasty

CASES = 1500
CHUNK = 100


def assert_same(found, expected):
    assert found.step_time == expected.step_time
    assert found.peak_memory.tolist() == expected.peak_memory.tolist()
    assert found.num_transfers == expected.num_transfers
    assert found.feasible == expected.feasible
    assert found.missing.tolist() == expected.missing.tolist()


def assert_same_in_full(found, expected):
    assert_same(found, expected)
    for column in ("device", "start", "finish"):
        assert np.array_equal(getattr(found, column), getattr(expected, column)), column
    for column in ("tensor", "source", "target", "kind", "start", "finish"):
        assert np.array_equal(getattr(found.transfers, column), getattr(expected.transfers, column)), column
    for column in ("device", "time", "held"):
        assert np.array_equal(getattr(found.memory, column), getattr(expected.memory, column)), column


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_one_placement(first):
    for seed in range(first, first + CHUNK):
        problem, placement = nasty(seed)
        expected = reference.simulate(problem, placement)
        try:
            assert_same(compiled.simulate(problem, placement), expected)
            assert_same_in_full(compiled.simulate(problem, placement, full=True), expected)
        except AssertionError as error:
            raise AssertionError(f"nasty({seed}): {error}") from error
