"""Classes of ops, by words in their kind."""

from __future__ import annotations

# Classes in the `efficiency` of a device, each with a word that its kinds contain. The class
# `memory` is the share of the memory bandwidth that is attained. Other ops attain all.
CLASSES = {"attention": "attention", "conv": "conv", "matmul": "mm", "recurrent": "lstm"}


def class_of(kind: str) -> str:
    """The class of an op: `addmm` is a matmul, `convolution_backward` a conv."""
    words = kind.lower()
    for name, word in CLASSES.items():
        if word in words or name in words:
            return name
    return "other"
