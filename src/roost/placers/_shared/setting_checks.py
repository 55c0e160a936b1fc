"""Checks of settings, made when a placer is: a bad setting raises InputError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roost.errors import InputError


def check_whole(settings: Any, least: int, *names: str) -> None:
    """These fields are whole numbers, at least so large."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def check_number(settings: Any, least: float, most: float, *names: str) -> None:
    """These fields are numbers between these, both included."""
    for name in names:
        value = getattr(settings, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | np.number)
            or not least <= value <= most
        ):
            raise InputError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}")


def check_choice(settings: Any, name: str, choices: Sequence[object]) -> None:
    """This field is one of these."""
    value = getattr(settings, name)
    if value not in choices or type(value) is not type(choices[0]):
        raise InputError(
            f"{name} is {value!r}; it must be one of {', '.join(str(choice) for choice in choices)}"
        )
