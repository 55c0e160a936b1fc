"""Read-only arrays and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.errors import InputError

Array = npt.NDArray[Any]


def frozen(values: Any, dtype: type[np.generic], shape: tuple[int, ...], what: str) -> Array:
    """A read-only contiguous copy of the given type and shape; `what` names it in the error.

    Raises InputError if a value would change: it is out of range, a fraction, or no number.
    """
    array = exact(values, dtype, what)
    if array.shape != shape:
        raise InputError(f"{what} must have shape {list(shape)}, not {list(array.shape)}")
    array.flags.writeable = False
    return array


def exact(values: Any, dtype: type[np.generic], what: str) -> Array:
    """A contiguous array of the given type with exactly these values.

    It is a copy, unless the given array cannot change.
    """
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:  # rows of unequal length
        raise InputError(f"{what}: {error}") from error
    flags = given.flags
    if given.dtype == dtype and not flags.writeable and flags.owndata and flags.c_contiguous:
        return given
    wanted = np.dtype(dtype)
    if given.dtype.kind not in "iuf" and given.size:
        raise InputError(f"{what} must be numbers, not {given.dtype}")
    with np.errstate(all="ignore"):
        array = np.array(given, dtype=wanted, order="C")
    if wanted.kind == "i" and given.dtype != wanted and given.size:
        least = np.iinfo(wanted).min
        most = np.iinfo(wanted).max
        wrong = (given < least) | (given > most) | ~np.isfinite(given) | (array != given)
        if wrong.any():
            raise InputError(
                f"{what} has {given[wrong].ravel()[0]}; it must be whole, from {least} to {most}"
            )
    return array


def check_figures(values: Array, what: str, names: tuple[str, ...]) -> None:
    """Raise InputError, with the name of the op, if a figure is negative or not finite."""
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        value = values[first].item()
        raise InputError(
            f"{what} of op {names[first[0]]!r} is {value}; it must be finite and not negative"
        )


def digest(parts: Iterable[object]) -> str:
    """A short name for a value: 16 hex digits that differ if any part differs."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        sha.update(f"{len(data)}:".encode())
        sha.update(data)
    return sha.hexdigest()[:16]


def state_digest(state: Mapping[str, Any]) -> str:
    """The digest of named arrays in any order. It covers names, types, shapes and values."""
    arrays = ((name, np.asarray(state[name])) for name in sorted(state))
    return digest(
        part for name, array in arrays for part in (name, array.dtype.str, array.shape, array)
    )


class FileArrays(dict[str, Array]):
    """Named arrays of a file. Errors about them begin with `where`."""

    def __init__(self, arrays: Mapping[str, Array], where: str) -> None:
        super().__init__(arrays)
        self.where = where


def wrong_array(state: Mapping[str, Any], name: str, text: str) -> InputError:
    """The error for an array of a saved state; it names the file where there is one."""
    where = f"{state.where}: " if isinstance(state, FileArrays) else ""
    return InputError(f"{where}tensor {name!r} {text}")


def taken(
    state: Mapping[str, Any],
    name: str,
    shape: tuple[int | None, ...],
    kinds: str = "f",
    *,
    least: float = -np.inf,
    most: float = np.inf,
    finite: bool = True,
) -> Array:
    """An array of a saved state. Raises InputError, with its name, if it is not as expected.

    It must have this shape (None: any length), one of these kinds of numbers, and values between
    `least` and `most`. Compiled loops do not check what they get: every array goes through here.
    """
    if name not in state:
        raise wrong_array(state, name, "is missing")
    array = np.asarray(state[name])
    if array.dtype.kind not in kinds:
        raise wrong_array(state, name, f"is {array.dtype}, which is the wrong kind of number")
    fits = len(array.shape) == len(shape) and all(
        want is None or has == want for has, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise wrong_array(state, name, f"has shape {list(array.shape)}, not [{expected}]")
    if np.isnan(array).any() or (finite and not np.isfinite(array).all()):
        raise wrong_array(state, name, "has a number that is not finite")
    if (array < least).any() or (array > most).any():
        raise wrong_array(state, name, f"has a number that is not between {least:g} and {most:g}")
    return array


def taken_devices(
    state: Mapping[str, Any], name: str, allowed: Array, rows: tuple[int | None, ...] = ()
) -> Array:  # [*rows, units] i4
    """Devices of a saved state, each one that its unit allows; `allowed` is [units, devices]."""
    num_units, num_devices = allowed.shape
    array = taken(state, name, (*rows, num_units), "iu", least=0, most=num_devices - 1)
    if not allowed[np.arange(num_units), array].all():
        raise wrong_array(state, name, "puts something on a device that it does not allow")
    return array.astype(np.int32)
