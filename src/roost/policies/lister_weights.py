"""Shapes and first values of the weights of `lister`; `lister_network.py` computes with them."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array

HIDDEN = 48
_FIRST_OUT = 0.02  # spread of the first output weights


def weight_shapes(num_seen: int, num_known: int) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, for so many features of a device (seen) and of a unit (known)."""
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


def new_weights(
    rng: np.random.Generator, num_seen: int, num_known: int, rule: Array
) -> dict[str, Array]:
    """Random layers that hardly count at first, so that the linear rule [seen] decides."""
    weights = {}
    for name, shape in weight_shapes(num_seen, num_known).items():
        inputs = num_seen + num_known if name in ("known", "seen") else HIDDEN
        is_matrix = len(shape) == 2
        layer = rng.normal(0.0, (2.0 / inputs) ** 0.5, shape) if is_matrix else np.zeros(shape)
        weights[name] = layer.astype(np.float32)
    weights["out"] = rng.normal(0.0, _FIRST_OUT, HIDDEN).astype(np.float32)
    weights["skip"] = np.asarray(rule, dtype=np.float32)
    return weights
