"""The base classes of all exporters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from roost.core import files
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError
from roost.transforms.microbatch import copies_of

if TYPE_CHECKING:
    from torch import nn


def refuse_unrolled(problem: Problem) -> None:
    """Raise for a step in microbatches, or requests, if a form has one place for each module."""
    if (copies_of(problem.graph) > 0).any():
        raise InputError(
            f"graph {problem.graph.name!r} has several copies of each module, which may be in "
            "several places, and this form has one place for a module; export it with --format "
            "microbatches"
        )


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


@dataclass(frozen=True)
class TimedExport(Export):
    """An export whose rounded placement is simulated."""

    agreement: float  # share of the ops on the placement's device
    step_time: float  # seconds, simulated, with whole modules
    placed_time: float  # seconds, simulated, under the placement

    @property
    def cost(self) -> float:
        """The step time as a multiple of the placement's."""
        return self.step_time / self.placed_time if self.placed_time > 0 else 1.0

    def time_facts(self) -> dict[str, Any]:
        """The facts about agreement and time."""
        names = ("agreement", "step_time", "placed_time", "cost")
        return {name: getattr(self, name) for name in names}
