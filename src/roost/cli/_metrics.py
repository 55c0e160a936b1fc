"""The notes of learning in files: a line of JSON for each, and TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roost.errors import InputError, MissingExtra

METRICS = "metrics.jsonl"
EVENTS = "events"


class Metrics:
    """`metrics.jsonl` in a folder. The file is written with the first note."""

    def __init__(self, folder: Path, tensorboard: bool = False, going_on: bool = False) -> None:
        self.path = folder / METRICS
        self.count = 0
        self._events = folder / EVENTS if tensorboard else None
        self._writer: Any = None
        if self._events is not None:
            _tensorboard()
            if self._events.exists() and not self._events.is_dir():
                raise InputError(
                    f"{self._events}: is a file; TensorBoard needs a folder there; move it away"
                )
        self._overlaps = going_on  # the file may have notes that come again
        if not going_on:
            self.path.unlink(missing_ok=True)

    def add(self, figures: Mapping[str, float]) -> None:
        """Write a note. Its `trials`, if it has them, give its position."""
        import msgspec

        if self._overlaps and "trials" in figures:
            self._drop_from(figures["trials"])
        self._overlaps = False
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(dict(figures)) + b"\n")
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror or error}"
            ) from error
        if self._events is not None and self._writer is None:
            self._writer = _tensorboard()(str(self._events))
        for name, value in figures.items() if self._writer is not None else ():
            self._writer.add_scalar(name, value, int(figures.get("trials", self.count)))
        self.count += 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _drop_from(self, trials: float) -> None:
        """Drop the notes that come again: those after the state from which a search goes on."""
        import msgspec

        from roost.core.files import write_bytes

        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = []
        for line in lines:
            try:
                before = msgspec.json.decode(line, type=dict[str, Any]).get("trials")
            except (msgspec.DecodeError, UnicodeDecodeError):
                if line.endswith(b"\n"):
                    raise InputError(
                        f"{self.path}: has a line that Roost did not write; move the file away"
                    ) from None
                break
            if not isinstance(before, int | float) or before >= trials:
                break
            kept.append(line)
        if len(kept) < len(lines):
            write_bytes(self.path, b"".join(kept))


def _tensorboard() -> Any:
    """TensorBoard's writer class."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard") from None
    return SummaryWriter
