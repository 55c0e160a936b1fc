"""A line of the function that a launcher runs in a step; `device_code.py` writes such lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

# Something that one line gives to another: kind (value, copy or read), op or copy, and device.
Key = tuple[str, int, int]


@dataclass
class Line:
    """A statement: `name = call(...)`, or a call alone."""

    op: int  # that it belongs to
    call: Any  # the function
    args: tuple[Any, ...]  # a Ref for a name, or a constant; nested in lists, tuples and dicts
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    node: fx.Node | None = None  # of the program, if the line computes one
    gives: tuple[Key, ...] = ()
    needs: tuple[tuple[Key, int], ...] = ()  # the line waits until each was given so many times

    @property
    def read(self) -> set[str]:
        """The names that the line reads."""
        return {ref.name for ref in refs((self.args, self.kwargs))}


@dataclass(frozen=True)
class Ref:
    """A name in the source."""

    name: str


def refs(value: Any) -> Iterable[Ref]:
    """Give all references in an argument."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from refs(each)
