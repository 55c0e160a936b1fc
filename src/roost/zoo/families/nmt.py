"""Translation models whose lengths, layers and batch vary.

After the family `nmt` of Placeto (arXiv 1906.08879), which varies the length and the batch; its
ranges are not known to us, and these are our own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np

from roost.zoo.families._random_model import RandomModel
from roost.zoo.nmt import Nmt


@dataclass(frozen=True)
class NmtFamily(Nmt, RandomModel):
    """A translation model with lengths, layers and batch drawn at random."""

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        return cls(
            batch=int(rng.choice([32, 64, 128, 256])),
            length=int(rng.integers(8, 33)),
            target_length=int(rng.integers(8, 33)),
            layers=int(rng.integers(1, 5)),
            bidirectional=bool(rng.integers(2)),
        )

    def shrunk(self) -> Self:
        return dataclasses.replace(
            self,
            batch=2,
            hidden=8,
            vocab=30,
            length=self.length // 4,
            target_length=self.target_length // 4,
        )
