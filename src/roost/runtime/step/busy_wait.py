"""A short wait that keeps a core awake without Python's lock; `device_threads.look` calls it."""

from __future__ import annotations

from roost.simulator.kernels.base import compiled


def _pause(turns: int) -> int:
    """Compute for some turns; the result keeps the compiler from dropping the loop."""
    state = 1
    for _ in range(turns):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


pause = compiled(_pause)
