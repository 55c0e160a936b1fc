"""How far timing has come, for whoever reads logs and gave no other way to be told."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

_SECONDS = 5.0  # between two lines


class Logged:
    """Says how many ops are timed: of the first, of the last, and now and then."""

    def __init__(self) -> None:
        self._told = -_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._told >= _SECONDS:
            self._told = now
            log.info("timing ops: %d of %d", done, total)
