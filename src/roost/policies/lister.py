"""The network of `lister`: which weights it has, and what it begins with."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array

HIDDEN = 48


def shapes(num_seen: int, num_known: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the network."""
    return {
        "known": (num_known, HIDDEN),
        "bias": (HIDDEN,),
        "seen": (num_seen, HIDDEN),
        "context": (HIDDEN, HIDDEN),
        "inner": (HIDDEN, HIDDEN),
        "inner_bias": (HIDDEN,),
        "out": (HIDDEN,),
        "skip": (num_seen,),
    }


def fresh(rng: np.random.Generator, num_seen: int, num_known: int, rule: Array) -> dict[str, Array]:
    """New weights: random layers that do not speak yet, so that the linear rule [seen] alone
    decides."""
    found: dict[str, Array] = {}
    for name, shape in shapes(num_seen, num_known).items():
        scale = (2.0 / (num_seen + num_known if name in ("known", "seen") else HIDDEN)) ** 0.5
        found[name] = (
            rng.normal(0.0, scale, shape) if len(shape) == 2 else np.zeros(shape)
        ).astype(np.float32)
    found["out"] = rng.normal(0.0, 0.02, HIDDEN).astype(np.float32)
    found["skip"] = np.asarray(rule, dtype=np.float32)
    return found
