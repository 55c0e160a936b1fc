"""The base class of all parts of files, and the fields that they share with nouns."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from roost.errors import InputError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Figure = Annotated[float, msgspec.Meta(ge=0)]
Quantity = int | float | str  # a number in base units, or a text such as "12GiB" or "20us"


class File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A part of a file. An unknown field is an error."""


_File = TypeVar("_File", bound=File)


def file_of(kind: type[_File], noun: object, **changed: Any) -> _File:
    """A part of a file. Its fields are those of a noun with the same names, but for `changed`."""
    names = [name for name in kind.__struct_fields__ if name not in changed and hasattr(noun, name)]
    return kind(**{name: getattr(noun, name) for name in names}, **changed)


def fields_of(file: File, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a part of a file by name, for a noun that has the same."""
    names = [name for name in file.__struct_fields__ if name not in without]
    return {name: getattr(file, name) for name in names}


def check_version(version: int, what: str) -> None:
    """Check the version of a part inside another file. Readers of files check the outer one."""
    if version != 1:
        raise InputError(f"{what}.version: {version} is not known; this Roost reads version 1")
