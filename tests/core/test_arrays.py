"""Arrays that nobody can change, with exactly the values that were given."""

from __future__ import annotations

import numpy as np
import pytest

from roost.core.arrays import check_figures, exact, frozen, taken
from roost.errors import InputError


def test_an_array_that_can_change_is_copied():
    given = np.arange(3.0)
    copy = frozen(given, np.float64, (3,), "x")
    given[0] = 7.0
    assert copy.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        copy[0] = 1.0
    assert frozen(copy, np.float64, (3,), "x") is copy
    columns = np.arange(6.0).reshape(2, 3).T
    columns.flags.writeable = False
    assert exact(columns, np.float64, "x").flags.c_contiguous
    view = np.arange(3.0)[:2]
    view.flags.writeable = False  # but what it shows can change
    assert exact(view, np.float64, "x") is not view


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([-(2**31) - 1], np.int32),
        ([2**31], np.int32),
        ([0.5], np.int32),
        ([np.nan], np.int64),
        ([np.inf], np.int64),
        ([128], np.int8),
        (["a"], np.float64),
        ([True], np.int32),
        ([[1], [1, 2]], np.float64),
    ],
)
def test_a_value_that_would_change_is_refused(values, dtype):
    with pytest.raises(InputError, match="x"):
        exact(values, dtype, "x")


def test_values_at_the_limits_are_exact():
    assert exact([-128, 127], np.int8, "x").tolist() == [-128, 127]
    assert exact([2.0], np.int32, "x").dtype == np.int32
    assert exact([], np.int32, "x").shape == (0,)


def test_another_shape_is_refused():
    with pytest.raises(InputError, match=r"x must have shape \[2\], not \[3\]"):
        frozen([1, 2, 3], np.int32, (2,), "x")


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_figure_that_is_none_names_its_op(value):
    with pytest.raises(InputError, match="'b'"):
        check_figures(np.array([0.0, value]), "flop", ("a", "b"))


@pytest.mark.parametrize(
    ("array", "shape", "message"),
    [
        (np.zeros(2), (3,), r"has shape \[2\], not \[3\]"),
        (np.zeros((2, 3)), (None,), r"has shape \[2, 3\], not \[any\]"),
        (np.zeros(2, int), (2,), "wrong kind of number"),
        (np.array([0.0, np.nan]), (2,), "not finite"),
    ],
)
def test_a_saved_array_of_another_kind_is_refused(array, shape, message):
    with pytest.raises(InputError, match=message):
        taken({"x": array}, "x", shape)


def test_a_saved_array_is_taken():
    assert taken({"x": np.zeros((2, 3))}, "x", (None, 3)).shape == (2, 3)
    assert taken({"x": np.zeros(2, int)}, "x", (2,), "i").dtype.kind == "i"
    with pytest.raises(InputError, match="'y' is missing"):
        taken({}, "y", ())
