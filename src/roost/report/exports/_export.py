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

TIME_FACTS = ("agreement", "step_time", "placed_time", "cost")  # of exports with a step time


class Export(ABC):
    """A placement as the file of another tool; `str` tells the cost of the rounding."""

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module | None, problem: Problem, placement: Placement) -> Self:
        """The export of a placement; without the model it covers the modules of the graph."""

    @abstractmethod
    def text(self) -> str:
        """The content of the file."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Its fields for programs, as `roost export --json` prints them."""

    def save(self, path: str | Path) -> None:
        """Write the file."""
        files.write_bytes(Path(path), self.text().encode())
