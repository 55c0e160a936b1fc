"""Base class of the members of a family."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np

from roost.zoo._settings import ModelSettings


@dataclass(frozen=True)
class RandomModel(ModelSettings):
    """The settings of a model that is drawn at random."""

    @classmethod
    @abstractmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """A random member."""

    @abstractmethod
    def shrunk(self) -> Self:
        """The same architecture at a size for tests."""
