"""Read-only arrays, and the digests of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from roost.errors import InputError

Array = npt.NDArray[Any]


def frozen(values: Any, dtype: type[np.generic], shape: tuple[int, ...], what: str) -> Array:
    """A read-only contiguous copy of the given type and shape; `what` names it in the error."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        array = np.ascontiguousarray(values)
    else:
        try:
            array = np.array(values, dtype=dtype, order="C")
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{what}: {error}") from error
    if array.shape != shape:
        raise InputError(f"{what} must have shape {list(shape)}, not {list(array.shape)}")
    array.flags.writeable = False
    return array


def check_figures(values: Array, what: str, names: tuple[str, ...]) -> None:
    """Every figure is finite and not negative; the error names the first op where one is not."""
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        value = values[first].item()
        raise InputError(f"{what} of op {names[first[0]]!r} is {value}; it must be finite and not negative")


def digest(parts: Iterable[object]) -> str:
    """A short name for a value: 16 hex digits that differ when any part differs."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        sha.update(f"{len(data)}:".encode())
        sha.update(data)
    return sha.hexdigest()[:16]
