"""Classes of op, told by their kind."""

from __future__ import annotations

# Classes of op that a device's `efficiency` may speak of, with a word that tells them by their
# kind. The class `memory` is the share of the memory bandwidth that is attained. What is in no
# class, or not mentioned, attains all.
CLASSES = {"attention": "attention", "conv": "conv", "matmul": "mm", "recurrent": "lstm"}


def class_of(kind: str) -> str:
    """The class of an op by its kind: `addmm` is a matmul, `convolution_backward` a conv."""
    words = kind.lower()
    for name, word in CLASSES.items():
        if word in words or name in words:
            return name
    return "other"
