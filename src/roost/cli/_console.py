"""What every verb prints with: results on standard output, words about them on standard error.

Rich decides on colour and width: no colour without a terminal or with NO_COLOR. Without a terminal
lines are as long as they are, with nothing after them, unless COLUMNS says otherwise. Rich is
imported when something is printed.
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

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_SLOW_SECONDS = 3.0  # after which it is said why something takes so long
_PIPE_SECONDS = 10.0  # between two lines where there is no terminal
_NO_WIDTH = 100_000
_LONG_WORK = ("roost.simulator.compiling", "roost.presets.probe")  # whose words are shown

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, in seconds and bytes.")
]


def console(stderr: bool = False) -> Console:
    """Names come from files: no markup or emoji is looked for in them, and nothing in them steers
    the terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **settings):
                yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to stop.
        stream.reconfigure(errors="replace")
    out = Plain(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _NO_WIDTH  # who reads it folds it
    return out


def harmless(text: str) -> str:
    """The text with escapes written out where it has characters that would steer a terminal."""
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


def show_json(value: object) -> None:
    """Print for programs: one object on standard output."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def note(text: str) -> None:
    """A line beside the result, on standard error."""
    console(stderr=True).print(text, soft_wrap=True)


def error(text: str) -> None:
    """One line on standard error, however long."""
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", harmless(" ".join(text.splitlines())))
    console(stderr=True).print(line, soft_wrap=True)


class Waiting:
    """A live line; `slow` is added once it takes long."""

    def __init__(self, text: str, slow: str = "") -> None:
        self.text, self.slow, self.began = text, slow, time.monotonic()
        self.doing = ""  # what the library says that it does

    def __rich__(self) -> Text:
        """As text: a spinner would look for markup in a string. Cut: a live line that folds is
        drawn over and over."""
        from rich.text import Text

        slow = self.slow if time.monotonic() - self.began > _SLOW_SECONDS else ""
        more = self.doing or slow
        return Text(
            f"{self.text} ({more})" if more else self.text, no_wrap=True, overflow="ellipsis"
        )


_drawn: list[Waiting] = []  # the lines that are on the terminal now, the innermost last


@contextmanager
def drawn(out: Console, line: Waiting, live: RenderableType | None = None) -> Iterator[None]:
    """Draw a line, or what stands for it, until the end; what the library says that it does is
    added to it."""
    _drawn.append(line)
    try:
        with out.status(line if live is None else live):
            yield
    finally:
        _drawn.remove(line)


class Doing(logging.Handler):
    """What the library says that it does while one waits: in the line that is drawn, or a line of
    its own."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _drawn and console(stderr=True).is_terminal:
            _drawn[-1].doing = text
        else:
            note(text)


def listen() -> None:
    """Show what the library says of long work, and nothing else that it logs below a warning."""
    for name in _LONG_WORK:
        logger = logging.getLogger(name)
        if not any(isinstance(each, Doing) for each in logger.handlers):
            logger.addHandler(Doing(logging.INFO))
            logger.setLevel(logging.INFO)


@contextmanager
def working(text: str, slow: str = "") -> Iterator[None]:
    """Say on standard error what takes so long, while it does; only on a terminal."""
    with drawn(console(stderr=True), Waiting(text, slow)):
        yield


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """As `working`, with how many of how many are done, once that is told; without a terminal a
    line now and then."""
    line, out, told = Waiting(text), console(stderr=True), time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        line.text = f"{text}: {done:,} of {total:,}"
        if not out.is_terminal and time.monotonic() - told >= _PIPE_SECONDS:
            told = time.monotonic()
            note(line.text)

    with drawn(out, line):
        yield tell


def table(columns: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """An empty table; columns of numbers are aligned to the right. Nothing is ever cut: it
    folds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, collapse_padding=True
    )
    right = set(numbers)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def plural(count: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
