"""The base class of all exporters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from roost.core import files
from roost.core.placement import Placement
from roost.core.problem import Problem

if TYPE_CHECKING:
    from torch import nn


class Export(ABC):
    """A placement as the file of another tool. Its text (`str`) says what the rounding costs."""

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> Self:
        """The export of a placement. Without the model it covers what the graph knows."""

    @abstractmethod
    def text(self) -> str:
        """The content of the file."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Its fields for programs, as `roost export --json` prints them."""

    def save(self, path: str | Path) -> None:
        """Write the file."""
        files.write_bytes(Path(path), self.text().encode())
