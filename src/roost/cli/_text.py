"""Texts for people: quantities with units, and styled text.

Each function imports what it needs when it is called, so that `roost --help` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def show_bytes(size: float) -> str:
    from roost.core import units

    return units.show_bytes(size)


def show_seconds(seconds: float) -> str:
    from roost.core import units

    return units.show_seconds(seconds)


def show_count(count: float, unit: str = "") -> str:
    from roost.core import units

    return units.show_count(count, unit)


def styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style)


def assembled(*parts: Any) -> Text:
    """Text of several parts: texts, or pairs of a text and a style."""
    from rich.text import Text

    return Text.assemble(*parts)


def live_line(text: str) -> Text:
    """A line that is cut at the width of the terminal: one that folds is drawn over and over."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def plural(count: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
