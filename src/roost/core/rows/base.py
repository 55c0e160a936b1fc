"""What every file has in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

from roost.errors import InputError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Figure = Annotated[float, msgspec.Meta(ge=0)]
Quantity = int | float | str  # a number in base units, or a text such as "12GiB" or "20us"


class File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What every part of a file has in common: a field nobody knows is an error, not ignored."""


def check_version(version: int, what: str) -> None:
    if version != 1:  # inside another file, where the header has not been looked at
        raise InputError(f"{what}.version: {version} is not known; this Roost reads version 1")
