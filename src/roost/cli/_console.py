"""Output of all verbs: results on standard output, progress and notes on standard error.

Rich chooses colour and width: no colour without a terminal or with NO_COLOR. Without a terminal
lines are not folded, unless COLUMNS is set. Rich is imported when a verb prints.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli._text import assembled, live_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_SLOW_SECONDS = 3.0  # after these a live line gives the reason
_PIPE_SECONDS = 10.0  # between two lines where there is no terminal
_NO_WIDTH, _USUAL_WIDTH = 100_000, 80
_LONG_WORK = ("roost.simulator.compiling", "roost.presets.probe")  # loggers that are shown

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, in seconds and bytes.")
]


def console(stderr: bool = False) -> Console:
    """A console without markup or emoji. Names from files cannot steer the terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **settings):
                yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # A name may have characters that the terminal lacks.
        stream.reconfigure(errors="replace")
    out = Plain(stderr=stderr, markup=False, emoji=False, highlight=False)
    if out.width < 1:  # COLUMNS=0: no width is known
        out.width = _USUAL_WIDTH if out.is_terminal else _NO_WIDTH
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _NO_WIDTH  # the reader folds lines
    return out


def harmless(text: str) -> str:
    """The text with control characters written as escapes."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def show(*parts: RenderableType) -> None:
    """Print for people, on standard output."""
    out = console()
    for part in parts:
        if out.is_terminal:
            out.print(part)
            continue
        with out.capture() as lines:
            out.print(part)
        for line in lines.get().splitlines():
            typer.echo(line.rstrip())


def answer(as_json: bool, facts: object, report: Iterable[RenderableType]) -> None:
    """Print a result: as JSON, or the report for people."""
    if as_json:
        show_json(facts)
    else:
        show(*report)


def show_json(value: object) -> None:
    """Print for programs: one JSON object on standard output."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def note(text: str) -> None:
    """A line beside the result, on standard error."""
    console(stderr=True).print(text, soft_wrap=True)


def error(text: str) -> None:
    """One line on standard error, however long."""

    line = assembled(("error:", "bold red"), " ", harmless(" ".join(text.splitlines())))
    console(stderr=True).print(line, soft_wrap=True)


class LiveLine:
    """A line that says what the command does; `slow` is added after some seconds."""

    def __init__(self, text: str, slow: str = "") -> None:
        self.text = text
        self.slow = slow
        self.began = time.monotonic()
        self.message = ""  # the last one of the library

    def __rich__(self) -> Text:
        """The line as text: a spinner would look for markup in a string."""
        slow = self.slow if time.monotonic() - self.began > _SLOW_SECONDS else ""
        more = self.message or slow
        return live_line(f"{self.text} ({more})" if more else self.text)


_drawn: list[LiveLine] = []  # the lines that are on the terminal now, the innermost last


@contextmanager
def drawn(out: Console, line: LiveLine, live: RenderableType | None = None) -> Iterator[None]:
    """Draw a line, or `live` in its place. Messages of the library are added to the line."""
    _drawn.append(line)
    try:
        with out.status(line if live is None else live):
            yield
    finally:
        _drawn.remove(line)


class LibraryMessages(logging.Handler):
    """Shows messages of the library: in the live line, or in a line of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _drawn and console(stderr=True).is_terminal:
            _drawn[-1].message = text
        else:
            note(text)


def listen() -> None:
    """Show messages of the library on long work, and no others below a warning."""
    for name in _LONG_WORK:
        logger = logging.getLogger(name)
        if not any(isinstance(each, LibraryMessages) for each in logger.handlers):
            logger.addHandler(LibraryMessages(logging.INFO))
            logger.setLevel(logging.INFO)


@contextmanager
def working(text: str, slow: str = "") -> Iterator[None]:
    """Draw a live line on standard error, if that is a terminal."""
    with drawn(console(stderr=True), LiveLine(text, slow)):
        yield


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a live line with a count. Without a terminal print a line now and then."""
    line = LiveLine(text)
    out = console(stderr=True)
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        line.text = f"{text}: {done:,} of {total:,}"
        if not out.is_terminal and time.monotonic() - told >= _PIPE_SECONDS:
            told = time.monotonic()
            note(line.text)

    with drawn(out, line):
        yield tell


def table(columns: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """An empty table. Columns of `numbers` are aligned to the right; long cells fold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, collapse_padding=True
    )
    right = set(numbers)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made
