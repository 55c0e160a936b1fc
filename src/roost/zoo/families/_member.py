"""What the members of every family have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np

from roost.zoo._settings import Settings


@dataclass(frozen=True)
class Member(Settings):
    """A model that was drawn at random."""

    @classmethod
    @abstractmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """A random member."""

    @abstractmethod
    def shrunk(self) -> Self:
        """The same architecture at a size for tests."""
