"""Time that passes with a core in use and without Python's lock."""

from __future__ import annotations

from roost.simulator.kernels.base import compiled


def _pause(turns: int) -> int:
    """Does nothing of use, so many times; what it returns keeps the compiler from leaving that
    out."""
    state = 1
    for _ in range(turns):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


pause = compiled(_pause)
