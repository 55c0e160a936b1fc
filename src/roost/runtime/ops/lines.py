"""A line of the function that a device runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

# Something that one line leaves for another: a value, a copy, word that one was read.
Key = tuple[str, int, int]


@dataclass
class Line:
    """A statement: `name = call(...)`, or a call alone."""

    op: int
    call: Any  # the function
    args: tuple[Any, ...]  # Ref for a name, or a constant; nested in lists, tuples and dicts
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    node: fx.Node | None = None  # of the program, that this is
    gives: tuple[Key, ...] = ()
    needs: tuple[tuple[Key, int], ...] = ()  # it waits until each was given so many times

    @property
    def read(self) -> set[str]:
        return {ref.name for ref in refs((self.args, self.kwargs))}


@dataclass(frozen=True)
class Ref:
    """A name in the source."""

    name: str


def refs(value: Any) -> Iterable[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from refs(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from refs(each)
