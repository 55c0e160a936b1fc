"""Progress of timing as log lines, used if the caller gives no `progress`."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

_SECONDS = 5.0  # between two lines


class ProgressLog:
    """Logs the number of timed ops: at the first, at the last, and every few seconds."""

    def __init__(self) -> None:
        self._last = -_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last >= _SECONDS:
            self._last = now
            log.info("timing ops: %d of %d", done, total)
