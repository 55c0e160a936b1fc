"""Going on from a checkpoint, with errors that name its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.core.arrays import Array
from roost.errors import InputError


def restore(course: Any, state: Mapping[str, Array], checkpoint: Any) -> None:
    """`course.restore(state)`; what is wrong with the state is told with where it is from."""
    try:
        course.restore(state)
    except InputError as error:
        where = getattr(checkpoint, "path", "the checkpoint")
        raise InputError(f"{where}: {error}; remove it to begin anew") from None
